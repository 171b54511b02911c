"""Running requests wait while new prompts are prefilled whole.

Signature: prefill steps between decode steps that carry the same or more requests. Saving per decode step <= time
of those prefill steps over the number of decode steps, as long as prefill can be cut into chunks that ride along;
traces of a single request have nothing to show.
"""

from __future__ import annotations

from trace_diff import windows
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.types import Phase

RULE = "prefill-stall"
SKILLS = ("scheduler-and-chunked-prefill",)
FORMULA = "wall of prefill steps between decode steps / decode steps"


def look(context: Context) -> Draft | NotFound:
    if context.analysis.phase is not Phase.DECODE:
        return NotFound("these are not decode steps")
    steps = windows.steps(context.trace)
    decode = [s.index for s in steps if s.phase is Phase.DECODE]
    if len(decode) < 2:
        return NotFound("fewer than two decode steps")
    between = [s for s in steps if s.phase is Phase.PREFILL and decode[0] < s.index < decode[-1]]
    stall = [s for s in between if _running(steps[s.index - 1].requests) > 0]
    if not stall:
        return NotFound("no prefill step stands between decode steps")
    wall = float(sum(s.wall_ns for s in stall))
    return Draft(
        title=f"{len(stall)} prefill steps stand between {len(decode)} decode steps",
        formula=FORMULA,
        basis=Basis.HOST,
        direct_ns=wall / len(decode),
        evidence=({"what": "prefill steps in between", "count": len(stall), "us": round(wall / 1000, 1)},),
        skills=SKILLS,
        counted_under="the time between tokens, outside the averaged decode steps",
    )


def _running(requests: int | None) -> int:
    return 1 if requests is None else requests
