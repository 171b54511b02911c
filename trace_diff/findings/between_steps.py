"""Scheduling, detokenising and other host work between the end of one step and the start of the next.

Signature: time in a step's window behind the end of the engine's own step annotation while no device work of
the step is left. Saving per step <= that time. An engine that waits for requests has idle time here too; the
averaged steady steps do not.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound

RULE = "between-steps"
SKILLS = ("overlap-scheduling", "scheduler-and-chunked-prefill")
FORMULA = "mean time from the end of a step's annotation (and its device work) to the end of its window"
LEAST_SHARE = 0.01


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    if any("inferred" in s.flags for s in context.steps):
        return CouldNotLook(("step annotations of the engine",))
    mean = context.outside_ns
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

