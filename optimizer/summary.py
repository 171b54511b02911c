"""The table at the end of a run: per attempt predicted, traced and measured saving, verdict and reason; the total.

Not for: the full report (reports/html), or computing anything that the ledger does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimizer import state
from optimizer.ledger import Line
from reports import run_data

_STAGES = (("confirm", "confirmed"), ("decide", "decided"), ("screen", "screened"))
_COLOURS = {"accept": "green", "reject": "red", "undecided": "yellow", "parked": "magenta"}


def table(lines: Sequence[Line]) -> RenderableType:
    """Every attempt in one row, then the total."""
    found = Table(title="Attempts (microseconds per token)", title_justify="left", title_style="bold", box=None)
    for head in ("", "patch", "predicted", "traced", "measured", "time ratio, 95 %", "verdict", "why"):
        found.add_column(head, justify="right" if head in ("predicted", "traced", "measured") else "left", overflow="fold")
    for attempt in state.attempts(lines):
        found.add_row(*_row(attempt))
    return Group(found, Text(total(lines), style="bold"))


def _row(attempt: state.Attempt) -> list[Any]:
    proposed = attempt.data("proposed")
    measured = _measured(attempt)
    end = attempt.end["data"] if attempt.end else {}
    verdict = str(attempt.verdict or "open")
    names = " + ".join(dict.fromkeys(p["mechanism"] for p in proposed))
    return [
        str(attempt.number),
        names,
        _us(sum(p["predicted_us"] for p in proposed)),
        _us(end.get("traced_us")),
        _us(measured.get("measured_us")),
        ratio(measured.get("ratio"), measured.get("ci95")),
        Text(verdict, style=_COLOURS.get(verdict, "")),
        _why(attempt, end, measured),
    ]


def _measured(attempt: state.Attempt) -> dict[str, Any]:
    """What the latest stage that has pairs says: as it was judged, or by its pairs where the attempt ended within it."""
    for stage, judged in _STAGES:
        if said := attempt.data(judged):
            return said[-1]
        pairs = run_data.measure(p for p in attempt.data("pair") if p.get("stage") == stage and p.get("key") == attempt.key)
        if pairs.ratio is not None and pairs.a_us is not None and pairs.b_us is not None:
            return {"ratio": pairs.ratio, "ci95": pairs.ci95, "measured_us": pairs.a_us - pairs.b_us}
    return {}


def _why(attempt: state.Attempt, end: dict[str, Any], measured: dict[str, Any]) -> str:
    if attempt.end is not None and attempt.end["kind"] == "accepted":
        return str(measured.get("why", ""))
    first = str(end.get("detail") or "").partition("\n")[0]
    reason = end.get("reason")
    where = f"{end['stage']}: " if end.get("stage") else ""
    return f"{where}{reason + ': ' if reason else ''}{first}"[:160]


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def ratio(value: float | None, ci95: Sequence[float | None] | None) -> str:
    """`0.70 [0.69, 0.71]`; an end that does not exist is left out."""
    if value is None:
        return ""
    ends = [f"{end:.3f}" for end in ci95 or () if end is not None]
    return f"{value:.3f} [{', '.join(ends)}]" if len(ends) == 2 else f"{value:.3f}"


def total(lines: Sequence[Line]) -> str:
    """The headline in words."""
    finished = next((line["data"] for line in reversed(lines) if line["kind"] == "finished"), None)
    accepted = sum(1 for line in lines if line["kind"] == "accepted")
    if not accepted:
        return "No patch was accepted: the engine is as it was."
    head = (finished or {}).get("headline")
    if not head or head.get("ratio") is None:
        product = state.speedup(lines)
        return f"{accepted} patches accepted; product of their confirmations {product:.2f}x (no headline was measured)."
    low, high = (1 / end if end else None for end in reversed(head["ci95"]))
    ends = f" [{low:.2f}, {high:.2f}]" if low and high else ""
    short = f" ({head['pairs']} of {head['planned']} pairs: {head['short']})" if head.get("short") else ""
    rate = f"{1e6 / head['a_us']:.1f} -> {1e6 / head['b_us']:.1f} tok/s"
    text = f"{accepted} accepted: {1 / head['ratio']:.2f}x{ends}, {rate}, from {head['pairs']} fresh pairs{short}"
    bound = (finished or {}).get("bound_us_per_token")
    return text + (f"; reading the weights alone bounds it at {1e6 / bound:,.0f} tok/s here" if bound else "")


def clip(reason: str, parts: int = 3) -> str:
    """A reason of many parts, cut to the first few; the ledger has them all."""
    every = reason.split("; ")
    if len(every) <= parts:
        return reason
    return "; ".join(every[:parts]) + f"; and {len(every) - parts} more, which `optimize status` does not cut"
