"""Replay one step with some work taken out, to see what its wall would have been.

A step is a host thread that launches and sometimes waits, and device streams that run what was launched. The
replay keeps every observed dependency (an item starts after its launch and after the item before it on its
stream; a wait ends after the item it waited for) and every observed latency, and changes only what an edit
names. The step is replayed several times in a row, because a host that is faster in every step runs ahead of
the device over steps. Replayed without an edit it gives the traced wall exactly. So removing a kernel from a step that waits
for the host saves nothing, and removing a wait saves only what the wait delayed: an upper bound that knows
what is hidden behind what. The idea is that of Daydream (Zhu et al., USENIX ATC 2020), reduced to one step.
Not for: deciding what to remove (findings), several ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trace_diff import classify, hosttree
from trace_diff.ingest import Trace
from trace_diff.types import Kind, Step

_WAITS = re.compile(r"(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip)Memcpy(?!.*Async)")
UNKNOWN = -math.inf
ROUNDS = 4  # repetitions until the host's run-ahead has settled
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
    item: int  # position of the item waited for, -1: not known
    earlier: bool = False  # the item's counterpart in the step before is meant


@dataclass(frozen=True, slots=True)
class StepModel:
    """The dependencies of one step; times in ns since the step's start."""

    wall: float
    rows: list[int]  # device items, by start
    start: list[float]
    dur: list[float]
    launch: list[float]  # host time of the launch call; UNKNOWN where the trace has none
    queue: list[float]  # time from the end of the item before it to its start, had it been launched in time
    latency: list[float]  # time from its launch to its start, had the device been free
    previous: list[int]  # position of the item before it on its stream, -1 for none
    wrap: list[int]  # where there is none: position of the last item of its stream, in the step before
    other: list[int]  # position of an item of another stream that it waited for, -1 for none
    waits: list[Wait]
    host_start: dict[int, float]  # host row -> its start
    host_self: dict[int, float]  # host row -> its time outside nested rows
    host_lead: dict[int, float]  # outermost host row -> Python time in front of it, which goes when it goes

    def wall_with(self, edit: Edit) -> float:
        """Steady period of the step in ns with the edit applied; never longer than traced, never negative."""
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
        launch.append(UNKNOWN if row is None else float(e.ts_ns[row] - zero))
    previous, other = _predecessors(start, dur, launch, e.stream[device].tolist())
    last_of = {int(s): i for i, s in enumerate(e.stream[device].tolist())}
    wrap = [last_of[int(s)] if p < 0 else -1 for p, s in zip(previous, e.stream[device].tolist(), strict=True)]
    ready = [
        max(
            start[p] + dur[p] if p >= 0 else start[w] + dur[w] - step.wall_ns,
            start[o] + dur[o] if o >= 0 else UNKNOWN,
        )
        for p, w, o in zip(previous, wrap, other, strict=True)
    ]
    queue, latency = _delays(start, launch, ready)
    host = tree.rows.tolist()
    return StepModel(
        wall=float(step.wall_ns),
        rows=device.tolist(),
        start=start,
        dur=dur,
        launch=launch,
        queue=queue,
        latency=latency,
        previous=previous,
        wrap=wrap,
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


def _delays(start: list[float], launch: list[float], ready: list[float]) -> tuple[list[float], list[float]]:
    """Per item its delay behind the item before it (`ready`: end of that) and behind its launch.

    Only one of the two was seen, whichever came last; the other is what it was for the items where it was seen
    (median), but no more than the traced start allows.
    """
    fed = [s - c for s, r, c in zip(start, ready, launch, strict=True) if c > r]
    usual_latency = float(np.median(fed)) if fed else 5_000.0
    queued = [s - r for s, r, c in zip(start, ready, launch, strict=True) if r >= c + usual_latency]
    usual_queue = float(np.median(queued)) if queued else 1_000.0
    queue: list[float] = []
    latency: list[float] = []
    for s, r, c in zip(start, ready, launch, strict=True):
        if r + usual_queue >= c + usual_latency:
            queue.append(s - r)
            latency.append(min(usual_latency, s - c) if c != UNKNOWN else 0.0)
        else:
            queue.append(min(usual_queue, s - r))
            latency.append(s - c)
    return queue, latency


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
    calls = tree.rows[np.isin(e.kind[tree.rows], (Kind.RUNTIME, Kind.DRIVER))]
    kind_of = {c: _call_kind(trace.names[c]) for c in np.unique(e.name[calls]).tolist()}
    for row in calls.tolist():
        kind = kind_of[int(e.name[row])]
        if not kind:
            continue
        s = float(e.ts_ns[row] - step.start_ns)
        t = s + float(e.dur_ns[row])
        item = item_of.get(int(e.correlation[row]), -1)
        to_host = item >= 0 and classify.copy_kind(trace.name(device[item])) == "d2h"
        if to_host and kind == "copy" and ends[item] <= t:
            out.append(Wait(row, s, t, item))  # a copy that returned only when it was done
        elif kind == "wait":
            before = np.flatnonzero((launched < s) & (ends <= t))
            if len(before):
                out.append(Wait(row, s, t, int(before[np.argmax(ends[before])])))
                continue
            gone = np.flatnonzero(ends - step.wall_ns <= t)
            out.append(Wait(row, s, t, int(gone[np.argmax(ends[gone])]) if len(gone) else -1, earlier=True))
    return out


def _call_kind(name: str) -> str:
    """ "wait", "copy" or "" for a runtime call that can do neither."""
    if _WAITS.search(name):
        return "wait"
    return "copy" if "emcpy" in name else ""


def _replay(m: StepModel, edit: Edit) -> float:
    """Period of the edited step when it runs again and again."""
    cuts = sorted((m.host_start[r], ns) for r, ns in edit.host_cuts.items() if r in m.host_start)
    if not m.rows:
        return max(0.0, m.wall - sum(ns for _, ns in cuts))
    times = np.asarray([t for t, _ in cuts])
    taken = np.concatenate(([0.0], np.cumsum([ns for _, ns in cuts])))
    new = [edit.device.get(r, d) for r, d in zip(m.rows, m.dur, strict=True)]
    lag = taken[np.searchsorted(times, np.asarray(m.launch), side="left")].tolist()
    ends = [s + d - m.wall for s, d in zip(m.start, m.dur, strict=True)]  # of the round before
    last = max(ends)
    period = base = 0.0
    for _ in range(ROUNDS):
        shift = 0.0  # host time gained (negative) or lost at this round's waits so far
        end: list[float] = []
        pending = list(reversed(m.waits))
        for i, launch in enumerate(m.launch):
            while pending and pending[-1].start < launch:
                w = pending.pop()
                at = base + w.start - float(taken[np.searchsorted(times, w.start, side="left")]) + shift
                shift += _wait_change(m, w, at, end, ends, edit)
            prev, far, back = m.previous[i], m.other[i], m.wrap[i]
            before = end[prev] if prev >= 0 else ends[back] if back >= 0 else last
            if far >= 0:
                before = max(before, end[far])
            launched = base + launch - lag[i] + shift if launch != UNKNOWN else -math.inf
            if new[i] <= 0.0:
                end.append(max(before, launched))
            else:
                end.append(max(before + m.queue[i], launched + m.latency[i]) + new[i])
        for w in reversed(pending):
            at = base + w.start - float(taken[np.searchsorted(times, w.start, side="left")]) + shift
            shift += _wait_change(m, w, at, end, ends, edit)
        base += m.wall - float(taken[-1]) + shift
        period, last, ends = max(end) - last, max(end), end
    return max(0.0, min(m.wall, period))


def _wait_change(
    m: StepModel, w: Wait, start: float, end: list[float], ends: list[float], edit: Edit
) -> float:
    """How much longer (or, negative, shorter) a wait takes than it was traced to take."""
    if w.row in edit.waits:
        return -(w.end - w.start)
    if w.item < 0:
        return 0.0
    done_old = m.start[w.item] + m.dur[w.item] - (m.wall if w.earlier else 0.0)
    own = w.end - max(w.start, done_old)
    done = ends[w.item] if w.earlier else end[w.item] if w.item < len(end) else start
    return (max(start, done) + own - start) - (w.end - w.start)
