"""Aligned groups of work across engines: products with products, and what lies between two products n:m.

The engine with the fewest products per layer is the template; the others are aligned to it (align), cut into
the finest ranges that no engine crosses, and summed over all layers of a step. Work before the first and
behind the last layer has rows of its own, so every item of an engine whose layers were found is in exactly one
row. Not for: categories (compare).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trace_diff import align
from trace_diff.align import Pair, Work
from trace_diff.analysis import Analysis
from trace_diff.layers import ATTENTION, PRODUCT, Anchor, LayerMap
from trace_diff.sequence import Sequence

# Plain words for kernel classes in labels; other classes are their own word.
WORDS = {
    "rope": "RoPE", "elementwise": "pointwise", "kv_write": "KV write", "h2d": "copy to device",
    "d2h": "copy to host", "d2d": "device copy", "gemm": "product", "gemv": "product",
}  # fmt: skip


MOST_WORDS = 4
QUIET = frozenset({"view", "allocation", "metadata"})  # named in a label only where there is nothing else


@dataclass(frozen=True, slots=True)
class GroupCell:
    """One engine's side of a group, per step: `gap_us` is idle (GPU) or host time (CPU) in front of its items."""

    count: float  # kernels, copies or operators per step
    per_layer: float  # the same per layer; equals count outside layers
    us: float
    gap_us: float
    names: tuple[tuple[str, float, float], ...]  # (name, count per step, us per step), dearest first
    rows: tuple[int, ...] = ()  # rows of the representative step


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One aligned group. `where`: "before layers", "layer", "after layers" or "not aligned"."""

    where: str
    label: str
    classes: tuple[str, ...]
    anchor: bool  # True: a product or attention; False: what lies between two
    layers: int
    engines: tuple[str, ...]
    cells: tuple[GroupCell, ...]

    def sentence(self, here: int = 0, there: int = 1) -> str:
        """For example "norm + RoPE: 7 kernels, 21.3 us here; 1 kernel, 2.1 us in vLLM graph" (per layer)."""
        a, b = self.cells[here], self.cells[there]
        return f"{self.label}: {self._phrase(a)} here; {self._phrase(b)} in {self.engines[there]}"

    def _phrase(self, cell: GroupCell) -> str:
        share = self.layers if self.where == "layer" else 1
        n = cell.count / share
        text = f"{n:.0f}" if abs(n - round(n)) < 0.05 else f"{n:.1f}"
        return f"{text} kernel{'' if text == '1' else 's'}, {cell.us / share:.1f} us"

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        if len(self.cells) > 1:
            out["sentences"] = [self.sentence(0, i) for i in range(1, len(self.cells))]
        return out


def aligned(engines: Seq[Analysis]) -> tuple[tuple[GroupRow, ...], dict[str, float], list[str]]:
    """Rows in execution order, coverage per label (share of item time in aligned rows) and notes."""
    notes: list[str] = []
    usable = [i for i, a in enumerate(engines) if a.sequence is not None and a.layers and a.layers.count]
    for i, a in enumerate(engines):
        if i not in usable:
            notes.append(f"{a.label}: no repeating layers found, its work is one row that is not aligned")
    labels = tuple(a.label for a in engines)
    spans = {i: _Spans(engines[i]) for i in usable}
    rows: list[GroupRow] = []
    if usable:
        rows += _rows(engines, usable, spans, labels)
    for i, a in enumerate(engines):
        if i not in usable and a.sequence is not None:
            rows.append(_loose(a, i, labels))
    coverage = {
        a.label: _coverage(a, rows, i) for i, a in enumerate(engines) if a.sequence is not None
    }
    for i in usable:
        seq = engines[i].sequence
        if seq is not None and seq.used < seq.total:
            notes.append(
                f"{labels[i]}: {seq.used} of {seq.total} steps run their work in exactly this order; the rows are theirs"
            )
    return tuple(rows), coverage, notes


class _Spans:
    """One engine's items cut into anchors and betweens; positions are indices into its sequence."""

    def __init__(self, analysis: Analysis) -> None:
        assert analysis.sequence is not None and analysis.layers is not None
        self.seq: Sequence = analysis.sequence
        self.map: LayerMap = analysis.layers
        self.length = len(self.map.layers[0])
        self.steady = [layer for layer in self.map.layers if len(layer) == self.length]
        known = tuple(inputs * outputs for inputs, outputs in analysis.cell.products or ())
        products = sum(self.anchor(at).role == PRODUCT for at in self.steady[0])
        self.sizes = known if len(known) == products else ()  # of the products of a layer, in order
        self.first = self.anchor(self.map.layers[0][0]).first
        self.last = self.anchor(self.map.layers[-1][-1]).last

    def anchor(self, i: int) -> Anchor:
        return self.map.anchors[i]

    def works(self, sized: bool = False) -> list[Work]:
        """Anchors of the mean layer. Amount of work: the weight's elements where `sized`, else the mean time."""
        roles = [self.anchor(at).role for at in self.steady[0]]
        sizes = iter(self.sizes)
        if sized:
            return [Work(role, float(next(sizes)) if role == PRODUCT else 1.0) for role in roles]
        times = ([self._time(self.anchor(layer[k])) for layer in self.steady] for k in range(self.length))
        return [Work(role, max(float(np.mean(spent)), 1.0)) for role, spent in zip(roles, times, strict=True)]

    def _time(self, a: Anchor) -> float:
        return float(self.seq.dur_ns[a.first : a.last + 1].sum())

    def inside(self, low: int, high: int) -> list[int]:
        """Items of anchors [low, high) of every layer, with what lies between those anchors."""
        out: list[int] = []
        for layer in self.map.layers:
            part = layer[low:high]
            if part:
                out += range(self.anchor(part[0]).first, self.anchor(part[-1]).last + 1)
        return out

    def behind(self, high: int) -> list[int]:
        """Items between anchor high-1 and the next anchor, of every layer; the last layer's tail is epilogue."""
        out: list[int] = []
        for layer in self.map.layers:
            if high - 1 >= len(layer):
                continue
            at = layer[high - 1]
            if at + 1 < len(self.map.anchors) and self.anchor(at).last < self.last:
                out += range(self.anchor(at).last + 1, self.anchor(at + 1).first)
        return out

    def head(self) -> int | None:
        """The dearest product behind the layers: the output head. None when there is none."""
        later = [a for a in self.map.anchors if a.first > self.last and a.role == PRODUCT]
        if not later:
            return None
        return max(range(len(later)), key=lambda i: self._time(later[i])) + self._later_offset()

    def _later_offset(self) -> int:
        return next(i for i, a in enumerate(self.map.anchors) if a.first > self.last and a.role == PRODUCT)


