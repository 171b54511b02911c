"""Prefill does work that no one uses, or runs prompts one by one.

Signature, in prefill steps only: the output head is computed for every prompt token though only the last one's
logits are needed (rows of its product against requests of the step); consecutive prefill steps of one request
each, back to back. Saving per request <= (1 - requests / rows) of the head's time, replayed.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.layers import PRODUCT
from trace_diff.products import Finder
from trace_diff.types import Phase
from trace_diff.whatif import Edit

RULE = "prefill-path"
SKILLS = ("prefill-path",)
FORMULA = "(1 - requests / rows) of the output head product, replayed"


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if context.analysis.phase is not Phase.PREFILL:
        return NotFound("these are not prefill steps")
    if seq is None or layers is None or not layers.count:
        return CouldNotLook(("layers in the prefill step",))
    last = layers.anchors[layers.layers[-1][-1]].last
    finder = Finder(context.trace, seq)
    heads = [(a, finder.product(a.first)) for a in layers.anchors if a.first > last and a.role == PRODUCT]
    sized = [(a, p) for a, p in heads if p is not None]
    requests = context.step.requests
    if not sized or requests is None:
        return CouldNotLook(("operator shapes (record_shapes=True)", "requests per step"))
    anchor, head = max(sized, key=lambda x: x[1].outputs)
    row = {"what": "output head", "rows": head.rows, "requests": requests, "outputs": head.outputs}
    if head.rows <= requests:
        return NotFound("the output head is computed for the last token of each prompt only", (row,))
    share = 1.0 - requests / head.rows
    rows = [int(r) for r in seq.rows[anchor.first : anchor.last + 1]]
    spare = {r: float(context.trace.events.dur_ns[r]) for r in rows}
    return Draft(
        title=f"The output head is computed for {head.rows} prompt tokens where {requests} logits are needed",
        formula=FORMULA,
        basis=Basis.DEVICE if context.on_gpu else Basis.HOST,
        edit=Edit(device={r: d * (1 - share) for r, d in spare.items()})
        if context.on_gpu
        else Edit(host_cuts={r: d * share for r, d in spare.items()}),
        evidence=(row,),
        skills=SKILLS,
    )
