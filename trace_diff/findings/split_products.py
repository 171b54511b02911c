"""Matrix products that could be one: q, k and v; gate and up.

Signature: with a reference, an aligned group in which it runs fewer products; without one, products of a layer
that follow each other with nothing but views between them. Saving per step <= with a reference, this group's
time minus the reference's, and the host time of the spare calls; without, the host time of the spare calls and
on a CPU all but the dearest call (the merged product does the same arithmetic, so this is generous).
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_diff import classify
from trace_diff.findings.calls import operators
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.groups import GroupRow
from trace_diff.layers import PRODUCT
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


def look(context: Context) -> Draft | NotFound:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if seq is None or layers is None or not layers.count:
        return NotFound("no layers with matrix products found")
    runs = _against_references(context) or _adjacent(context)
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


def _adjacent(context: Context) -> list[_Run]:
    """Products of the layers with only views between them, grouped by their place in the layer."""
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
        out.append(_Run(tuple(items), None, f"{n} adjacent products a layer (number {start + 1} to {stop + 1})", None))
    return out


def _stretches(context: Context, layer: tuple[int, ...]) -> list[tuple[int, int]]:
    seq, layers = context.analysis.sequence, context.analysis.layers
    assert seq is not None and layers is not None
    out: list[tuple[int, int]] = []
    start = 0
    for k in range(1, len(layer) + 1):
        joined = k < len(layer) and _touch(context, layer[k - 1], layer[k])
        if not joined:
            if k - 1 > start and layers.anchors[layer[start]].role == PRODUCT:
                out.append((start, k - 1))
            start = k
    return out


def _touch(context: Context, a: int, b: int) -> bool:
    seq, layers = context.analysis.sequence, context.analysis.layers
    assert seq is not None and layers is not None
    first, second = layers.anchors[a], layers.anchors[b]
    if first.role != PRODUCT or second.role != PRODUCT:
        return False
    return all(seq.classes[i] in _GLUE for i in range(first.last + 1, second.first))


def _spare(context: Context, run: _Run) -> list[int]:
    """Rows of the products that a merge makes unnecessary: per layer all but the dearest."""
    seq = context.analysis.sequence
    assert seq is not None
    n = max(1, context.layers)
    per_layer = max(1, round(len(run.items) / n))
    spare: list[int] = []
    for k in range(0, len(run.items), per_layer):
        group = sorted(run.items[k : k + per_layer], key=lambda i: seq.dur_ns[i])
        spare += [int(seq.rows[i]) for i in group[:-1]]
    return spare
