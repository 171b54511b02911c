"""The device's side of a window: which work covers each instant, and why nothing does where nothing does.

Every instant of a window goes to exactly one part, so parts sum to the wall by construction. Where work of several streams
overlaps, computation and copies come before communication (so communication is what is *exposed*), and work of known origin
before work of none. On one stream, what began first comes first: a kernel that begins before the one in front of it has ended
was launched early (programmatic dependent launch) and waits for it. Not for: the host's side (host), averages (attribute).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trace_diff import classify
from trace_diff.ingest.schema import WORK_KINDS
from trace_diff.ingest.trace import Trace
from trace_diff.intervals import EMPTY, Spans, cover, first_come, gaps, intersect, minus, union
from trace_diff.links import Links, links

if TYPE_CHECKING:
    from trace_diff.collectives import Collectives

Ints = npt.NDArray[np.int64]

LATENCY_NS = 30_000  # from a launch call's end to its kernel's start; what is longer has another cause
GRAPH_GAP_NS = 50_000  # between two kernels of one replay; what is longer was not recorded

HOST_LATE = "idle.host_late"  # the host had not launched yet
HOST_SYNC = "idle.host_sync"  # the host was blocked in a synchronisation, or had just come back from one
LATENCY = "idle.launch_latency"  # launched, not yet running
DEPENDENCY = "idle.dependency"  # launched long before: another stream, an event, a peer
IN_GRAPH = "idle.graph_gap"  # between kernels of one graph replay
NOT_RECORDED = "idle.not_recorded"  # a hole inside one graph replay: its kernels were not profiled
BETWEEN = "idle.between_steps"  # the host was outside any step
SKEW = "idle.clock_skew"  # the kernel starts before its launch does: the cause cannot be told
UNLINKED = "unlinked"
QUARANTINED = "quarantined"
UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Lanes:
    """Device work of a trace in order of start, with what is asked of it often."""

    rows: Ints
    start: Ints
    begin: Ints  # start, or where later the end of what came before it on its stream
    end: Ints
    reach: Ints  # running maximum of end
    cls: npt.NDArray[np.int32]  # index into classes
    classes: list[str]
    is_comm: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]  # its launch (or op) is in the file, or the file has no launches at all
    tied: Links

    def of(self, rows: Ints) -> Ints:
        """Where those of these rows stand that are device work, in their order."""
        if len(self.rows) == 0:
            return self.rows
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return at[self.rows[at] == rows]


def lanes(trace: Trace) -> Lanes:
    """Device work of `trace`, computed once."""
    if "lanes" not in trace.cache:
        events = trace.events
        tied = links(trace)
        rows = tied.device_rows
        end = events.ts_ns[rows] + events.dur_ns[rows]
        used = np.unique(events.name[rows])
        names = {int(i): classify.kernel_class(trace.names[i]) for i in used}
        classes = sorted(set(names.values()))
        number = {c: k for k, c in enumerate(classes)}
        table = np.zeros(len(trace.names) + 1, np.int32)
        for i, cls in names.items():
            table[i] = number[cls]
        cls = table[events.name[rows]]
        any_call = bool((tied.launch >= 0).any() or (tied.op >= 0).any())
        known = (tied.launch >= 0) | (tied.op >= 0) | (not any_call)
        reach = np.maximum.accumulate(end) if len(end) else end
        comm = cls == number.get("communication", -1)
        start = events.ts_ns[rows]
        trace.cache["lanes"] = Lanes(rows, start, _begin(start, end, events.track[rows]), end, reach, cls, classes, comm, known, tied)
    return trace.cache["lanes"]


def alone_ns(trace: Trace, rows: Ints) -> Ints:
    """Time of device rows for themselves: what a kernel waits for the one in front of it on its stream is not in it."""
    lane = lanes(trace)
    at = lane.of(rows)
    return lane.end[at] - lane.begin[at]


def _begin(start: Ints, end: Ints, stream: npt.NDArray[np.int32]) -> Ints:
    """First come, first served on each stream."""
    begin = start.copy()
    for one in np.unique(stream):
        mine = np.flatnonzero(stream == one)
        begin[mine] = first_come(start[mine], end[mine])[0]
    return begin


@dataclass(slots=True)
class Window:
    """The account of one window on the device."""

    parts: dict[str, int]
    busy: Spans
    idle: Spans


def account(trace: Trace, start: int, end: int, host: HostSide, wait: Collectives | None = None) -> Window:
    """Parts of [start, end) by what the device did; sums to end - start exactly."""
    lane = lanes(trace)
    lo, hi = int(np.searchsorted(lane.reach, start, side="right")), int(np.searchsorted(lane.start, end, side="left"))
    sel = np.arange(lo, max(hi, lo))
    sel = sel[lane.end[sel] > start]
    sel = sel[np.argsort(lane.begin[sel], kind="stable")]
    s, e = np.clip(lane.begin[sel], start, end), np.minimum(lane.end[sel], end)
    parts: dict[str, int] = {}
    covered = EMPTY
    for comm, known in ((False, True), (True, True), (False, False), (True, False)):
        layer = np.flatnonzero((lane.is_comm[sel] == comm) & (lane.known[sel] == known))
        if len(layer) == 0:
            continue
        a, b = first_come(s[layer], e[layer])
        own = (b - a) - cover(covered, a, b)
        if not known:
            _add(parts, UNLINKED, int(own.sum()))
        elif comm:
            _communication(parts, lane, sel[layer], a, b, own, covered, wait, trace)
        else:
            sums = np.zeros(len(lane.classes), np.int64)
            np.add.at(sums, lane.cls[sel[layer]], own)
            for k in np.flatnonzero(sums).tolist():
                _add(parts, f"gpu.{lane.classes[k]}", int(sums[k]))
        covered = union(np.append(covered.starts, s[layer]), np.append(covered.ends, e[layer]))
    idle = gaps(covered, start, end)
    doubtful = _doubtful(trace, lane, idle)
    _add(parts, QUARANTINED, doubtful.total)
    for cause, ns in _causes(trace, lane, minus(idle, doubtful), host).items():
        _add(parts, cause, ns)
    return Window(parts, covered, idle)


def _add(parts: dict[str, int], name: str, ns: int) -> None:
    if ns:
        parts[name] = parts.get(name, 0) + ns


def _communication(
    parts: dict[str, int],
    lane: Lanes,
    rows: Ints,
    a: Ints,
    b: Ints,
    own: Ints,
    covered: Spans,
    wait: Collectives | None,
    trace: Trace,
) -> None:
    """Exposed communication; split where the peers' traces tell how long this rank waited, else `comm.unsplit`."""
    total = int(own.sum())
    if wait is None:
        _add(parts, "comm.unsplit", total)
        return
    until, told = wait.arrival(trace.rank, lane.rows[rows], a)
    middle = np.minimum(np.maximum(until, a), b)
    waiting = (middle - a) - cover(covered, a, middle)
    _add(parts, "comm.wait", int(waiting[told].sum()))
    _add(parts, "comm.transfer", int((own - waiting)[told].sum()))
    _add(parts, "comm.unsplit", int(own[~told].sum()))


