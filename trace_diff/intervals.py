"""Sets of half-open integer intervals, vectorised. Not for: what the intervals mean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Disjoint intervals in order: starts[i] < ends[i] <= starts[i + 1]."""

    starts: Ints
    ends: Ints

    @property
    def total(self) -> int:
        """Covered length."""
        return int((self.ends - self.starts).sum())


EMPTY = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(starts: Ints, ends: Ints) -> Spans:
    """Merge intervals in any order; empty ones vanish and touching ones join."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if len(starts) == 0:
        return EMPTY
    if (np.diff(starts) < 0).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] > reach[:-1]
    at = np.flatnonzero(first)
    return Spans(starts[at], np.append(reach[at[1:] - 1], reach[-1]))


def clip(spans: Spans, start: int, end: int) -> Spans:
    """The part of `spans` inside [start, end)."""
    starts, ends = np.maximum(spans.starts, start), np.minimum(spans.ends, end)
    keep = ends > starts
    return Spans(starts[keep], ends[keep])


def gaps(spans: Spans, start: int, end: int) -> Spans:
    """What of [start, end) `spans` leave uncovered."""
    inside = clip(spans, start, end)
    starts, ends = np.append(start, inside.ends), np.append(inside.starts, end)
    keep = ends > starts
    return Spans(starts[keep], ends[keep])


def covered_before(spans: Spans, times: Ints) -> Ints:
    """For each time, the length that `spans` cover before it; differences give the cover of any interval."""
    if len(spans.starts) == 0:
        return np.zeros(len(times), np.int64)
    lengths = spans.ends - spans.starts
    sums = np.append(0, np.cumsum(lengths))
    i = np.searchsorted(spans.starts, times, side="right")
    inside = np.minimum(np.maximum(times - spans.starts[i - 1], 0), lengths[i - 1])
    return np.where(i > 0, sums[np.maximum(i - 1, 0)] + inside, 0)


def cover(spans: Spans, starts: Ints, ends: Ints) -> Ints:
    """How much of each [start, end) is covered by `spans`."""
    return covered_before(spans, ends) - covered_before(spans, starts)


def first_come(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Disjoint pieces of intervals sorted by start: each instant goes to the interval that began first.

    Returns (piece starts, piece ends), one piece per interval, possibly empty; their sum is the union's length.
    """
    if len(starts) == 0:
        return starts, ends
    reach = np.empty(len(ends), np.int64)
    reach[0] = np.iinfo(np.int64).min
    reach[1:] = np.maximum.accumulate(ends)[:-1]
    begin = np.minimum(np.maximum(starts, reach), np.maximum(ends, starts))
    return begin, np.maximum(ends, begin)


def intersect(a: Spans, b: Spans) -> Spans:
    """What both cover."""
    points = np.unique(np.concatenate([a.starts, a.ends, b.starts, b.ends]))
    if len(points) < 2:
        return EMPTY
    starts, ends = points[:-1], points[1:]
    both = (cover(a, starts, ends) > 0) & (cover(b, starts, ends) > 0)
    return union(starts[both], ends[both])


def minus(a: Spans, b: Spans) -> Spans:
    """What `a` covers and `b` does not."""
    if len(a.starts) == 0 or len(b.starts) == 0:
        return a
    points = np.unique(np.concatenate([a.starts, a.ends, b.starts, b.ends]))
    starts, ends = points[:-1], points[1:]
    only = (cover(a, starts, ends) > 0) & (cover(b, starts, ends) == 0)
    return union(starts[only], ends[only])
