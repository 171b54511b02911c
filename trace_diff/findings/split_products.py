"""Matrix products that could be one: q, k and v; gate and up.

Signature: with a reference, an aligned group in which it runs fewer products; besides, products of a layer
that read one input: they follow each other, have as many inputs and rows, and none can read what the one before
it wrote (it has another size, or attention comes next). Whatever stands between them (norms of queries and keys, the
activation of a gate) does not matter. Without recorded shapes: nothing but views between them. Saving per step <= with a reference, this group's
time minus the reference's, and the host time of the spare calls; without, the host time of the spare calls and
on a CPU all but the dearest call (the merged product does the same arithmetic, so this is generous).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from trace_diff import classify
from trace_diff.findings.calls import operators
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.groups import GroupRow
from trace_diff.layers import PRODUCT, Anchor
from trace_diff.products import Finder, Product
from trace_diff.whatif import Edit

RULE = "split-products"
SKILLS = ("merge-projections",)
FORMULA = "time of the separate products - time of the merged one (reference, else the dearest of them) + spare launches"
_GLUE = frozenset({"view", "metadata"})


@dataclass(frozen=True, slots=True)
class _Run:
    """Items of the sequence that are products which could be one, and how much of their time would stay."""

    items: tuple[int, ...]
    keeps_us: float | None  # reference's time for the same work, over all layers
    label: str
    reference: str | None
    size: int = 0  # products of one merge, where known


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if seq is None or layers is None or not layers.count:
        return NotFound("no layers with matrix products found")
    anchors = [layers.anchors[k] for layer in layers.layers for k in layer]
    finder = Finder(context.trace, seq)
    sized = [finder.product(a.first) if a.role == PRODUCT else None for a in anchors]
    shaped = any(p is not None for p in sized)
    runs = _against_references(context)
    claimed = {i for run in runs for i in run.items}
    own = _of_one_input(anchors, sized) if shaped else _adjacent(context)
    runs = [*runs, *(run for run in own if not claimed & set(run.items))]
    if not runs and not shaped and not context.references:
        return CouldNotLook(("operator shapes (record_shapes=True), or a comparable reference",))
    if not runs:
        return NotFound("no products of a layer that could be merged were found")
    cuts: dict[int, float] = {}
    device: dict[int, float] = {}
    evidence = []
    for run in runs:
        rows = [int(seq.rows[i]) for i in run.items]
        whole = float(sum(seq.dur_ns[i] for i in run.items)) / 1000
        evidence.append(
            {
                "what": run.label,
                "count": len(rows),
                "us": round(whole, 3),
                "reference_us": None if run.keeps_us is None else round(run.keeps_us, 3),
                "reference": run.reference,
            }
        )
        spare = _spare(context, run)
        cuts |= context.subtree_cuts(operators(context, spare))
        if context.on_gpu and run.keeps_us is not None and whole > run.keeps_us:
            stay = [r for r in rows if r not in set(spare)]
            device |= dict.fromkeys(spare, 0.0) | dict.fromkeys(stay, run.keeps_us * 1000 / len(stay))
    return Draft(
        title="Products of one layer run apart: " + "; ".join(str(x["what"]) for x in evidence),
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(host_cuts=cuts, device=device),
        evidence=tuple(evidence),
        skills=SKILLS,
        inferred=all(r.reference is None for r in runs),
    )


def _against_references(context: Context) -> list[_Run]:
    best: dict[tuple[int, ...], _Run] = {}
    for reference in context.references:
        for row in context.aligned(reference):
            if not is_split(row):
                continue
            here, there = row.cells
            items = _items(context, here.rows)
            old = best.get(items)
            if old is None or (old.keeps_us or 0.0) > there.us:
                label = f"{row.label}: {here.per_layer:.0f} kernels a layer here, {there.per_layer:.0f} in {reference.label}"
                best[items] = _Run(items, there.us, label, reference.label)
    return list(best.values())


def is_split(row: GroupRow) -> bool:
    """True for a group in which this engine runs more products than the other one."""
    if not row.anchor or row.where != "layer" or ("attention" in row.label and "product" not in row.label):
        return False
    here, there = (_products(c.names) for c in row.cells)
    return there > 0 and here > there


def _products(names: tuple[tuple[str, float, float], ...]) -> float:
    return sum(
        n for name, n, _ in names if _is_product(name) and "splitk" not in name.lower()
    )


def _is_product(name: str) -> bool:
    return classify.kernel_class(name) in ("gemm", "gemv") or classify.op_class(name) == "gemm"


def _items(context: Context, rows: tuple[int, ...]) -> tuple[int, ...]:
    seq = context.analysis.sequence
    assert seq is not None
    position = {int(r): i for i, r in enumerate(seq.rows)}
    return tuple(position[r] for r in rows if r in position and _is_product(seq.names[position[r]]))


def _of_one_input(anchors: list[Anchor], sized: list[Product | None]) -> list[_Run]:
    """Products that read one input, by their recorded shapes, grouped by those shapes. Attention, also plain attention
    (products without weights), has no size here."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for start, stop in _same_inputs(sized):
        parts = [(start, stop)] if stop < len(anchors) and sized[stop] is None else _unchained(sized, start, stop)
        for a, b in parts:
            shapes = tuple((p.inputs, p.outputs) for p in sized[a:b] if p is not None)
            found.setdefault(shapes, []).extend(anchors[k].first for k in range(a, b))
    return [
        _Run(tuple(items), None, f"{len(shapes)} products of one input a layer ({_shapes(shapes)})", None, len(shapes))
        for shapes, items in found.items()
        if len(shapes) > 1 and len(items) > len(shapes)
    ]


