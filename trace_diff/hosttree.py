"""The call tree of one step's host thread: parents and self times of operators and runtime calls.

Not for: accounting a step's wall (attribute does that), device rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff.ingest import Trace
from trace_diff.types import Kind, Step

HOST_KINDS = (Kind.CPU_OP, Kind.RUNTIME, Kind.DRIVER)


@dataclass(frozen=True, slots=True)
class HostTree:
    """Rows of one thread in call order; `parent[i]` indexes into these arrays, -1 for the outermost."""

    track: int
    rows: npt.NDArray[np.int64]  # indices into Trace.events
    parent: npt.NDArray[np.int64]
    self_ns: npt.NDArray[np.int64]  # duration minus that of the direct children

    def __len__(self) -> int:
        return len(self.rows)

    def children(self) -> list[list[int]]:
        """Direct children of every entry, in call order."""
        out: list[list[int]] = [[] for _ in range(len(self))]
        for i, p in enumerate(self.parent.tolist()):
            if p >= 0:
                out[p].append(i)
        return out

    def outermost(self) -> list[int]:
        """Entries without a parent, in call order."""
        return np.flatnonzero(self.parent < 0).tolist()

    def gaps_ns(self, trace: Trace) -> npt.NDArray[np.int64]:
        """Untraced host time in front of each outermost entry but the first, in call order."""
        e, rows = trace.events, self.rows[self.outermost()]
        start, end = e.ts_ns[rows], np.maximum.accumulate(e.ts_ns[rows] + e.dur_ns[rows])
        return np.maximum(start[1:] - end[:-1], 0)

    def lead_ns(self, trace: Trace, most: float = 3.0) -> npt.NDArray[np.int64]:
        """`gaps_ns` by entry (0 for those that are not outermost): the Python that leads up to it.

        A pause longer than `most` times the median is something else (a wait, another thread) and is cut there.
        """
        out, gaps = np.zeros(len(self), np.int64), self.gaps_ns(trace)
        if len(gaps):
            out[self.outermost()[1:]] = np.minimum(gaps, int(most * float(np.median(gaps))))
        return out


def step_track(trace: Trace, step: Step) -> int:
    """The thread that ran the step: the one with most operators, else most runtime calls; -1 when host-less."""
    e = trace.events
    for kinds in ((Kind.CPU_OP,), (Kind.RUNTIME, Kind.DRIVER)):
        rows = step.rows[np.isin(e.kind[step.rows], kinds)]
        if len(rows):
            tracks, counts = np.unique(e.track[rows], return_counts=True)
            return int(tracks[np.argmax(counts)])
    return -1


def build(trace: Trace, step: Step, kinds: tuple[Kind, ...] = HOST_KINDS) -> HostTree:
    """The tree of the step's own thread, of the given kinds only.

    Rows that cross (start inside one another without nesting) keep both: the later one counts as a child for
    the part that lies inside, so self times never go negative.
    """
    e = trace.events
    track = step_track(trace, step)
    rows = step.rows[np.isin(e.kind[step.rows], kinds) & (e.track[step.rows] == track)]
    order = np.lexsort((-e.dur_ns[rows], e.ts_ns[rows]))
    rows = rows[order]
    start = e.ts_ns[rows].tolist()
    end = (e.ts_ns[rows] + e.dur_ns[rows]).tolist()
    own = e.dur_ns[rows].tolist()
    parent = [-1] * len(rows)
    stack: list[int] = []
    for i, (s, t) in enumerate(zip(start, end, strict=True)):
        while stack and end[stack[-1]] <= s:
            stack.pop()
        if stack:
            parent[i] = stack[-1]
            own[stack[-1]] -= min(t, end[stack[-1]]) - s
        stack.append(i)
    return HostTree(track, rows, np.asarray(parent, dtype=np.int64), np.asarray(own, dtype=np.int64))
