"""Replay one step with some work taken out, to see what its wall would have been.

A step is a host thread that launches and sometimes waits, and device streams that run what was launched. The
replay keeps every observed dependency (an item starts after its launch and after the item before it on its
stream; a wait ends after the item it waited for) and every observed latency, and changes only what an edit
names. Replayed without an edit it gives the traced wall exactly. So removing a kernel from a step that waits
for the host saves nothing, and removing a wait saves only what the wait delayed: an upper bound that knows
what is hidden behind what. The idea is that of Daydream (Zhu et al., USENIX ATC 2020), reduced to one step.
Not for: deciding what to remove (findings), several ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trace_diff import classify, hosttree
from trace_diff.ingest import Trace
from trace_diff.types import Kind, Step

_WAITS = re.compile(r"(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip)Memcpy(?!.*Async)")
_OTHER_STREAM_NS = 10_000  # an item that starts this close behind another stream's end depended on it


@dataclass(frozen=True, slots=True)
class Edit:
    """What to take out. Keys are indices into Trace.events; amounts are nanoseconds of traced time."""

    host_cuts: Mapping[int, float] = field(default_factory=dict)  # host row -> time its thread no longer spends
    device: Mapping[int, float] = field(default_factory=dict)  # device row -> its new duration; 0 removes it
    waits: frozenset[int] = frozenset()  # host rows of blocking calls that no longer happen


@dataclass(frozen=True, slots=True)
class Wait:
    """A host call that returned only when device work was done; times in ns since the step's start."""

    row: int
    start: float
    end: float
    item: int  # position of the item waited for; -1: work of an earlier step


@dataclass(frozen=True, slots=True)
class StepModel:
    """The dependencies of one step; times in ns since the step's start."""

    wall: float
    rows: list[int]  # device items, by start
    start: list[float]
    dur: list[float]
    launch: list[float]  # host time of the launch call; -1: before the step
    previous: list[int]  # position of the item before it on its stream, -1 for none
    other: list[int]  # position of an item of another stream that it waited for, -1 for none
    waits: list[Wait]
    host_start: dict[int, float]  # host row -> its start
    host_self: dict[int, float]  # host row -> its time outside nested rows
    host_lead: dict[int, float]  # outermost host row -> Python time in front of it, which goes when it goes

    def wall_with(self, edit: Edit) -> float:
        """Wall of the step in ns with the edit applied; never longer than traced, never negative."""
        return _replay(self, edit)


def build(trace: Trace, step: Step) -> StepModel:
    """The model of one step on one rank; CPU-only steps have no items and no waits."""
    e = trace.events
    tree = hosttree.build(trace, step)
    zero = step.start_ns
    device = step.rows[np.isin(e.kind[step.rows], (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET))]
    device = device[np.argsort(e.ts_ns[device], kind="stable")]
    calls = step.rows[np.isin(e.kind[step.rows], (Kind.RUNTIME, Kind.DRIVER))]
    by_correlation = {int(c): int(r) for c, r in zip(e.correlation[calls], calls, strict=True) if c > 0}
    start = (e.ts_ns[device] - zero).astype(float).tolist()
    dur = e.dur_ns[device].astype(float).tolist()
    launch: list[float] = []
    for c in e.correlation[device].tolist():
        row = by_correlation.get(c)
        launch.append(-1.0 if row is None else float(e.ts_ns[row] - zero))
    previous, other = _predecessors(start, dur, launch, e.stream[device].tolist())
    host = tree.rows.tolist()
    return StepModel(
        wall=float(step.wall_ns),
        rows=device.tolist(),
        start=start,
        dur=dur,
        launch=launch,
        previous=previous,
        other=other,
        waits=_waits(trace, step, tree, device.tolist(), start, dur, launch),
        host_start={r: float(e.ts_ns[r] - zero) for r in host},
        host_self=dict(zip(host, tree.self_ns.astype(float).tolist(), strict=True)),
        host_lead=dict(zip(host, tree.lead_ns(trace).astype(float).tolist(), strict=True)),
    )


