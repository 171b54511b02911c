"""Kernels that take longer than the reference's for the same work.

Signature: an aligned group with products or attention in which this engine needs more than 15 % and more than a
microsecond longer per layer than the fastest reference. Saving per step <= the difference, replayed: in a step
that waits for its host, a faster kernel saves nothing, and this says so.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.findings.split_products import is_split
from trace_diff.groups import GroupRow
from trace_diff.whatif import Edit

RULE = "slower-kernels"
SKILLS = ("skinny-gemm", "paged-attention-backend")
FORMULA = "sum over aligned groups of (time here - time of the fastest reference), replayed"
RATIO = 1.15
LEAST_US = 1.0


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    if not context.references:
        return CouldNotLook(("a comparable reference trace",), tuple(f"{r}: another cell" for r in context.refused))
    worst: dict[tuple[str, str], tuple[GroupRow, str]] = {}
    for reference in context.references:
        for row in context.aligned(reference):
            if not row.anchor or min(c.count for c in row.cells) == 0 or is_split(row):
                continue
            old = worst.get((row.where, row.label))
            if _is_slower(row) and (old is None or row.cells[1].us < old[0].cells[1].us):
                worst[(row.where, row.label)] = (row, reference.label)
    if not worst:
        return NotFound("every product and attention is about as fast as the reference's")
    e = context.trace.events
    edit: dict[int, float] = {}
    evidence = []
    attention = False
    for row, label in worst.values():
        here, there = row.cells
        attention |= "attention" in row.classes
        factor = there.us / here.us
        edit |= {r: float(e.dur_ns[r]) * factor for r in here.rows}
        evidence.append(
            {
                "what": row.label,
                "us": round(here.us, 3),
                "reference_us": round(there.us, 3),
                "reference": label,
                "sentence": row.sentence(),
                "names": [n[:80] for n, _, _ in here.names[:3]],
            }
        )
    evidence.sort(key=lambda x: float(x["reference_us"]) - float(x["us"]))
    skills = SKILLS if attention else SKILLS[:1]
    total = sum(float(x["us"]) - float(x["reference_us"]) for x in evidence)
    return Draft(
        title=f"Slower than a reference for the same work by {total:.0f} us a step: {evidence[0]['what']} first",
        formula=FORMULA,
        basis=Basis.DEVICE if context.on_gpu else Basis.HOST,
        edit=Edit(device=edit) if context.on_gpu else Edit(host_cuts=_host(context, edit)),
        evidence=tuple(evidence),
        skills=skills,
    )


def _is_slower(row: GroupRow) -> bool:
    here, there = row.cells
    layers = row.layers if row.where == "layer" else 1
    return here.us > RATIO * there.us and here.us - there.us > LEAST_US * layers


def _host(context: Context, edit: dict[int, float]) -> dict[int, float]:
    e = context.trace.events
    return {r: float(e.dur_ns[r]) - ns for r, ns in edit.items()}
