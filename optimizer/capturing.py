"""Traces of a tree, captured once: the step of the loop that asks `capture.py` and remembers the answer.

Not for: driving a server (capture.py), or reading traces (diagnose.py).
"""

from __future__ import annotations

from typing import Any

from optimizer import state
from optimizer.candidate import incumbent_name
from optimizer.run import Run
from optimizer.serial import build, plain
from optimizer.services import Capture, Services
from optimizer.types import LaunchSpec

BASELINE = "baseline"


def capture_incumbent(run: Run, do: Services) -> Capture:
    """Traces of the incumbent: kept from its acceptance or from the start of the run, else taken now."""
    commit = run.repo.incumbent()
    label = BASELINE if commit == run.base else run.repo.trailers(commit).get("Attempt", commit[:12])
    return capture_tree(run, do, run.spec(commit, incumbent_name(commit), "incumbent"), commit, label, None)


def capture_tree(run: Run, do: Services, spec: LaunchSpec, commit: str, label: str, attempt: int | None) -> Capture:
    """Traces at traces/<label>. A tree that was captured before, and whose files are there, is not captured again."""
    tree = run.repo.tree_of(commit)
    known = state.captured(run.ledger.lines(), tree)
    if known is not None:
        found = build(Capture, {k: known[k] for k in Capture.__slots__ if k in known})
        placed = [run.dir / path for path in found.traces]
        if all(path.is_file() for path in placed):
            return _placed(found, placed)
    do.view.step(f"capture traces: {label}")
    found = do.capture(spec, run.dir / "traces" / label)
    inside = [path.relative_to(run.dir).as_posix() for path in found.traces]
    data: dict[str, Any] = {**plain(found), "traces": inside, "tree": tree, "commit": commit, "label": label}
    data["reference"] = False
    run.ledger.append("captured", attempt, data)
    return found


def _placed(found: Capture, paths: list) -> Capture:
    return Capture(
        found.label, tuple(paths), found.tp, found.batch, found.control_us_per_token, found.metadata, found.seconds
    )
