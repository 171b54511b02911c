"""Collectives across ranks: waiting for peers against transfer, the late rank and what it was doing.

In a collective that synchronises, data can move once the last rank has arrived. Until then a rank waits; from then
on it transfers: wait = last arrival - own arrival, within the call; transfer = the rest. Arrivals are compared on
clocks fitted on the calls' ends. Without the peers' traces nothing can be said: None, never 0.
Not for: finding (comm_rows) and matching (comm_match) the calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trace_diff import device, host
from trace_diff.comm_match import Group, groups, offsets
from trace_diff.comm_rows import SYNCHRONISING, calls
from trace_diff.ingest.schema import WORK_KINDS
from trace_diff.ingest.trace import Trace, TraceSet
from trace_diff.types import CollectiveRow, Kind, Phase, Step
from trace_diff.windows import marks, steps

Ints = npt.NDArray[np.int64]
_LATE_SHARE = 0.6  # of all waiting that one rank must cause to be named
_WORTH = 0.05  # of the collectives' time that must be waiting for anyone to be named
_LOOKED_AT = 200  # largest waits whose cause is looked up


@dataclass(frozen=True, slots=True)
class Late:
    """The rank for which the others wait."""

    rank: int
    wait_ns: float  # that its lateness costs the longest waiter, mean per step
    share: float  # of all waiting
    doing: tuple[tuple[str, int], ...]  # what it did meanwhile: part -> nanoseconds a step, dearest first
    cause: str  # the dearest part, in words
    sites: tuple[str, ...] = ()  # operators or Python lines open most of that time


@dataclass(frozen=True, slots=True)
class Collectives:
    """All collectives of a run."""

    rows: tuple[CollectiveRow, ...]
    groups: tuple[Group, ...]
    offsets: dict[int, int]  # clock of each rank minus clock of the first
    late: Late | None
    complete: bool  # every rank's trace is there
    notes: tuple[str, ...] = ()
    arrivals: dict[int, dict[int, int]] = field(default_factory=dict)  # rank -> row -> last arrival, its own time
    bases: dict[int, int] = field(default_factory=dict)  # base_ns of each rank

    def arrival(self, rank: int, rows: Ints, start: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """For these device rows of a rank: time (relative, like event times) at which the last peer arrived; and
        whether that is known."""
        known = self.arrivals.get(rank, {})
        until = np.array([known.get(int(r), int(s)) for r, s in zip(rows, start, strict=True)], np.int64)
        told = np.array([int(r) in known for r in rows], bool)
        return until, told

    def host_split(self, rank: int, step: Step) -> int | None:
        """Waiting of a rank in host collectives of one step (nanoseconds), None where it is not known."""
        known = self.arrivals.get(rank)
        if not known:
            return None
        total, found = 0, False
        rows = set(step.rows.tolist())
        for group in self.groups:
            call = group.calls.get(rank)
            if call is not None and call.row in rows and call.row in known:
                total += max(0, min(known[call.row] - (call.start - self.bases[rank]), call.end - call.start))
                found = True
        return total if found else None



def match(traceset: TraceSet, phase: Phase | None = Phase.DECODE) -> Collectives:
    """Match and split the collectives of all ranks; rates are per complete step of `phase` (of any, where there is
    none of it), or totals where the traces have no steps."""
    ranks = list(traceset.traces)
    by_rank = {r: calls(t) for r, t in traceset.traces.items()}
    if not any(by_rank.values()):
        return Collectives((), (), dict.fromkeys(ranks, 0), None, not traceset.missing, (_nothing(traceset),))
    found = groups(by_rank)
    clock = offsets(found, ranks)
    world = len(ranks) + len(traceset.missing)
    arrivals, causes = _arrivals(found, clock, world, traceset)
    windows = {r: _chosen(t, phase) for r, t in traceset.traces.items()}
    rows = [row for r in ranks for row in _rows(traceset.traces[r], found, windows[r], arrivals.get(r, {}))]
    complete = not traceset.missing
    notes = [] if complete else [f"ranks {traceset.missing} are missing: waiting cannot be told from transfer"]
    if world == 1:
        notes.append("one rank: nobody to wait for is visible; waiting and transfer are not told apart")
    late = _late(traceset, found, clock, causes, windows) if complete and world > 1 else None
    bases = {r: t.base_ns for r, t in traceset.traces.items()}
    return Collectives(tuple(rows), tuple(found), clock, late, complete, tuple(notes), arrivals, bases)


def _nothing(traceset: TraceSet) -> str:
    """No communication kernels is an answer; host spans are listed where there are some."""
    spans: Counter[str] = Counter()
    for trace in traceset:
        for i in trace.rows(Kind.ANNOTATION).tolist():
            name = trace.name(i)
            if name.split(":")[0] in ("nccl", "gloo", "ucc", "mpi"):
                spans[name] += 1
    listed = "; host spans only: " + ", ".join(f"{n} x{c}" for n, c in spans.most_common(8)) if spans else ""
    return "no communication kernels in the trace" + listed


@dataclass(frozen=True, slots=True)
class _Wait:
    """Waiting in one collective."""

    group: Group
    late: int
    first: int  # earliest arrival, common clock
    last: int  # latest arrival, common clock
    cost: int  # longest wait of any rank


def _arrivals(
    found: list[Group], clock: dict[int, int], world: int, traceset: TraceSet
) -> tuple[dict[int, dict[int, int]], list[_Wait]]:
    """Last arrival of every call whose whole group was recorded, in each rank's own relative time."""
    arrivals: dict[int, dict[int, int]] = defaultdict(dict)
    waits: list[_Wait] = []
    for group in found:
        first = group.first
        size = first.size or world
        if len(group.calls) < size or size < 2 or first.operation not in SYNCHRONISING:
            continue
        start = {r: c.start - clock[r] for r, c in group.calls.items()}
        late = max(start, key=lambda r: (start[r], r))
        last = start[late]
        for rank, call in group.calls.items():
            arrivals[rank][call.row] = last + clock[rank] - traceset.traces[rank].base_ns
        cost = max(max(0, min(last - start[r], c.end - c.start)) for r, c in group.calls.items())
        waits.append(_Wait(group, late, min(start.values()), last, cost))
    return dict(arrivals), waits


