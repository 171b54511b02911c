"""Align the anchors of one layer (products, attention) between two engines, allowing n:m merges.

One engine's `qkv` product is three products elsewhere, `gate_up` is two. A merge is recognised by its amount
of work: the work of the merged products equals the work of the single one. Work is weight elements where both
traces recorded shapes, else time. Not for: naming or summing what lies between anchors (compare), finding the
layers (layers).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

MERGE_PENALTY = 0.15  # a merge must explain the work better than single products do
SKIP_COST = 1.5  # an anchor that the other engine does not have
MAX_MERGE = 4


@dataclass(frozen=True, slots=True)
class Work:
    """One anchor as the aligner sees it: role ("product", "attention") and amount of work (any unit, > 0)."""

    role: str
    amount: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Anchors [a0, a1) of one engine do the work of anchors [b0, b1) of the other; one side may be empty."""

    a0: int
    a1: int
    b0: int
    b1: int


def align(a: Seq[Work], b: Seq[Work]) -> tuple[Pair, ...]:
    """The cheapest monotone alignment of two anchor lists; every anchor is in exactly one pair.

    Dynamic programme over (i, j): match up to MAX_MERGE products with up to MAX_MERGE products at the cost of
    |log(work ratio)| plus a penalty per merged product; attention matches attention only; skips cost SKIP_COST.
    """
    scale = _scale(a, b)
    rows, cols = len(a), len(b)
    best = [[math.inf] * (cols + 1) for _ in range(rows + 1)]
    back: list[list[tuple[int, int]]] = [[(0, 0)] * (cols + 1) for _ in range(rows + 1)]
    best[0][0] = 0.0
    for i in range(rows + 1):
        for j in range(cols + 1):
            if best[i][j] == math.inf:
                continue
            for di, dj, cost in _moves(a, b, i, j, scale):
                total = best[i][j] + cost
                if total < best[i + di][j + dj] - 1e-12:
                    best[i + di][j + dj] = total
                    back[i + di][j + dj] = (di, dj)
    pairs: list[Pair] = []
    i, j = rows, cols
    while i or j:
        di, dj = back[i][j]
        pairs.append(Pair(i - di, i, j - dj, j))
        i, j = i - di, j - dj
    return tuple(reversed(pairs))


def join(pairings: Seq[tuple[Pair, ...]], length: int) -> list[tuple[int, int]]:
    """Cut a template's anchors into the finest ranges that no pairing crosses.

    `pairings[k]` aligns the template (side a, `length` anchors) with engine k. Where any engine merges what the
    template splits, the template's anchors fall into one range for all engines.
    """
    glued = [False] * (length + 1)  # glued[i]: anchors i-1 and i stay together
    for pairs in pairings:
        for p in pairs:
            for i in range(p.a0 + 1, p.a1):
                glued[i] = True
    cuts = [i for i in range(length + 1) if not glued[i]]
    return list(itertools.pairwise(cuts))


def image(pairs: tuple[Pair, ...], low: int, high: int) -> tuple[int, int]:
    """The other engine's anchors that belong to the template's range [low, high), as a half-open range.

    Anchors that exist only in the other engine join the range in front of them.
    """
    starts: list[int] = []
    ends: list[int] = []
    owner = -1
    for p in pairs:
        if p.a1 > p.a0:
            owner = p.a0
        at = p.a0 if p.a1 > p.a0 else max(owner, 0)
        if low <= at < high:
            starts.append(p.b0)
            ends.append(p.b1)
    return (min(starts), max(ends)) if starts else (0, 0)


def _moves(a: Seq[Work], b: Seq[Work], i: int, j: int, scale: float) -> list[tuple[int, int, float]]:
    out: list[tuple[int, int, float]] = []
    if i < len(a):
        out.append((1, 0, SKIP_COST))
    if j < len(b):
        out.append((0, 1, SKIP_COST))
    if i == len(a) or j == len(b) or a[i].role != b[j].role:
        return out
    if a[i].role == "attention":
        return [*out, (1, 1, 0.0)]
    for di in range(1, MAX_MERGE + 1):
        if i + di > len(a) or a[i + di - 1].role != "product":
            break
        for dj in range(1, MAX_MERGE + 1):
            if j + dj > len(b) or b[j + dj - 1].role != "product":
                break
            if min(di, dj) > 1:
                continue  # an n:m match with n, m > 1 is a chain of smaller ones or hides a difference
            work_a = sum(w.amount for w in a[i : i + di])
            work_b = sum(w.amount for w in b[j : j + dj]) * scale
            out.append((di, dj, abs(math.log(work_a / work_b)) + MERGE_PENALTY * (di + dj - 2)))
    return out


def _scale(a: Seq[Work], b: Seq[Work]) -> float:
    """How much dearer side a is overall, so that a slower device does not look like merged products."""
    total_a = sum(w.amount for w in a if w.role == "product")
    total_b = sum(w.amount for w in b if w.role == "product")
    return total_a / total_b if total_a > 0 and total_b > 0 else 1.0
