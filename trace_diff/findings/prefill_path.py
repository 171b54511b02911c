"""Prefill does work that no one uses, or runs prompts one by one.

Signature, in prefill steps only: the output head is computed for every prompt token though only the last one's
logits are needed (rows of its product against requests of the step); or, where it is not, what follows the
attention of the last layer is. Saving per request <= (1 - requests / rows) of the head's time, or of the last
layer's behind its attention, replayed.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.layers import ATTENTION, PRODUCT, LayerMap
from trace_diff.products import Finder
from trace_diff.types import Phase
from trace_diff.whatif import Edit

RULE = "prefill-path"
SKILLS = ("prefill-path", "last-layer-rows")
FORMULA = "(1 - requests / rows) of the output head product, or of the last layer behind its attention, replayed"


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
    if head.rows > requests:
        title = f"The output head is computed for {head.rows} prompt tokens where {requests} logits are needed"
        return _draft(context, title, (anchor.first, anchor.last), head.rows, row, SKILLS[:1])
    tail = _behind_attention(layers, finder)
    if tail is not None and tail[1] > requests:
        first, rows = tail
        title = f"The last layer goes on with {rows} prompt tokens behind its attention where {requests} logits are needed"
        return _draft(context, title, (first, last), rows, {**row, "what": "last layer", "rows": rows}, SKILLS[1:])
    return NotFound("head and last layer are computed for the last token of each prompt only", (row,))


def _behind_attention(layers: LayerMap, finder: Finder) -> tuple[int, int] | None:
    """(first item, rows of its products) of what the last layer computes from its attention's result."""
    own = [layers.anchors[i] for i in layers.layers[-1]]
    at = max((n for n, a in enumerate(own) if a.role == ATTENTION), default=None)
    # The product behind the attention may be of all rows still: what is read is chosen before or after it.
    products = [a for a in own[at + 1 :] if a.role == PRODUCT][1:] if at is not None else []
    sized = [(a.first, p.rows) for a in products if (p := finder.product(a.first)) is not None]
    return sized[0] if sized else None


def _draft(context: Context, title: str, items: tuple[int, int], rows: int, row: dict[str, object], skills: tuple[str, ...]) -> Draft:
    share = 1.0 - row["requests"] / rows  # type: ignore[operator]
    seq = context.analysis.sequence
    assert seq is not None
    spare = {int(r): float(context.trace.events.dur_ns[r]) * share for r in seq.rows[items[0] : items[1] + 1]}
    return Draft(
        title=title,
        formula=FORMULA,
        basis=Basis.DEVICE if context.on_gpu else Basis.HOST,
        edit=Edit(device={r: context.trace.events.dur_ns[r] - d for r, d in spare.items()}) if context.on_gpu else Edit(host_cuts=spare),
        evidence=(row,),
        skills=skills,
    )