def _doubtful(trace: Trace, lane: Lanes, idle: Spans) -> Spans:
    """Idle time that a quarantined device row claims: from its start to its claimed end or the next device row."""
    bad = trace.quarantine
    work = np.flatnonzero(np.isin(bad.kind, WORK_KINDS) & (bad.dur_ns > 0))
    if len(work) == 0 or len(idle.starts) == 0:
        return EMPTY
    start = bad.ts_ns[work]
    later = np.append(lane.start, np.iinfo(np.int64).max)[np.searchsorted(lane.start, start, side="right")]
    claim = union(start, np.minimum(start + bad.dur_ns[work], later))
    return intersect(claim, idle)


@dataclass(frozen=True, slots=True)
class HostSide:
    """What the host did that can explain idle time."""

    blocked: Spans  # the launching thread was inside a synchronising call
    in_step: Spans  # the launching thread was inside a step's annotation
    both: Spans


def replay_gaps(trace: Trace) -> npt.NDArray[np.int8]:
    """Per device row: what a long gap before it, inside its own graph replay, is. Computed once.

    0: no such gap. 1: replays of the same graph have it at the same place every time (or there is no other replay to
    ask): kernels that the profiler does not record run there. 2: other replays have no gap there: a stall.
    """
    if "replay_gaps" not in trace.cache:
        lane = lanes(trace)
        out = np.zeros(len(lane.rows), np.int8)
        inside = np.flatnonzero(lane.tied.in_graph)
        if len(inside):
            order = inside[np.argsort(lane.tied.launch[inside], kind="stable")]
            call = lane.tied.launch[order]
            cuts = np.append(0, np.append(np.flatnonzero(np.diff(call)) + 1, len(order)))
            replays: dict[tuple[int, int], list[Ints]] = {}
            for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
                rows = order[a:b]
                replays.setdefault((b - a, int(trace.events.name[lane.rows[rows[0]]])), []).append(rows)
            for same in replays.values():
                _judge_replays(lane, np.stack(same), out)
        trace.cache["replay_gaps"] = out
    return trace.cache["replay_gaps"]


