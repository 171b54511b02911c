"""Scheduling, detokenising and other host work between the end of one step and the start of the next.

Signature: time in a step's window behind the end of the engine's own step annotation while no device work of
the step is left. Saving per step <= that time. An engine that waits for requests has idle time here too; the
averaged steady steps do not.
"""

from __future__ import annotations

import numpy as np

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.types import Kind, Step
from trace_diff.windows import marks

RULE = "between-steps"
SKILLS = ("overlap-scheduling", "scheduler-and-chunked-prefill")
FORMULA = "mean time from the end of a step's annotation (and its device work) to the end of its window"
LEAST_SHARE = 0.01


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    if any("inferred" in s.flags for s in context.steps):
        return CouldNotLook(("step annotations of the engine",))
    mean = float(np.mean([_outside(context, s) for s in context.steps]))
    wall = context.breakdown.wall_ns
    share = mean / wall if wall else 0.0
    row = {"what": "host time between steps", "us": round(mean / 1000, 1), "share": round(share, 3)}
    if share < LEAST_SHARE:
        return NotFound("steps follow each other without a pause", (row,))
    return Draft(
        title=f"{mean / 1000:.0f} us of host work between steps ({share:.0%} of the period)",
        formula=FORMULA,
        basis=Basis.HOST,
        direct_ns=mean,
        evidence=(row,),
        skills=SKILLS,
    )


def _outside(context: Context, step: Step) -> float:
    """Time behind the step's annotation in its window during which the device has nothing of this step to do."""
    e = context.trace.events
    end = marks(context.trace)[step.index].end
    device = step.rows[np.isin(e.kind[step.rows], (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET))]
    if len(device):
        end = max(end, int((e.ts_ns[device] + e.dur_ns[device]).max()))
    return float(max(0, step.end_ns - max(end, step.start_ns)))
