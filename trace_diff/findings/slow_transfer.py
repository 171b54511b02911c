"""Collectives whose transfer, once every rank has arrived, takes longer than it has to.

Signature: transfer time per collective well above what a small one-shot exchange needs. Saving per step <=
transfer - collectives x floor. The floors are measured small all-reduces: 4 us on a GPU (vLLM's custom
all-reduce between two H200 over NVLink, 74 a step), 20 us on a CPU (vLLM's shared-memory all-reduce of two
ranks, the slower rank's median). Messages of a decode step are a few kilobytes, so their bytes do not matter;
in prefill they do, and the bound is generous. A library's ring over sockets is far above both floors.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound

RULE = "slow-transfer"
SKILLS = ("custom-all-reduce",)
FORMULA = "transfer time - collectives x floor (4 us on a GPU, 20 us on a CPU)"
FLOOR_NS = {"gpu": 4_000.0, "cpu": 20_000.0}
LEAST_RATIO = 1.4


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    accounts = context.analysis.breakdowns
    n = context.breakdown.counts.get("collectives", 0.0)
    if not n:
        return NotFound("no collectives in the step")
    known = {r: b.parts["comm.transfer"] for r, b in accounts.items() if "comm.transfer" in b.parts}
    if not known:
        if context.analysis.cell.tp == 1:
            return NotFound("one rank: nothing is transferred to a peer")
        return CouldNotLook(("traces of all ranks of the same steps",))
    mine = float(known.get(context.analysis.slowest, min(known.values())))
    floor = n * FLOOR_NS["gpu" if context.on_gpu else "cpu"]
    row = {
        "what": "transfer",
        "count": round(n, 1),
        "us": round(mine / 1000, 1),
        "per_collective_us": round(mine / 1000 / n, 2),
        "floor_us": round(floor / 1000, 1),
        "backends": sorted({c.backend for c in context.breakdown.collectives}),
    }
    if mine < LEAST_RATIO * floor:
        return NotFound(f"{mine / 1000 / n:.1f} us per collective is near the floor", (row,))
    return Draft(
        title=f"{n:.0f} collectives a step transfer for {mine / 1e6:.2f} ms, {mine / 1000 / n:.0f} us each",
        formula=FORMULA,
        basis=Basis.DEVICE if context.on_gpu else Basis.HOST,
        direct_ns=mine - floor,
        evidence=(row,),
        skills=SKILLS,
    )
