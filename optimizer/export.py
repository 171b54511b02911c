"""`optimize export`: the accepted commits as a `git format-patch` series and the text of a pull request.

Every figure in the text is a field of the ledger. Not for: changing anyone's tree (apply.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer import state, summary
from optimizer.ledger import Line
from optimizer.run import Run
from optimizer.serial import write_text

BODY = "PULL_REQUEST.md"


class NothingToExport(Exception):
    """The run accepted no patch."""


def export(run: Run, out: Path) -> list[Path]:
    """Write `0001-*.patch` ... and PULL_REQUEST.md into `out`; returns their paths. Raises NothingToExport."""
    lines = run.ledger.lines()
    final = state.incumbent(lines, run.base)
    if final == run.base:
        raise NothingToExport(f"run {run.request.id} accepted nothing")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        old.unlink()
    made = run.repo.git(
        "format-patch", "--no-signature", "--full-index", "--no-renames", "-o", str(out.resolve()), f"{run.base}..{final}"
    )
    write_text(out / BODY, body(run, lines, final))
    return [*(Path(name) for name in made.splitlines()), out / BODY]


def body(run: Run, lines: Sequence[Line], final: str) -> str:
    """The pull request in Markdown."""
    want = run.request
    parts = [
        f"# {want.target}: {summary.total(lines)}",
        "",
        f"Measured on {want.environment.get('cpu') or want.device}, TP={want.tp}, {want.dtype}, protocol {want.protocol}, "
        f"sandbox {want.sandbox_level}. Gains are ratios of times from fresh launches on fresh prompts, with 95 % "
        "intervals; predicted, traced and measured savings are microseconds per output token.",
        "",
        "| patch | finding | predicted | traced | measured | time ratio, 95 % | gates |",
        "|---|---|---:|---:|---:|---|---|",
        *(_row(attempt, run) for attempt in state.attempts(lines) if _accepted(attempt)),
        "",
    ]
    for commit in run.repo.log(run.base, final):
        title, _, rest = run.repo.message(commit).partition("\n")
        parts += [f"## {title}", "", "```", rest.strip(), "```", ""]
    inside = run.target.directory.relative_to(run.target.root).as_posix()
    what = "the engine's files" if inside == "." else f"`{inside}/`"
    parts += [
        f"Apply with `git am *.patch` where {what} lie at the top of the repository, else with "
        f"`git am --directory=FOLDER *.patch`, FOLDER being the one that holds them.",
        "",
        f"Run {want.id}; ledger head `{lines[-1]['hash']}`; seal `{want.gates_digest}`; weights `{want.weights_sha256}`. "
        f"`optimize verify {want.id}` checks that every patch was judged by the sealed gates.",
        "",
    ]
    return "\n".join(parts)


def _accepted(attempt: state.Attempt) -> bool:
    return attempt.end is not None and attempt.end["kind"] == "accepted"


def _row(attempt: state.Attempt, run: Run) -> str:
    assert attempt.end is not None
    data: dict[str, Any] = attempt.end["data"]
    proposed = attempt.data("proposed")
    stages = sorted({g["stage"] for g in attempt.data("gate") if g["gate"] == "all"})
    rows = data.get("rows") or {}
    shrank = ", ".join(f"{name} {_us(a)} -> {_us(b)}" for name, (a, b) in rows.items())
    cells = [
        " + ".join(p["title"] or p["mechanism"] for p in proposed),
        shrank or ", ".join(data["finding_ids"]),
        _us(data["predicted_us"]),
        _us(data["traced_us"]),
        _us(data["measured_us"]),
        summary.ratio(data["ratio"], data["ci95"]),
        " and ".join(stages),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _us(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f} us"
