"""Reasons to end a run besides its budget: the goal is reached, or no finding is left that could pay.

Not for: budgets (budget.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from optimizer import state
from optimizer.ledger import Line
from optimizer.run import Run
from optimizer.services import Diagnosis
from optimizer.targets import stated
from trace_diff.types import Status


def goal_reached(run: Run, lines: Sequence[Line]) -> str | None:
    """In words when the confirmed gains reach what was asked for."""
    goal = run.request.goal
    if goal is None:
        return None
    if goal.kind == "factor":
        now = state.speedup(lines)
        return f"goal reached: {now:.2f}x of {goal}" if now >= goal.value else None
    measured = state.token_us(lines)
    if not measured:
        return None
    value, _, more = stated(run.request.metric, measured)
    return f"goal reached: {value:.1f} of {goal}" if (value >= goal.value if more else value <= goal.value) else None


def nothing_left(lines: Sequence[Line], diagnosis: Diagnosis) -> str | None:
    """In words when even the dearest finding, fixed wholly, would stay below the margin."""
    calibration, token_us = state.calibration(lines), state.token_us(lines)
    found = [f for f in diagnosis.findings if f.status is Status.FOUND]
    if not found:
        return "no finding is left"
    if calibration is None or not token_us or any(f.bound_us is None or f.per != "token" for f in found):
        return None
    best = max(f.bound_us or 0.0 for f in found)
    if best >= calibration.margin * token_us:
        return None
    return f"no finding is left whose bound ({best:.1f} us a token) reaches the margin of {calibration.margin:.1%}"