def _rows(
    engines: Seq[Analysis], usable: list[int], spans: dict[int, _Spans], labels: tuple[str, ...]
) -> list[GroupRow]:
    template = min(usable, key=lambda i: spans[i].length)
    pairings: dict[int, tuple[Pair, ...]] = {}
    for i in usable:
        sized = bool(spans[template].sizes and spans[i].sizes)  # times of one and the same product differ by what else ran
        pairings[i] = align.align(spans[template].works(sized), spans[i].works(sized))
    base = spans[template].works()
    ranges = align.join(list(pairings.values()), len(base))
    layer_count = spans[template].map.count
    names = _product_names([[base[k].role for k in range(low, high)] for low, high in ranges])
    rows = [_row(spans, {i: list(range(spans[i].first)) for i in usable}, labels, "before layers", None, 1)]
    for (low, high), name in zip(ranges, names, strict=True):
        at = {i: align.image(pairings[i], low, high) for i in usable}
        inside = {i: spans[i].inside(*at[i]) for i in usable}
        behind = {i: spans[i].behind(at[i][1]) if at[i][1] > at[i][0] else [] for i in usable}
        rows.append(_row(spans, inside, labels, "layer", name, layer_count))
        last = high == len(base)  # the tail of the last layer stands behind the layers
        rows.append(_row(spans, behind, labels, "layer", None, max(1, layer_count - 1) if last else layer_count))
    rows += _epilogue(spans, usable, labels)
    return [r for r in rows if any(c.count for c in r.cells)]


def _epilogue(spans: dict[int, _Spans], usable: list[int], labels: tuple[str, ...]) -> list[GroupRow]:
    before: dict[int, list[int]] = {}
    head: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for i in usable:
        s, at = spans[i], spans[i].head()
        end = len(s.seq)
        if at is None:
            before[i], head[i], after[i] = list(range(s.last + 1, end)), [], []
            continue
        a = s.anchor(at)
        before[i] = list(range(s.last + 1, a.first))
        head[i] = list(range(a.first, a.last + 1))
        after[i] = list(range(a.last + 1, end))
    where = "after layers"
    return [
        _row(spans, before, labels, where, None, 1),
        _row(spans, head, labels, where, "output head product", 1),
        _row(spans, after, labels, where, None, 1),
    ]


