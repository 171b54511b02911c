"""The host's side of a window: self time of the step's thread by category, exactly; and where it was blocked.

Not for: the device's side (device).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff import classify
from trace_diff.device import HostSide
from trace_diff.ingest.trace import Trace
from trace_diff.intervals import intersect, union
from trace_diff.links import CALL_KINDS
from trace_diff.nesting import NESTED_KINDS, nesting
from trace_diff.types import Kind
from trace_diff.windows import marks

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostTable:
    """Category of every host row, as a number, and the categories' names."""

    category: npt.NDArray[np.int32]  # per event; -1: no host call
    names: list[str]


def table(trace: Trace) -> HostTable:
    """Categories of host rows: op classes, "python", "runtime.launch", "runtime.sync" ... Computed once."""
    if "host_table" not in trace.cache:
        events = trace.events
        numbers: dict[str, int] = {}
        category = np.full(len(events), -1, np.int32)
        for kind in NESTED_KINDS:
            lookup = np.full(len(trace.names), -1, np.int32)
            for i in trace.names_of(kind):
                name = _category(trace.names[i], kind)
                lookup[i] = numbers.setdefault(name, len(numbers))
            rows = trace.rows(kind)
            category[rows] = lookup[events.name[rows]]
        trace.cache["host_table"] = HostTable(category, list(numbers))
    return trace.cache["host_table"]


def _category(name: str, kind: int) -> str:
    if kind == Kind.PYTHON:
        # the wait for an asynchronous collective (torch.distributed.Work.wait) is communication, not Python
        return "communication" if name.startswith("<built-in method wait of pybind11") else "python"
    if kind in (Kind.RUNTIME, Kind.DRIVER):
        return f"runtime.{classify.call_class(name)}"
    return classify.op_class(name)


def self_times(trace: Trace, track: int, start: int, end: int) -> dict[str, int]:
    """Self time per category on one thread inside [start, end); with "untraced" for what no row covers, sums to it.

    Each instant belongs to the innermost row that is open, so nested operators are never counted twice.
    """
    kinds = table(trace)
    rows, own = _innermost_time(trace, track, start, end)
    sums = np.zeros(len(kinds.names), np.int64)
    np.add.at(sums, kinds.category[rows], own)
    out = {kinds.names[k]: int(sums[k]) for k in np.flatnonzero(sums).tolist()}
    rest = end - start - int(sums.sum())
    if rest:
        out["untraced"] = rest
    return out


def innermost(trace: Trace, track: int, start: int, end: int) -> dict[str, int]:
    """Names of the innermost rows of one thread in [start, end), with the time for which each was innermost."""
    rows, own = _innermost_time(trace, track, start, end)
    out: dict[str, int] = {}
    for i in np.flatnonzero(own > 0).tolist():
        name = trace.names[trace.events.name[rows[i]]]
        out[name] = out.get(name, 0) + int(own[i])
    return out


def _innermost_time(trace: Trace, track: int, start: int, end: int) -> tuple[Ints, Ints]:
    """(rows of the thread that are open somewhere in the window, for how long each is the innermost one)."""
    tree, events = nesting(trace), trace.events
    thread, begin = _thread_rows(trace, track)
    lo, hi = np.searchsorted(begin, (start, end), side="left")
    rows = thread[lo:hi]
    if lo > 0:  # what is open at the start encloses, or is, the last row before it
        row, still = int(thread[lo - 1]), []
        while row >= 0:
            if tree.end_ns[row] > start:
                still.append(row)
            row = int(tree.parent[row])
        rows = np.concatenate([np.array(still[::-1], np.int64), rows])
    a, b = np.maximum(events.ts_ns[rows], start), np.minimum(tree.end_ns[rows], end)
    length = np.maximum(b - a, 0)
    own = length.copy()
    up = tree.parent[rows]
    at = np.minimum(np.searchsorted(rows, up), max(len(rows) - 1, 0))
    inner = np.flatnonzero((up >= 0) & (rows[at] == up)) if len(rows) else at
    np.subtract.at(own, at[inner], length[inner])
    return rows, own


def _thread_rows(trace: Trace, track: int) -> tuple[Ints, Ints]:
    """Host rows of a thread and their starts."""
    key = f"thread{track}"
    if key not in trace.cache:
        rows = trace.rows(*NESTED_KINDS)
        rows = rows[trace.events.track[rows] == track]
        trace.cache[key] = rows, trace.events.ts_ns[rows]
    return trace.cache[key]


def blocking_rows(trace: Trace) -> Ints:
    """Calls that wait for the device: synchronisations, and copies that return only when they are done."""
    if "blocking" not in trace.cache:
        events = trace.events
        calls = trace.rows(Kind.RUNTIME, Kind.DRIVER)
        trace.cache["blocking"] = calls[trace.flags("blocks", CALL_KINDS, _blocks)[events.name[calls]]]
    return trace.cache["blocking"]


def _blocks(name: str) -> bool:
    if classify.call_class(name) == "sync":
        return True
    text = name.lower()
    return "memcpy" in text and "async" not in text and ("memcpywithstream" in text or text.endswith(("memcpy", "dtoh", "dtoh_v2")))


def side(trace: Trace) -> HostSide:
    """Intervals in which the steps' thread was blocked, and in which it was inside a step. Computed once."""
    if "host_side" not in trace.cache:
        events = trace.events
        found = marks(trace)
        track = found[0].track if found else -1
        rows = blocking_rows(trace)
        on = rows[events.track[rows] == track]
        rows = on if len(on) else rows
        blocked = union(events.ts_ns[rows], events.ts_ns[rows] + events.dur_ns[rows])
        inside = union(np.array([m.start for m in found], np.int64), np.array([m.end for m in found], np.int64))
        trace.cache["host_side"] = HostSide(blocked, inside, intersect(blocked, inside))
    return trace.cache["host_side"]
