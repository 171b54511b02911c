"""What two clients said of a run's engines: AIPerf beside our own, out of `aiperf/aiperf.json` in the run's folder.

Not for: taking these numbers (`optimize bench --aiperf`), or the loop's own pairs (`run_data.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_METRICS = {"ttft_p50_ms": ("first token, median", "ms"), "tpot_p50_ms": ("token, median", "ms"), "tokens_per_s": ("output", "tok/s")}


@dataclass(frozen=True, slots=True)
class ClientRow:
    """One metric of one engine by both clients; texts are ready to print. fault: they differ by more than was allowed."""

    engine: str
    metric: str
    ours: str
    aiperf: str
    difference: str
    fault: bool
    why: str


@dataclass(frozen=True, slots=True)
class Clients:
    about: str  # the workload, and what a difference is called
    rows: tuple[ClientRow, ...]


def load(run_dir: Path) -> Clients | None:
    """None where nothing was measured, or what is there cannot be read."""
    try:
        found = json.loads((run_dir / "aiperf" / "aiperf.json").read_text("utf-8"))
        rows = tuple(_row(str(engine["label"]), row) for engine in found["engines"] for row in engine["rows"])
        return Clients(_about(found), rows) if rows else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _about(found: dict[str, Any]) -> str:
    work = found["engines"][0]["workload"]
    return (
        f"{work['requests']} requests of {work['prompt_tokens']} + {work['new_tokens']} tokens over HTTP, {work['concurrency']} at a time, the "
        f"same prompts on the same launch. Where the clients differ by more than {found['fault_above']:.0%} neither is believed."
        + "".join(f" Not measured: {label} ({str(why).strip().splitlines()[0]})." for label, why in (found.get("left_out") or {}).items())
    )


def _row(engine: str, row: dict[str, Any]) -> ClientRow:
    name, unit = _METRICS.get(row["metric"], (row["metric"], ""))
    ours, aiperf = (f"{float(row[who]):,.2f} {unit}".strip() for who in ("ours", "aiperf"))
    return ClientRow(engine, name, ours, aiperf, f"{float(row['difference']):+.1%}", bool(row["fault"]), str(row.get("why") or ""))
