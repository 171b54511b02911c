"""On a CPU: time of the step's thread outside operators, that is Python and what it calls.

Signature: no device work, and a large part of the wall in no operator, runtime call or collective. Saving per
step <= that time, less what named causes already claim (an operator that vanishes takes its Python with it).
Compiled regions and fewer, larger operators remove it.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.findings.ledger import python_ns

RULE = "python-time"
SKILLS = ("compile-regions", "fused-kernels")
FORMULA = "host time of the step outside operators and collectives - time claimed by named causes"
LEAST_SHARE = 0.05


def look(context: Context) -> Draft | NotFound:
    if context.on_gpu:
        return NotFound("device work sets the pace or waits for the host: see launch-bound-decode")
    ns = python_ns(context)
    wall = context.breakdown.wall_ns
    ops = context.breakdown.counts.get("cpu_ops", 0.0)
    row = {"what": "outside operators", "us": round(ns / 1000, 1), "operators": round(ops)}
    if not wall or ns < LEAST_SHARE * wall:
        return NotFound("hardly any time outside operators", (row,))
    return Draft(
        title=f"{ns / wall:.0%} of the step is Python between {ops:.0f} operators",
        formula=FORMULA,
        basis=Basis.HOST,
        rest="python",
        evidence=(row,),
        skills=SKILLS,
    )
