"""Host calls that wait for the device: which operator and line made them, and what they cost.

A wait costs what it starves: after it the device has run dry and idles until the host has launched again. Its price
is the device's idle time between this wait and the next, but no more than the time that the wait itself took; so a
read on a saturated device is listed and worth little, and prices never sum to more than idle time or blocked time.
Not for: what a fix saves in the end (findings).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff import classify
from trace_diff.host import blocking_rows
from trace_diff.ingest.schema import WORK_KINDS
from trace_diff.ingest.trace import Trace
from trace_diff.intervals import EMPTY, Spans, cover, gaps, union
from trace_diff.links import links
from trace_diff.nesting import nesting
from trace_diff.types import Kind, Step, SyncPoint

Ints = npt.NDArray[np.int64]
_CARRIERS = ("host_read", "copy")


@dataclass(frozen=True, slots=True)
class Waits:
    """Every blocking call of a trace, by start."""

    rows: Ints
    blocked_ns: Ints
    starves_ns: Ints


def waits(trace: Trace) -> Waits:
    """Blocking calls of `trace` with their price, computed once."""
    if "waits" not in trace.cache:
        trace.cache["waits"] = _waits(trace)
    return trace.cache["waits"]


def _waits(trace: Trace) -> Waits:
    events = trace.events
    rows = np.union1d(blocking_rows(trace), _pageable_reads(trace)).astype(np.int64)
    start = events.ts_ns[rows]
    blocked = events.dur_ns[rows]
    launching = np.unique(events.track[links(trace).launch[links(trace).launch >= 0]])
    starves = np.zeros(len(rows), np.int64)
    active = np.flatnonzero(np.isin(events.track[rows], launching))
    if len(active):
        idle = _idle(trace)
        begin = start[active]
        following = np.append(begin[1:], np.iinfo(np.int64).max // 4)
        starves[active] = np.minimum(blocked[active], cover(idle, begin, following))
    return Waits(rows, blocked, starves)


def _pageable_reads(trace: Trace) -> Ints:
    """Copies to pageable host memory return only when they are done, whatever their call is named."""
    tied, events = links(trace), trace.events
    wanted = trace.flags(
        "pageable read", (Kind.MEMCPY,), lambda n: "pageable" in n.lower() and classify.copy_kind(n) == "d2h"
    )
    hit = wanted[events.name[tied.device_rows]] & (events.kind[tied.device_rows] == Kind.MEMCPY) & (tied.launch >= 0)
    return np.unique(tied.launch[hit])


def _idle(trace: Trace) -> Spans:
    """Times between the first and last device row at which nothing ran."""
    events = trace.events
    rows = trace.rows(*WORK_KINDS)
    if len(rows) == 0:
        return EMPTY
    end = events.ts_ns[rows] + events.dur_ns[rows]
    return gaps(union(events.ts_ns[rows], end), int(events.ts_ns[rows[0]]), int(end.max()))


def sync_points(trace: Trace, steps: Sequence[Step]) -> tuple[SyncPoint, ...]:
    """Blocking calls per operator and Python line, mean per step over `steps`, dearest first."""
    found = waits(trace)
    if not steps or len(found.rows) == 0:
        return ()
    sums: dict[tuple[str, str | None], list[int]] = defaultdict(lambda: [0, 0, 0])
    inside = np.zeros(len(trace.events), bool)
    for step in steps:
        inside[step.rows] = True
    for k in np.flatnonzero(inside[found.rows]).tolist():
        row = int(found.rows[k])
        total = sums[(operator(trace, row), site(trace, row))]
        total[0] += 1
        total[1] += int(found.blocked_ns[k])
        total[2] += int(found.starves_ns[k])
    n = len(steps)
    points = [SyncPoint(op, where, c / n, blocked / n, starves / n) for (op, where), (c, blocked, starves) in sums.items()]
    return tuple(sorted(points, key=lambda p: (-p.starves_ns, -p.blocked_ns, p.op)))


def operator(trace: Trace, row: int) -> str:
    """What the program asked for: the outermost host read or copy around a call, else the operator, else the call."""
    tree, events = nesting(trace), trace.events
    best = None
    up = int(tree.parent[row])
    while up >= 0:
        if events.kind[up] == Kind.CPU_OP:
            name = trace.names[events.name[up]]
            if classify.op_class(name) in _CARRIERS:
                best = name
            elif best is not None:
                break
            else:
                best = name
                break
        elif events.kind[up] == Kind.PYTHON and best is not None:
            break
        up = int(tree.parent[up])
    return best or trace.names[events.name[row]]


def site(trace: Trace, row: int) -> str | None:
    """The innermost Python line around a call that is not the framework's own: "file.py(123): function"; None
    without stacks."""
    tree, events = nesting(trace), trace.events
    nearest = None
    up = int(tree.parent[row])
    while up >= 0:
        if events.kind[up] == Kind.PYTHON:
            name = trace.names[events.name[up]]
            if ".py(" in name:
                nearest = nearest or name
                if not _framework(name):
                    return name
        up = int(tree.parent[up])
    return nearest


def _framework(name: str) -> bool:
    path = name.split("(", 1)[0].replace("\\\\", "/")
    return path.startswith(("torch/", "<")) or "/torch/" in path or "site-packages/torch/" in path