def _same_inputs(sized: list[Product | None]) -> Iterator[tuple[int, int]]:
    """Longest stretches [start, stop) of products with equal inputs, rows and type."""
    start = 0
    for k in range(1, len(sized) + 1):
        a, b = sized[k - 1], sized[k] if k < len(sized) else None
        if a is None or b is None or (a.rows, a.inputs, a.dtype) != (b.rows, b.inputs, b.dtype):
            if k - start > 1:
                yield start, k
            start = k


def _unchained(sized: list[Product | None], start: int, stop: int) -> list[tuple[int, int]]:
    """The stretch cut where a product may read what the one before it wrote."""
    cuts = [start]
    for k in range(start + 1, stop):
        before, product = sized[k - 1], sized[k]
        if before is None or product is None or before.outputs == product.inputs:
            cuts.append(k)
    return list(itertools.pairwise([*cuts, stop]))


def _shapes(shapes: tuple[tuple[int, int], ...]) -> str:
    return f"{shapes[0][0]} to {' + '.join(str(n) for _, n in shapes)}"


def _adjacent(context: Context) -> list[_Run]:
    """Products of the layers with only views between them, grouped by their place in the layer; for traces without
    shapes, and only products of one operator (the second half of plain attention is another one)."""
    seq, layers = context.analysis.sequence, context.analysis.layers
    assert seq is not None and layers is not None
    by_place: dict[tuple[int, int], list[int]] = {}
    for layer in layers.layers:
        for start, stop in _stretches(context, layer):
            by_place.setdefault((start, stop), []).extend(
                layers.anchors[layer[k]].first for k in range(start, stop + 1)
            )
    out: list[_Run] = []
    for (start, stop), items in sorted(by_place.items()):
        n = stop - start + 1
        if len(items) < n * max(1, layers.count // 2):
            continue
        out.append(_Run(tuple(items), None, f"{n} adjacent products a layer (number {start + 1} to {stop + 1})", None, n))
    return out


def _stretches(context: Context, layer: tuple[int, ...]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    start = 0
    for k in range(1, len(layer) + 1):
        if k < len(layer) and _touch(context, layer[k - 1], layer[k]):
            continue
        if k - 1 > start:
            out.append((start, k - 1))
        start = k
    return out


def _touch(context: Context, a: int, b: int) -> bool:
    seq, layers = context.analysis.sequence, context.analysis.layers
    assert seq is not None and layers is not None
    first, second = layers.anchors[a], layers.anchors[b]
    if first.role != PRODUCT or second.role != PRODUCT:
        return False
    if not context.on_gpu and seq.names[first.first] != seq.names[second.first]:
        return False
    return all(seq.classes[i] in _GLUE for i in range(first.last + 1, second.first))


def _spare(context: Context, run: _Run) -> list[int]:
    """Rows of the products that a merge makes unnecessary: per layer all but the dearest."""
    seq = context.analysis.sequence
    assert seq is not None
    n = max(1, context.layers)
    per_layer = run.size or max(1, round(len(run.items) / n))
    spare: list[int] = []
    for k in range(0, len(run.items), per_layer):
        group = sorted(run.items[k : k + per_layer], key=lambda i: seq.dur_ns[i])
        spare += [int(seq.rows[i]) for i in group[:-1]]
    return spare
