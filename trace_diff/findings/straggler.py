"""One rank is late to most collectives and makes the others wait.

Signature: most of all waiting is for this rank. Evidence: who, by how much, and what it did while its peers had
already arrived. The time is the other ranks' waiting and is counted under
comm-wait, so this finding carries no bound of its own.
"""

from __future__ import annotations

from trace_diff.findings import comm_wait
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound

RULE = "straggler-rank"
SKILLS = comm_wait.SKILLS
FORMULA = "none of its own: the peers' waiting, see comm-wait"


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    accounts = context.analysis.breakdowns
    if len(accounts) < 2:
        if (context.analysis.cell.tp or 1) > 1:
            return CouldNotLook(("traces of all ranks",))
        return NotFound("one rank")
    if all("comm.wait" not in b.parts for b in accounts.values()):
        return NotFound("no rank waits for another")
    late = comm_wait.late_rank(context)
    waits = {r: b.parts.get("comm.wait", 0) for r, b in accounts.items()}
    most = max(waits.values())
    if late is None or most < comm_wait.LEAST_SHARE * context.breakdown.wall_ns:
        return NotFound("no single rank makes the others wait")
    return Draft(
        title=f"Rank {late['rank']} is late: its peers wait up to {most / 1e6:.2f} ms a step for it; {late['cause']}",
        formula=FORMULA,
        basis=Basis.HOST,
        direct_ns=float(most),
        evidence=(late, {"what": "waiting per rank, us", **{str(r): round(w / 1000, 1) for r, w in waits.items()}}),
        skills=comm_wait.answering(context),
        counted_under="comm-wait",
    )