def _chosen(trace: Trace, phase: Phase | None) -> list[Step]:
    good = [s for s in steps(trace) if s.complete]
    return [s for s in good if s.phase == phase] or good


def _rows(trace: Trace, found: list[Group], chosen: list[Step], arrivals: dict[int, int]) -> list[CollectiveRow]:
    """Per family of collectives on one rank: how often and how long per step, split where known."""
    inside = np.zeros(len(trace.events), bool)
    for step in chosen:
        inside[step.rows] = True
    count = max(len(chosen), 1)
    sums: dict[tuple[str, str], list[int]] = {}
    unsplit: set[tuple[str, str]] = set()
    for group in found:
        call = group.calls.get(trace.rank)
        if call is None or (chosen and not inside[call.row]):
            continue
        key = (call.operation, call.backend)
        total = sums.setdefault(key, [0, 0, 0])
        length = call.end - call.start
        total[0] += 1
        total[1] += length
        if call.row in arrivals:
            total[2] += max(0, min(arrivals[call.row] - (call.start - trace.base_ns), length))
        else:
            unsplit.add(key)
    return [
        CollectiveRow(
            name=operation,
            backend=backend,
            rank=trace.rank,
            per_step=n / count,
            wall_ns=wall / count,
            wait_ns=None if (operation, backend) in unsplit else wait / count,
            transfer_ns=None if (operation, backend) in unsplit else (wall - wait) / count,
        )
        for (operation, backend), (n, wall, wait) in sorted(sums.items())
    ]


