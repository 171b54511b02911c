"""Ranks wait for each other inside collectives.

Signature: a rank enters a collective early and stays until the last one comes; matched over all ranks' traces.
Saving per step <= the waiting of the rank that waits longest: what the step would gain if every rank were as
early as that one. Waiting is not transfer. Where each rank's host launches kernel by kernel they drift apart, and
CUDA graphs or a shorter host path bring them together, no faster all-reduce; where a collective is itself work of
the host, or stands in a graph, one that starts cheaper does.
"""

from __future__ import annotations

from typing import Any

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound

RULE = "comm-wait"
SKILLS = ("cuda-graph-capture", "custom-all-reduce", "overlap-scheduling", "remove-host-reads")
FORMULA = "exposed waiting for peers per step, of the rank that waits longest"
LEAST_SHARE = 0.01  # of the wall


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    accounts = context.analysis.breakdowns
    n = collectives(context)
    if not n:
        return NotFound("no collectives in the step")
    if all("comm.wait" not in b.parts and "comm.transfer" not in b.parts for b in accounts.values()):
        if len(accounts) == 1 and context.analysis.cell.tp == 1:
            return NotFound("one rank: no peer to wait for")
        return CouldNotLook(("traces of all ranks of the same steps",))
    waits = {r: b.parts.get("comm.wait", 0) for r, b in accounts.items()}
    most = max(waits, key=lambda r: waits[r])
    wall = accounts[most].wall_ns
    rows = tuple(
        {
            "what": f"rank {r}",
            "wait_us": round(waits[r] / 1000, 1),
            "transfer_us": round(b.parts.get("comm.transfer", 0) / 1000, 1),
            "wall_us": round(b.wall_ns / 1000, 1),
        }
        for r, b in sorted(accounts.items())
    )
    if waits[most] < LEAST_SHARE * wall:
        return NotFound("ranks arrive together", rows)
    late = late_rank(context)
    who = f"; rank {late['rank']} is late: {late['cause']}" if late else ""
    return Draft(
        title=f"Rank {most} waits {waits[most] / 1e6:.2f} ms a step in {n:.0f} collectives ({waits[most] / wall:.0%}){who}",
        formula=FORMULA,
        basis=Basis.HOST,
        direct_ns=float(waits[most]),
        evidence=(*rows, *([late] if late else [])),
        skills=answering(context),
    )


def collectives(context: Context) -> float:
    """Collectives of a step, mean over ranks."""
    accounts = context.analysis.breakdowns
    return sum(b.counts.get("collectives", 0.0) for b in accounts.values()) / len(accounts)


def answering(context: Context) -> tuple[str, ...]:
    """What brings ranks together that arrive apart: see the module docstring."""
    host_paced = context.on_gpu and context.breakdown.counts.get("kernel_launches", 0.0) > collectives(context)
    return tuple(s for s in SKILLS if s != ("custom-all-reduce" if host_paced else "cuda-graph-capture"))


def late_rank(context: Context) -> dict[str, Any] | None:
    """The rank that makes the others wait, with what it was doing; None when no one rank does."""
    late = context.analysis.collectives.late if context.analysis.collectives is not None else None
    if late is None:
        return None
    return {
        "what": "late rank",
        "rank": late.rank,
        "share_of_waiting": round(late.share, 3),
        "cause": late.cause,
        "doing": {part: round(ns / 1000, 1) for part, ns in late.doing[:5]},
        "sites": list(late.sites),
    }
