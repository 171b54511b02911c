"""Find the layers inside one step's sequence of work: where they repeat, and the products that anchor them.

Layers are found by anchors, not by names: every decoder layer has matrix products and one attention, in the
same order in every engine, whatever is fused around them. So Triton GEMVs and fused kernels keep the
alignment, where anchors on a norm kernel break as soon as it is fused away. Not for: comparing two engines
(align).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

PRODUCT = "product"
ATTENTION = "attention"
MAX_PERIOD = 1000  # items of one layer; Hugging Face eager on a GPU has 57


@dataclass(frozen=True, slots=True)
class Anchor:
    """A matrix product (with its split-K reduction) or an attention (with its combine): items [first, last]."""

    role: str  # PRODUCT or ATTENTION
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Layers of one step. `layers[i]` holds indices into `anchors`; all layers have one length in a regular map.

    Items before the first anchor of the first layer are the prologue; items behind the last anchor of the last
    layer are the epilogue.
    """

    anchors: tuple[Anchor, ...]
    layers: tuple[tuple[int, ...], ...]
    how: str  # "attention", "repetition" or "none"

    @property
    def count(self) -> int:
        """Number of layers; 0 when nothing repeats."""
        return len(self.layers)


def find_anchors(classes: Seq[str], names: Seq[str]) -> tuple[Anchor, ...]:
    """Products and attentions of a sequence, in order; helpers of one product or attention join it.

    A split-K reduction belongs to the product in front of it, consecutive attention kernels (split + combine)
    are one attention.
    """
    out: list[Anchor] = []
    for i, (cls, name) in enumerate(zip(classes, names, strict=True)):
        role = _role(cls)
        if role is None:
            continue
        joins = bool(out) and out[-1].last == i - 1 and out[-1].role == role
        if role == PRODUCT and joins and _is_reduction(name):
            out[-1] = Anchor(role, out[-1].first, i)
        elif role == PRODUCT and _is_reduction(name):
            continue
        elif role == ATTENTION and out and out[-1].role == ATTENTION:
            out[-1] = Anchor(role, out[-1].first, i)
        else:
            out.append(Anchor(role, i, i))
    return tuple(out)


def find_layers(classes: Seq[str], names: Seq[str]) -> LayerMap:
    """The layers of one step's items, given in execution order (one class and one name each)."""
    anchors = find_anchors(classes, names)
    by_attention = _layers_by_attention(anchors, names)
    if by_attention:
        return LayerMap(anchors, by_attention, "attention")
    by_period = _layers_by_period(anchors, names)
    if by_period:
        return LayerMap(anchors, by_period, "repetition")
    return LayerMap(anchors, (), "none")


def period(tokens: Seq[str], least_repeats: int = 3) -> tuple[int, int, int] | None:
    """The repetition that explains most of a sequence: (period, start, length), or None.

    Among the periods whose longest run covers at least 95 % of what the best one covers, the smallest wins, so
    a layer is not reported as two.
    """
    n = len(tokens)
    seen: dict[str, int] = {}
    codes = np.fromiter((seen.setdefault(t, len(seen)) for t in tokens), dtype=np.int64, count=n)
    best: list[tuple[int, int, int]] = []
    for p in range(1, min(n // least_repeats, MAX_PERIOD) + 1):
        start, length = _longest_run(codes, p)
        if length + p >= least_repeats * p:
            best.append((p, start, length + p))
    if not best:
        return None
    most = max(length for _, _, length in best)
    return next(b for b in best if b[2] >= 0.95 * most)


def _role(cls: str) -> str | None:
    if cls in ("gemm", "gemv"):
        return PRODUCT
    if cls == "attention":
        return ATTENTION
    return None


def _is_reduction(name: str) -> bool:
    low = name.lower()
    return "splitkreduce" in low or "splitk_reduce" in low or "reduce_splitk" in low


def _layers_by_attention(anchors: tuple[Anchor, ...], names: Seq[str]) -> tuple[tuple[int, ...], ...]:
    """One layer per attention, beginning with the products that lead up to it.

    An attention with no product before it (scheduling metadata such as `prepare_varlen_num_blocks`) is not a
    layer's attention.
    """
    attention: list[int] = []
    products_since = 0
    for i, a in enumerate(anchors):
        if a.role == PRODUCT:
            products_since += 1
        elif products_since:
            attention.append(i)
            products_since = 0
    if len(attention) < 2:
        return ()
    length, votes = Counter(b - a for a, b in pairwise(attention)).most_common(1)[0]
    lead = _lead([names[a.first] for a in anchors], attention, length)
    if lead == 0 or votes < 0.8 * (len(attention) - 1):
        return ()
    starts = [a - lead for a in attention]
    ends = [*starts[1:], min(starts[-1] + length, len(anchors))]
    return tuple(tuple(range(s, e)) for s, e in zip(starts, ends, strict=True))


def _lead(tokens: list[str], attention: list[int], length: int) -> int:
    """How many products of a layer stand in front of its attention.

    Those in front of the first attention, as far back as they are the same as in front of a later one: a product
    of the prologue (rotary frequencies in Hugging Face models) is not a layer's.
    """
    first = attention[0]
    later = next((b for a, b in pairwise(attention) if b - a == length), attention[-1])
    n = 0
    while n < min(first, length - 1) and tokens[first - n - 1] == tokens[later - n - 1]:
        n += 1
    return n


def _layers_by_period(anchors: tuple[Anchor, ...], names: Seq[str]) -> tuple[tuple[int, ...], ...]:
    """Layers as repetitions of the whole item sequence, for engines whose attention is not one known kernel."""
    found = period(names)
    if found is None:
        return ()
    p, start, length = found
    firsts = [i for i, a in enumerate(anchors) if a.first >= start]
    if not firsts:
        return ()
    begin = anchors[firsts[0]].first
    blocks: list[tuple[int, ...]] = []
    for k in range((start + length - begin) // p + 1):
        low, high = begin + k * p, begin + (k + 1) * p
        block = tuple(i for i in firsts if low <= anchors[i].first < high)
        if not block or (blocks and len(block) != len(blocks[0])):
            break
        blocks.append(block)
    return tuple(blocks) if len(blocks) > 1 else ()


def _longest_run(codes: npt.NDArray[np.int64], p: int) -> tuple[int, int]:
    """Start and length of the longest stretch with codes[i] == codes[i + p]."""
    same = np.concatenate(([0], (codes[:-p] == codes[p:]).astype(np.int8), [0]))
    edges = np.diff(same)
    starts = np.flatnonzero(edges == 1)
    ends = np.flatnonzero(edges == -1)
    if len(starts) == 0:
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