def _row(
    spans: dict[int, _Spans],
    items: dict[int, list[int]],
    labels: tuple[str, ...],
    where: str,
    name: str | None,
    layers: int,
) -> GroupRow:
    cells = tuple(
        _cell(spans[i].seq, items[i], layers) if i in items else GroupCell(0, 0, 0.0, 0.0, ())
        for i in range(len(labels))
    )
    classes = _classes(spans, items)
    label = class_label(classes)
    if name is not None:
        others = [c for c in classes if c not in ("gemm", "gemv", "attention") and c not in QUIET]
        label = f"{name} with {class_label(others)}" if others else name
    return GroupRow(where, label, classes, name is not None, layers, labels, cells)


def _classes(spans: dict[int, _Spans], items: dict[int, list[int]]) -> tuple[str, ...]:
    """Classes that make up a group, in order of appearance; those under 5 % of every engine's time are left out."""
    first: dict[str, int] = {}
    kept: dict[str, int] = {}
    for order, i in enumerate(items):
        seq = spans[i].seq
        whole = float(sum(seq.dur_ns[k] for k in items[i])) or 1.0
        time: dict[str, float] = {}
        for at, k in enumerate(items[i]):
            time[seq.classes[k]] = time.get(seq.classes[k], 0.0) + float(seq.dur_ns[k])
            first.setdefault(seq.classes[k], order * 1_000_000 + at)
        kept |= {c: first[c] for c, t in time.items() if t >= 0.05 * whole and c not in kept}
    return tuple(sorted(kept, key=lambda c: kept[c]))  # the base engine's order, then what only others have


def _cell(seq: Sequence, items: list[int], layers: int) -> GroupCell:
    index = np.asarray(items, dtype=np.int64)
    if not len(index):
        return GroupCell(0, 0, 0.0, 0.0, ())
    per_name: dict[str, list[float]] = {}
    for k in items:
        entry = per_name.setdefault(seq.names[k], [0.0, 0.0])
        entry[0] += 1
        entry[1] += float(seq.dur_ns[k]) / 1000
    names = sorted(((n, c, us) for n, (c, us) in per_name.items()), key=lambda x: -x[2])
    return GroupCell(
        count=len(items),
        per_layer=len(items) / layers,
        us=float(seq.dur_ns[index].sum()) / 1000,
        gap_us=float(seq.gap_ns[index].sum()) / 1000,
        names=tuple(names),
        rows=tuple(int(seq.rows[k]) for k in items),
    )


def _loose(a: Analysis, at: int, labels: tuple[str, ...]) -> GroupRow:
    assert a.sequence is not None
    cell = _cell(a.sequence, list(range(len(a.sequence))), 1)
    empty = GroupCell(0, 0, 0.0, 0.0, ())
    cells = tuple(cell if i == at else empty for i in range(len(labels)))
    return GroupRow("not aligned", f"all work of {a.label}", tuple(dict.fromkeys(a.sequence.classes)), False, 1, labels, cells)


def _coverage(a: Analysis, rows: Iterable[GroupRow], at: int) -> float:
    assert a.sequence is not None
    whole = float(a.sequence.dur_ns.sum()) / 1000
    got = sum(r.cells[at].us for r in rows if r.where != "not aligned")
    return got / whole if whole else 0.0


def class_label(classes: Iterable[str]) -> str:
    """ "norm + RoPE" from class names; "nothing" for an empty group."""
    telling = [c for c in classes if c not in QUIET] or list(classes)
    words = list(dict.fromkeys(WORDS.get(c, c.replace("_", " ")) for c in telling))
    shown = words if len(words) <= MOST_WORDS else [*words[: MOST_WORDS - 1], f"{len(words) - MOST_WORDS + 1} more"]
    return " + ".join(shown) or "nothing"


def _product_names(roles: list[list[str]]) -> list[str]:
    """Plain names of a decoder layer's ranges; numbered products where the layer has another shape."""
    shape = "".join("A" if ATTENTION in r else "P" for r in roles)
    known = {
        "PAPPP": ("qkv product", "attention", "attention output product", "gate and up product", "down product"),
        "PPPAPPPP": ("q product", "k product", "v product", "attention", "attention output product", "gate product", "up product", "down product"),
    }
    if shape in known:
        return list(known[shape])
    out: list[str] = []
    products = 0
    for r in roles:
        if ATTENTION in r:
            out.append("attention")
        else:
            products += 1
            out.append(f"product {products}")
    return out