def _late(
    traceset: TraceSet,
    found: list[Group],
    clock: dict[int, int],
    waits: list[_Wait],
    windows: dict[int, list[Step]],
) -> Late | None:
    """The rank that causes most of the waiting, where it causes most of it and the waiting matters."""
    used = _inside(waits, traceset, windows)
    total = sum(w.cost for w in used)
    spent = sum(max(c.end - c.start for c in w.group.calls.values()) for w in used)
    if not used or total <= _WORTH * spent:
        return None
    by_rank: Counter[int] = Counter()
    for wait in used:
        by_rank[wait.late] += wait.cost
    rank, cost = by_rank.most_common(1)[0]
    if cost < _LATE_SHARE * total:
        return None
    mine = sorted((w for w in used if w.late == rank), key=lambda w: -w.cost)[:_LOOKED_AT]
    trace = traceset.traces[rank]
    per_step = cost / max(len(windows[rank]), 1)
    doing = _doing(trace, mine, clock[rank], per_step)
    cause = doing[0][0] if doing else "unknown"
    return Late(rank, per_step, cost / total, doing, _in_words(cause), _sites(trace, mine, clock[rank]))


def _inside(waits: list[_Wait], traceset: TraceSet, windows: dict[int, list[Step]]) -> list[_Wait]:
    """Waits of collectives in the chosen steps; all of them where there are no steps."""
    inside: dict[int, npt.NDArray[np.bool_]] = {}
    for rank, trace in traceset.traces.items():
        mask = np.zeros(len(trace.events), bool)
        for step in windows[rank]:
            mask[step.rows] = True
        inside[rank] = mask if windows[rank] else ~mask
    return [w for w in waits if all(inside[r][c.row] for r, c in w.group.calls.items())]


def _doing(trace: Trace, waits: list[_Wait], clock: int, per_step: float) -> tuple[tuple[str, int], ...]:
    """What the late rank did between the first arrival of its peers and its own, as shares of `per_step`: dearest first."""
    sums: Counter[str] = Counter()
    found = marks(trace)
    on_device = len(trace.rows(*WORK_KINDS)) > 0 and trace.events.kind[waits[0].group.calls[trace.rank].row] == Kind.KERNEL
    for wait in waits:
        a, b = wait.first + clock - trace.base_ns, wait.last + clock - trace.base_ns
        if b <= a:
            continue
        if on_device:
            parts = device.account(trace, a, b, host.side(trace)).parts
        elif found:
            parts = {f"cpu.{k}": v for k, v in host.self_times(trace, found[0].track, a, b).items()}
        else:
            continue
        sums.update(parts)
    scale = per_step / (sums.total() or 1)
    return tuple((part, round(ns * scale)) for part, ns in sums.most_common(8))


def _sites(trace: Trace, waits: list[_Wait], clock: int) -> tuple[str, ...]:
    """Names of the host rows that were open longest while the peers waited: operators, Python lines."""
    found = marks(trace)
    if not found:
        return ()
    sums: Counter[str] = Counter()
    for wait in waits[:20]:
        a, b = wait.first + clock - trace.base_ns, wait.last + clock - trace.base_ns
        for name, ns in host.innermost(trace, found[0].track, a, b).items():
            sums[name] += ns
    return tuple(name for name, _ in sums.most_common(3))


def _in_words(part: str) -> str:
    if part.startswith("gpu."):
        return f"its device still computes ({part[4:]}) when its peers have arrived"
    return _WORDS.get(part, part)


_WORDS = {
    device.HOST_LATE: "host late: its host launches the work before the collective later than its peers' hosts",
    device.HOST_SYNC: "its host is blocked in a synchronisation before the collective",
    device.BETWEEN: "its host is between steps",
    device.LATENCY: "its launches reach the device late",
    device.DEPENDENCY: "its device waits for another stream or an event",
    "cpu.python": "its host runs Python",
    "cpu.untraced": "its host runs code that was not profiled",
}
