"""`optimize status`: where a run stands, out of its ledger; reads only, so it can look while the run works.

Not for: the result table (summary.py), or the report.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from optimizer import ledger, state, summary
from optimizer.run import read_request


def status(place: Path) -> RenderableType:
    """Request, progress, open attempt and result so far. Raises RunError, LedgerBroken."""
    request = read_request(place)
    lines, torn = ledger.read(place / "ledger.jsonl")
    opened = state.open_attempt(lines)
    ended = next((line for line in reversed(lines) if line["kind"] == "finished"), None)
    rows = [
        f"run {request.id}: {request.target} TP={request.tp} on {request.device}, {request.metric}, "
        f"protocol {request.protocol}, agent {request.agent}, sandbox {request.sandbox_level}",
        f"{len(lines)} ledger lines, the last {lines[-1]['kind']} at {lines[-1]['t_utc']}" if lines else "empty ledger",
    ]
    if torn:
        rows.append(f"a torn last line of {torn} bytes: the run was killed; `optimize resume {request.id}` goes on")
    calibration = state.calibration(lines)
    if calibration:
        rows.append(
            f"margin {calibration.margin:.1%}, spread {calibration.log_sd:.1%}, minimum detectable effect {calibration.mde:.1%}"
        )
    if opened:
        last = opened.lines[-1]
        rows.append(f"attempt {opened.number} is open, last line {last['kind']}")
    minutes = state.wall_s(lines) / 60
    rows.append(f"{len(state.attempts(lines))} attempts, {minutes:.1f} minutes, {state.usd(lines):.2f} USD")
    rows.append(f"finished: {summary.clip(ended['data']['reason'])}" if ended else "not finished")
    return Group(*(Text(row) for row in rows), summary.table(lines))


def overview(runs: Path) -> RenderableType:
    """One line per run of a folder, newest last."""
    rows = []
    for place in sorted(p.parent for p in runs.glob("*/run.json")):
        request = read_request(place)
        lines, _ = ledger.read(place / "ledger.jsonl")
        accepted = sum(1 for line in lines if line["kind"] == "accepted")
        done = "finished" if lines and any(x["kind"] == "finished" for x in lines) else "open"
        rows.append(Text(f"{request.id}  {request.target} TP={request.tp}  {accepted} accepted  {done}"))
    return Group(*(rows or [Text(f"no runs in {runs}")]))
