"""The same small work is done once per layer, though its inputs do not change from layer to layer.

Signature: index, comparison, fill or integer work inside the layers with the same operator and input shapes in
every layer, on none of the model's weights: position and mask arithmetic, cosine and sine rows, cache lengths,
copies of metadata. With a reference: kernels of these classes that it runs once per step or never. Saving per
step <= (layers - 1) / layers of their time and their launches. Same shapes do not prove same values: the finding
is marked as inferred unless a reference shows that the work is not needed per layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from trace_diff.findings.calls import operators
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.products import Finder
from trace_diff.whatif import Edit

RULE = "step-invariant-work"
SKILLS = ("static-decode-metadata",)
FORMULA = "(layers - 1) / layers of the time and launches of work repeated in every layer"
_CLASSES = frozenset({"index", "fill", "elementwise", "copy", "h2d", "memset"})
# Work on integers and booleans never touches activations; these operators make or look up metadata.
_INTEGER = re.compile(r"<int\b|<long\b|<bool\b|<unsigned|FillFunctor|arange|compare_scalar|prepare_varlen")
_OPERATORS = re.compile(r"^aten::(arange|full|zeros|ones|tril|triu|cos|sin|outer|lt|le|gt|ge|eq|ne|cumsum|nonzero|index|max)$")


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if seq is None or layers is None or layers.count < 2:
        return NotFound("no layers found")
    groups = _repeated(context)
    if not groups:
        return NotFound("no metadata work is repeated in every layer")
    cuts: dict[int, float] = {}
    device: dict[int, float] = {}
    evidence = []
    for (name, shape), items in groups.items():
        per_layer = len(items) / layers.count
        spare = [int(seq.rows[i]) for i in items[round(per_layer) :]]
        cuts |= context.subtree_cuts(operators(context, spare))
        if context.on_gpu:
            device |= dict.fromkeys(spare, 0.0)
        evidence.append(
            {
                "what": name[:100],
                "shapes": shape or None,
                "count": len(items),
                "per_layer": round(per_layer, 2),
                "us": round(float(sum(seq.dur_ns[i] for i in items)) / 1000, 3),
            }
        )
    evidence.sort(key=lambda x: -float(x["us"]))
    confirmed = bool(context.references) and all(_absent(context, n) for n, _ in groups)
    return Draft(
        title=f"{sum(len(i) for i in groups.values())} times a step metadata is made anew in every layer",
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(host_cuts=cuts, device=device),
        evidence=tuple(evidence[:12]),
        skills=SKILLS,
        inferred=not confirmed,
    )


def _repeated(context: Context) -> dict[tuple[str, str], list[int]]:
    """Items inside the layers by (name, shapes), kept where every layer has equally many."""
    seq, layers = context.analysis.sequence, context.analysis.layers
    assert seq is not None and layers is not None
    finder = Finder(context.trace, seq)
    first = layers.anchors[layers.layers[0][0]].first
    last = layers.anchors[layers.layers[-1][-1]].last
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in range(first, last + 1):
        name, cls = seq.names[i], seq.classes[i]
        wanted = _OPERATORS.match(name) if seq.device == "cpu" else cls in _CLASSES and _INTEGER.search(name)
        if wanted:
            found[(name, _shapes(context, finder, i))].append(i)
    return {k: v for k, v in found.items() if len(v) >= layers.count and len(v) % layers.count == 0 and _small(k[1])}


def _shapes(context: Context, finder: Finder, item: int) -> str:
    rows = finder.operators(item)
    dims: Any = context.trace.args(rows[0]).get("Input Dims") if rows else None
    return str(dims) if dims else ""


def _small(shape: str) -> bool:
    """Metadata is small; a key-value cache that is gathered is not (it has four dimensions)."""
    return "[[" not in shape or max((s.count(",") for s in re.findall(r"\[[\d, ]+\]", shape)), default=0) < 3


def _absent(context: Context, name: str) -> bool:
    per_layer = max(1, context.layers)
    for r in context.references:
        if r.sequence is not None and sum(n == name for n in r.sequence.names) < per_layer:
            return True
    return False