def _judge_replays(lane: Lanes, rows: npt.NDArray[np.int64], out: npt.NDArray[np.int8]) -> None:
    """`rows`: replays by kernels of one graph."""
    reach = np.maximum.accumulate(lane.end[rows], axis=1)
    gap = np.zeros(rows.shape, np.int64)
    gap[:, 1:] = np.maximum(lane.start[rows][:, 1:] - reach[:, :-1], 0)
    usual = np.sort(gap, axis=0)[(len(rows) - 1) // 2]
    long = gap > GRAPH_GAP_NS
    out[rows[long & (usual > GRAPH_GAP_NS)]] = 1
    out[rows[long & (usual <= GRAPH_GAP_NS)]] = 2


def _causes(trace: Trace, lane: Lanes, idle: Spans, host: HostSide) -> dict[str, int]:
    """Idle time by the cause of the work that ends each gap; a gap has up to five parts, in order of time."""
    g0, g1 = idle.starts, idle.ends
    parts: dict[str, int] = {}
    if len(g0) == 0 or len(lane.start) == 0:
        _host_parts(parts, host, g0, g1)
        return parts
    events = trace.events
    nxt = np.searchsorted(lane.start, g1, side="left")
    exists = nxt < len(lane.start)
    safe = np.minimum(nxt, len(lane.start) - 1)
    call = np.where(exists, lane.tied.launch[safe], -1)
    told = call >= 0
    l0 = np.where(told, events.ts_ns[np.maximum(call, 0)], g1)
    l1 = np.where(told, l0 + events.dur_ns[np.maximum(call, 0)], g1)
    replay = told & (nxt > 0) & (lane.tied.launch[np.maximum(nxt - 1, 0)] == call) & lane.tied.in_graph[safe]
    skewed = told & ~replay & (lane.start[safe] < l0)
    blind = exists & ~told
    plain = ~(replay | skewed | blind)
    length = g1 - g0
    hole = replay_gaps(trace)[safe]
    for kind, cause in enumerate(_IN_REPLAY):
        _add(parts, cause, int(length[replay & (hole == kind)].sum()))
    _add(parts, SKEW, int(length[skewed].sum()))
    _add(parts, UNATTRIBUTED, int(length[blind].sum()))
    first = np.clip(l0, g0, g1)
    second = np.clip(np.maximum(l1, g0) + LATENCY_NS, first, g1)
    _host_parts(parts, host, g0[plain], first[plain])
    _add(parts, LATENCY, int((second - first)[plain].sum()))
    _add(parts, DEPENDENCY, int((g1 - second)[plain].sum()))
    return parts


_IN_REPLAY = (IN_GRAPH, NOT_RECORDED, DEPENDENCY)


def _host_parts(parts: dict[str, int], host: HostSide, a: Ints, b: Ints) -> None:
    """Time in which the host had not launched: blocked, inside a step (late), or outside any."""
    blocked = int(cover(host.blocked, a, b).sum())
    late = int((cover(host.in_step, a, b) - cover(host.both, a, b)).sum())
    _add(parts, HOST_SYNC, blocked)
    _add(parts, HOST_LATE, late)
    _add(parts, BETWEEN, int((b - a).sum()) - blocked - late)
