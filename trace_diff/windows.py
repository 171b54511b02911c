"""Steps of a trace: where each begins and ends, and which rows are its own.

Host rows belong to the step during which they began; device rows to the step of their launch, wherever they run.
The wall window follows the device: it begins when the step's annotation has begun *and* earlier steps' device work
is done (or its own kernels run beside it), and ends where the next window begins. In a steady engine that is the period of a token; where work is
pipelined (the device runs behind the host) it is the device's own period. Not for: accounts (attribute).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trace_diff import classify, grammar, repetition
from trace_diff.completeness import flagged
from trace_diff.ingest.trace import Trace
from trace_diff.links import CALL_KINDS, Links, links
from trace_diff.types import Kind, Phase, Step

Ints = npt.NDArray[np.int64]
_DEVICE_CALLS = ("launch", "graph_launch", "memcpy", "memset", "sync")
_PAUSE = 3  # a gap after a step longer than this many times the step is the server waiting, not the step


@dataclass(frozen=True, slots=True)
class Mark:
    """A step on the host, before device work is looked at."""

    name: str
    start: int
    end: int
    said: grammar.StepName
    track: int  # the thread that runs the steps
    inferred: bool = False


def steps(trace: Trace) -> list[Step]:
    """All steps of `trace`, in order; incomplete and empty ones are flagged, `complete` False. Computed once.

    Found from annotations (the engine's own before ProfilerStep, the outermost of nested ones, on one thread), else
    from repetition of graph launches, kernels or host operators; then every step carries the flag "inferred".
    """
    if "steps" not in trace.cache:
        found = marks(trace)
        trace.cache["steps"] = _steps(trace, found) if found else []
    return trace.cache["steps"]


def marks(trace: Trace) -> list[Mark]:
    """The steps as the host ran them: annotated, else inferred. One per step, same order. Computed once."""
    if "marks" not in trace.cache:
        trace.cache["marks"] = annotated(trace) or repetition.marks(trace)
    return trace.cache["marks"]


def annotated(trace: Trace) -> list[Mark]:
    """Step annotations of one thread, outermost only, in order."""
    for kind in (Kind.ANNOTATION, Kind.GPU_ANNOTATION, Kind.CPU_OP):
        found = _named(trace, trace.rows(kind))
        if found:
            return found
    return []


def _named(trace: Trace, rows: Ints) -> list[Mark]:
    events = trace.events
    if len(rows) == 0:
        return []
    said: dict[int, grammar.StepName] = {}
    grade = np.zeros(len(trace.names), np.int8)
    for i in np.unique(events.name[rows]).tolist():
        told = grammar.parse(trace.names[i])
        if told is not None:
            said[i], grade[i] = told, told.grade
    rows = rows[grade[events.name[rows]] > 0]
    if len(rows) == 0:
        return []
    best = int(grade[events.name[rows]].max())
    out: list[Mark] = []
    top = rows[grade[events.name[rows]] == best]
    time = Counter[int]()
    for track, ns in zip(events.track[top].tolist(), events.dur_ns[top].tolist(), strict=True):
        time[track] += ns + 1
    track = time.most_common(1)[0][0]  # the thread that spends most time in steps runs them
    for i in top[events.track[top] == track].tolist():
        start, end = int(events.ts_ns[i]), int(events.ts_ns[i] + events.dur_ns[i])
        if out and start < out[-1].end:
            continue  # nested in the one before: counted once
        name = trace.names[events.name[i]]
        out.append(Mark(name, start, end, said[int(events.name[i])], track))
    inner = rows[(grade[events.name[rows]] < best) & (events.track[rows] == track)]
    return [_told_inside(trace, mark, inner, said) for mark in out]


def _told_inside(trace: Trace, mark: Mark, inner: Ints, said: dict[int, grammar.StepName]) -> Mark:
    """Fill what the outer annotation leaves open (a ProfilerStep's phase) from the only one nested in it."""
    if mark.said.phase is not Phase.UNKNOWN or mark.said.empty:
        return mark
    starts = trace.events.ts_ns[inner]
    rows = inner[(starts >= mark.start) & (starts < mark.end)]
    phases = {said[int(trace.events.name[i])].phase for i in rows.tolist()}
    if len(phases) == 1:
        return replace(mark, said=replace(said[int(trace.events.name[rows[0]])], grade=mark.said.grade))
    return mark


def _steps(trace: Trace, marks: list[Mark]) -> list[Step]:
    events = trace.events
    tied = links(trace)
    starts = np.array([m.start for m in marks], np.int64)
    owner = _owners(trace, starts, tied)
    end = events.ts_ns + events.dur_ns
    last_work, first_work = _device_bounds(owner, tied, events.ts_ns, end, len(marks))
    begin = np.minimum(np.array([m.start for m in marks], np.int64), first_work)  # a skewed clock starts work early
    earlier = np.minimum(np.maximum.accumulate(last_work)[:-1], _first_kernels(trace, owner, len(marks))[1:])
    begin[1:] = np.maximum(begin[1:], earlier)
    begin = np.maximum.accumulate(begin)
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(len(marks) + 1))
    launched = _host_ends(trace, marks, owner)
    loose = tied.device_rows[owner[tied.device_rows] < 0]
    out: list[Step] = []
    for k, mark in enumerate(marks):
        rows = order[bounds[k] : bounds[k + 1]]
        done = max(mark.end, int(last_work[k]), int(launched[k]), int(begin[k]))
        stop = done
        if k + 1 < len(marks):
            stop = int(begin[k + 1])
            if stop - done > _PAUSE * max(done - int(begin[k]), 1):
                stop = done
        rows = _with_unlinked(rows, loose, events.ts_ns, int(begin[k]), stop)
        out.append(
            Step(
                rank=trace.rank,
                index=k,
                name=mark.name,
                phase=mark.said.phase,
                requests=mark.said.requests,
                tokens=mark.said.tokens,
                context=mark.said.context,
                start_ns=int(begin[k]),
                end_ns=max(stop, int(begin[k])),
                rows=rows,
                flags=("inferred",) if mark.inferred else (),
            )
        )
    return flagged(trace, out, [m.said.empty for m in marks], owner, tied)


def _owners(trace: Trace, starts: Ints, tied: Links) -> Ints:
    """Step of every row, -1 for none: host rows by their start, device rows by their launch."""
    events = trace.events
    owner = np.searchsorted(starts, events.ts_ns, side="right") - 1
    device = tied.device_rows
    call = np.where(tied.launch >= 0, tied.launch, tied.op)
    owner[device] = np.where(call >= 0, owner[np.maximum(call, 0)], -1)
    others = trace.rows(Kind.GPU_ANNOTATION, Kind.SYNC, Kind.PROFILER)
    spans = events.dur_ns[others] > 0
    owner[others[spans & (events.kind[others] == Kind.PROFILER)]] = -1
    return owner


def _device_bounds(owner: Ints, tied: Links, start: Ints, end: Ints, count: int) -> tuple[Ints, Ints]:
    """Last end and first start of each step's device work; the smallest and largest integer where it has none."""
    info = np.iinfo(np.int64)
    last, first = np.full(count, info.min, np.int64), np.full(count, info.max, np.int64)
    rows = tied.device_rows[owner[tied.device_rows] >= 0]
    np.maximum.at(last, owner[rows], end[rows])
    np.minimum.at(first, owner[rows], start[rows])
    return last, first


def _first_kernels(trace: Trace, owner: Ints, count: int) -> Ints:
    """Start of each step's first kernel; the largest integer where it has none.

    Where a step's kernels begin while earlier work still runs (a collective on another stream), it has begun.
    """
    first = np.full(count, np.iinfo(np.int64).max, np.int64)
    rows = trace.rows(Kind.KERNEL)
    rows = rows[owner[rows] >= 0]
    np.minimum.at(first, owner[rows], trace.events.ts_ns[rows])
    return first


def _host_ends(trace: Trace, marks: list[Mark], owner: Ints) -> Ints:
    """End of the last device launch or copy call of each step: sampling is often launched after the annotation."""
    last = np.full(len(marks), np.iinfo(np.int64).min, np.int64)
    calls = trace.rows(Kind.RUNTIME, Kind.DRIVER)
    wanted = trace.flags("device call", CALL_KINDS, lambda n: classify.call_class(n) in _DEVICE_CALLS)
    calls = calls[wanted[trace.events.name[calls]] & (owner[calls] >= 0)]
    np.maximum.at(last, owner[calls], trace.events.ts_ns[calls] + trace.events.dur_ns[calls])
    return last


def _with_unlinked(rows: Ints, loose: Ints, start: Ints, a: int, b: int) -> Ints:
    """Add device rows that no launch in the file explains (`loose`) and that begin inside the window."""
    lo, hi = np.searchsorted(start[loose], (a, b), side="left")
    return np.sort(np.concatenate([rows, loose[lo:hi]])).astype(np.int64) if hi > lo else rows
