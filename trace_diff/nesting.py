"""Call trees of host threads: parent, depth and self time of every host row, without a Python loop over rows.

Not for: device rows; annotations (they may cross frames and are looked at on their own).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff.ingest.trace import Trace
from trace_diff.types import Kind

Ints = npt.NDArray[np.int64]
NESTED_KINDS = (Kind.CPU_OP, Kind.RUNTIME, Kind.DRIVER, Kind.PYTHON)
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Nesting:
    """Per event of the trace; -1 and 0 where the row is no host call."""

    parent: npt.NDArray[np.int32]  # enclosing host row of the same thread, -1: none
    depth: npt.NDArray[np.int32]  # 0: outermost, -1: not a host call
    end_ns: Ints  # end, cut to the parent's end where two rows cross
    self_ns: Ints  # duration less that of direct children


def nesting(trace: Trace) -> Nesting:
    """The call trees of `trace`, computed once."""
    if "nesting" not in trace.cache:
        trace.cache["nesting"] = _nesting(trace)
    return trace.cache["nesting"]


def _nesting(trace: Trace) -> Nesting:
    events = trace.events
    n = len(events)
    parent = np.full(n, -1, np.int32)
    depth = np.full(n, -1, np.int32)
    end = events.ts_ns + events.dur_ns
    rows = trace.rows(*NESTED_KINDS)
    order = rows[stable(events.track[rows])]
    tracks = events.track[order]
    cuts = np.append(0, np.append(np.flatnonzero(np.diff(tracks)) + 1, len(order)))
    for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        if b > a:
            _thread(events.ts_ns, end, order[a:b], parent, depth)
    self_ns = np.where(depth >= 0, end - events.ts_ns, 0)
    children = np.flatnonzero(parent >= 0)
    np.subtract.at(self_ns, parent[children], end[children] - events.ts_ns[children])
    return Nesting(parent, depth, end, self_ns)


def _thread(
    start: Ints, end: Ints, rows: Ints, parent: npt.NDArray[np.int32], depth: npt.NDArray[np.int32]
) -> None:
    """One thread; `rows` by start, longest first. Rows that cross their parent's end are cut there."""
    begin = start[rows] * 2
    level, up, crossing = _levels(begin, end[rows])
    for _ in range(_ROUNDS):
        if len(crossing) == 0:
            break
        end[rows[crossing]] = np.maximum(end[rows[up[crossing]]], start[rows[crossing]])
        level, up, crossing = _levels(begin, end[rows])
    parent[rows] = np.where(up >= 0, rows[up], -1)
    depth[rows] = level


def stable(values: npt.NDArray[np.integer]) -> Ints:
    """Indices that sort `values`, equals in order; small numbers by radix, several times faster."""
    if len(values) and int(values.max()) < 1 << 15 and int(values.min()) >= -(1 << 15):
        values = values.astype(np.int16)
    return np.argsort(values, kind="stable")


def _levels(begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """(depth, index of the parent, indices of rows that outlast their parent); `begin` is in half ticks."""
    stop = np.maximum(end * 2, begin + 1)  # a zero-length row is open for half a tick: it nests in what it touches
    level = np.arange(len(begin)) - np.searchsorted(np.sort(stop, kind="stable"), begin, side="right")
    up = _parents(level)
    return level, up, np.flatnonzero((up >= 0) & (stop > stop[up]))


def _parents(level: Ints) -> Ints:
    """For rows in order of start: the last earlier row one level up, -1 at level 0."""
    up = np.full(len(level), -1, np.int64)
    order = stable(level)
    bounds = np.append(0, np.cumsum(np.bincount(level)))
    for d in range(1, len(bounds) - 1):
        here = order[bounds[d] : bounds[d + 1]]
        above = order[bounds[d - 1] : bounds[d]]
        if len(here) and len(above):
            found = np.searchsorted(above, here) - 1
            up[here] = np.where(found >= 0, above[np.maximum(found, 0)], -1)
    return up


def enclosing(trace: Trace, kind: Kind) -> npt.NDArray[np.int32]:
    """For every row: itself or its nearest enclosing host row of `kind`; -1 where there is none. Computed once."""
    key = f"enclosing{int(kind)}"
    if key not in trace.cache:
        tree = nesting(trace)
        found = np.where(trace.events.kind == kind, np.arange(len(trace.events)), -1).astype(np.int32)
        order = stable(tree.depth)
        counts = np.bincount(tree.depth + 1)
        bounds = np.append(0, np.cumsum(counts))
        for d in range(2, len(bounds) - 1):
            here = order[bounds[d] : bounds[d + 1]]
            here = here[found[here] < 0]
            up = tree.parent[here]
            found[here] = np.where(up >= 0, found[up], -1)
        trace.cache[key] = found
    return trace.cache[key]