def _predecessors(
    start: list[float], dur: list[float], launch: list[float], streams: list[int]
) -> tuple[list[int], list[int]]:
    last: dict[int, int] = {}
    previous: list[int] = []
    other: list[int] = []
    for i, stream in enumerate(streams):
        prev = last.get(stream, -1)
        ready = max(start[prev] + dur[prev] if prev >= 0 else 0.0, launch[i])
        previous.append(prev)
        pick = -1
        if start[i] - ready > _OTHER_STREAM_NS:
            for j in (k for s, k in last.items() if s != stream):
                end = start[j] + dur[j]
                if 0 <= start[i] - end <= _OTHER_STREAM_NS and end > ready:
                    pick, ready = j, end
        other.append(pick)
        last[stream] = i
    return previous, other


def _waits(
    trace: Trace,
    step: Step,
    tree: hosttree.HostTree,
    device: list[int],
    start: list[float],
    dur: list[float],
    launch: list[float],
) -> list[Wait]:
    e = trace.events
    item_of = {int(e.correlation[r]): i for i, r in enumerate(device) if e.correlation[r] > 0}
    ends = np.asarray(start) + np.asarray(dur)
    launched = np.asarray(launch)
    out: list[Wait] = []
    for row in tree.rows.tolist():
        if e.kind[row] not in (Kind.RUNTIME, Kind.DRIVER):
            continue
        s = float(e.ts_ns[row] - step.start_ns)
        t = s + float(e.dur_ns[row])
        name = trace.names[e.name[row]]
        item = item_of.get(int(e.correlation[row]), -1)
        to_host = item >= 0 and classify.copy_kind(trace.name(device[item])) == "d2h"
        if to_host and "emcpy" in name and ends[item] <= t:
            out.append(Wait(row, s, t, item))  # a copy that returned only when it was done
        elif _WAITS.search(name):
            before = np.flatnonzero((launched < s) & (ends <= t))
            target = int(before[np.argmax(ends[before])]) if len(before) else -1
            out.append(Wait(row, s, t, target))
    return out


def _replay(m: StepModel, edit: Edit) -> float:
    cuts = sorted((m.host_start[r], ns) for r, ns in edit.host_cuts.items() if r in m.host_start)
    times = np.asarray([t for t, _ in cuts])
    taken = np.concatenate(([0.0], np.cumsum([ns for _, ns in cuts])))
    shift = 0.0  # host time gained (negative) or lost at waits so far
    end: list[float] = []
    pending = list(reversed(m.waits))
    freed = 0.0  # device time saved while the device was the one that set the pace

    def host(t: float) -> float:
        return max(0.0, t - float(taken[np.searchsorted(times, t, side="left")]) + shift)

    def pass_waits(until: float) -> None:
        nonlocal shift
        while pending and pending[-1].start < until and pending[-1].item < len(end):
            w = pending.pop()
            shift += _wait_change(m, w, host(w.start), end, edit, freed)

    for i, row in enumerate(m.rows):
        pass_waits(m.launch[i])
        prev, far = m.previous[i], m.other[i]
        before = max((m.start[j] + m.dur[j] for j in (prev, far) if j >= 0), default=0.0)
        ready_old = max(before, m.launch[i])
        ready = max((end[j] for j in (prev, far) if j >= 0), default=0.0)
        ready = max(ready, host(m.launch[i]) if m.launch[i] >= 0 else 0.0)
        new = edit.device.get(row, m.dur[i])
        latency = m.start[i] - ready_old
        begin = ready if new <= 0.0 else ready + latency
        end.append(begin + max(new, 0.0))
        if before >= m.launch[i]:
            freed += m.dur[i] - new
    pass_waits(float("inf"))
    host_end = host(m.wall)
    if not m.rows:
        return min(m.wall, host_end)
    last_old = max(s + d for s, d in zip(m.start, m.dur, strict=True))
    device_end = max(end) - max(0.0, last_old - m.wall)
    return min(m.wall, max(host_end, device_end))


def _wait_change(m: StepModel, w: Wait, start: float, end: list[float], edit: Edit, freed: float) -> float:
    """How much longer (or, negative, shorter) a wait takes than it was traced to take."""
    if w.row in edit.waits:
        return -(w.end - w.start)
    if w.item < 0:
        return -min(w.end - w.start, freed)
    done_old = m.start[w.item] + m.dur[w.item]
    own = w.end - max(w.start, done_old)
    finish = max(start, end[w.item]) + own
    return (finish - start) - (w.end - w.start)
