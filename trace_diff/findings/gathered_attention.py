"""Attention on a copy of the key-value cache that is gathered anew in every layer and step.

Signature: between the qkv product and attention of every layer, index, gather or concatenation work on tensors
of cache shape (four or more dimensions), or `cat` with the past. Saving per step <= that work, replayed; the
kernel that reads the paged cache in place reads the same bytes once. The cost grows with the context, so a short
trace understates it.
"""

from __future__ import annotations

import itertools
import re

from trace_diff.findings.calls import operators
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.layers import ATTENTION
from trace_diff.products import Finder
from trace_diff.whatif import Edit

RULE = "gathered-attention"
SKILLS = ("paged-attention-backend", "direct-kv-write")
FORMULA = "wall - wall of the step replayed without gathering the cache"
_GATHERS = re.compile(r"^aten::(index|index_select|gather|cat|take|_index_put)$|index_elementwise|gather|CatArray|indexSelect")


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if seq is None or layers is None or not layers.count:
        return NotFound("no layers with attention found")
    if not any(a.role == ATTENTION for a in layers.anchors):
        return CouldNotLook(("a known attention operator or kernel",))
    candidates = _in_front_of_attention(context)
    if not candidates:
        return NotFound("nothing is gathered in front of attention")
    finder = Finder(context.trace, seq)
    sized = {i: _dimensions(context, finder, i) for i in candidates}
    if all(d is None for d in sized.values()):
        return CouldNotLook(("operator shapes (record_shapes=True)",))
    items = [i for i, d in sized.items() if d is not None and d >= 4]
    if len(items) < layers.count:
        return NotFound("what is gathered in front of attention is not the cache")
    rows = [int(seq.rows[i]) for i in items]
    return Draft(
        title=f"The key-value cache is gathered {len(items)} times a step before attention",
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(
            host_cuts=context.subtree_cuts(operators(context, rows)),
            device=dict.fromkeys(rows, 0.0) if context.on_gpu else {},
        ),
        evidence=(
            {
                "what": seq.names[items[0]][:100],
                "count": len(items),
                "us": round(float(sum(seq.dur_ns[i] for i in items)) / 1000, 3),
                "site": context.site(rows[0]) if not context.on_gpu else None,
            },
        ),
        skills=SKILLS,
        notes=("grows with the context length",),
    )


def _in_front_of_attention(context: Context) -> list[int]:
    """Gathering items between a layer's last product before attention and the attention."""
    seq, layers = context.analysis.sequence, context.analysis.layers
    assert seq is not None and layers is not None
    out: list[int] = []
    for layer in layers.layers:
        for before, at in itertools.pairwise(layer):
            if layers.anchors[at].role == ATTENTION:
                span = range(layers.anchors[before].last + 1, layers.anchors[at].first)
                out += [i for i in span if _GATHERS.search(seq.names[i])]
    return out


def _dimensions(context: Context, finder: Finder, item: int) -> int | None:
    """Dimensions of the largest input of the operator behind an item; None without shapes."""
    for row in finder.operators(item):
        dims = context.trace.args(row).get("Input Dims")
        if isinstance(dims, list) and dims:
            flat = [d for d in dims if isinstance(d, list)]
            nested = [x for d in flat for x in d if isinstance(x, list)]
            return max((len(d) for d in (*flat, *nested) if all(isinstance(x, int) for x in d)), default=None)
    return None
