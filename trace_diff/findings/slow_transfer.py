"""Collectives whose transfer, once every rank has arrived, takes longer than it has to.

Signature: transfer time per collective well above what a small one-shot exchange needs. Saving per step <=
transfer - collectives x floor, and inside a graph replay the idle time right before and behind each, and 1 us of what
follows: one that can be launched early (programmatic dependent launch) has neither. The floors are measured small
all-reduces: 2.3 us on a GPU (8 KiB between two H200 over NVLink, recorded in a graph: `benchmarks/all_reduce.py`), 20 us on a
CPU (vLLM's shared-memory all-reduce of two ranks, the slower rank's median). Messages of a decode step are a few kilobytes, so
their bytes do not matter; in prefill they do, and the bound is generous. A library's ring is above both floors.
"""

from __future__ import annotations

import numpy as np

from trace_diff import device
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound

RULE = "slow-transfer"
SKILLS = ("custom-all-reduce",)
FORMULA = "transfer time - collectives x floor (2.3 us on a GPU, 20 us on a CPU); in a graph + idle beside them + 1 us each"
FLOOR_NS = {"gpu": 2_300.0, "cpu": 20_000.0}
EARLY_NS = 1_000.0
LEAST_RATIO = 2.0


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
    row: dict[str, object] = {
        "what": "transfer",
        "count": round(n, 1),
        "us": round(mine / 1000, 1),
        "per_collective_us": round(mine / 1000 / n, 2),
        "floor_us": round(floor / 1000, 1),
        "backends": sorted({c.backend for c in context.breakdown.collectives}),
    }
    if mine < LEAST_RATIO * floor:
        return NotFound(f"{mine / 1000 / n:.1f} us per collective is near the floor", (row,))
    beside, recorded = _beside(context)
    row["idle_beside_us"] = round(beside / 1000, 1)
    return Draft(
        title=f"{n:.0f} collectives a step transfer for {mine / 1e6:.2f} ms, {mine / 1000 / n:.1f} us each",
        formula=FORMULA,
        basis=Basis.DEVICE if context.on_gpu else Basis.HOST,
        direct_ns=mine - floor + beside + recorded * EARLY_NS,
        evidence=(row,),
        skills=SKILLS,
    )


def _beside(context: Context) -> tuple[float, float]:
    """Inside graph replays: idle ns a step right before and behind collectives, and how many of them a step has."""
    lane = device.lanes(context.trace)
    idle = recorded = 0
    for step in context.steps:
        at = lane.of(step.rows)
        at = at[lane.tied.in_graph[at]]
        gap = lane.start[at][1:] - np.maximum.accumulate(lane.end[at])[:-1]
        near = lane.is_comm[at][1:] | lane.is_comm[at][:-1]
        idle += int(gap[near & (gap > 0) & (gap <= device.GRAPH_GAP_NS)].sum())
        recorded += int(lane.is_comm[at].sum())
    return idle / len(context.steps), recorded / len(context.steps)
