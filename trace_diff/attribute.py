"""The account of a step: parts that sum to its wall, counts, self times. Not for: comparing accounts (compare)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trace_diff import counts, device, host
from trace_diff.comm_rows import calls
from trace_diff.ingest.schema import WORK_KINDS
from trace_diff.ingest.trace import Trace
from trace_diff.intervals import clip, minus, union
from trace_diff.nesting import NESTED_KINDS, nesting
from trace_diff.syncs import sync_points
from trace_diff.types import Breakdown, Phase, Step
from trace_diff.windows import marks

if TYPE_CHECKING:
    from trace_diff.collectives import Collectives


def breakdown(trace: Trace, step: Step, collectives: Collectives | None = None) -> Breakdown:
    """Account of one step. `parts` sum to `wall_ns` exactly.

    With `collectives` (all ranks matched), exposed communication is split into comm.wait and comm.transfer; without,
    it is comm.unsplit. Without device work in the trace the parts are the self times of the step's thread.
    """
    has_device = len(trace.rows(*WORK_KINDS)) > 0
    own = marks(trace)[step.index]
    mine = _host_window(trace, step)
    cpu = host.self_times(trace, own.track, *mine)
    if has_device:
        window = device.account(trace, step.start_ns, step.end_ns, host.side(trace), collectives)
        parts = window.parts
        busy: int | None = window.busy.total
    else:
        parts = _cpu_parts(trace, step, own.track, collectives)
        busy = None
    return Breakdown(
        rank=trace.rank,
        phase=step.phase,
        steps=1,
        wall_ns=step.wall_ns,
        parts=parts,
        counts=counts.count(trace, step),
        gpu_busy_ns=busy,
        gpu_idle_ns=None if busy is None else step.wall_ns - busy,
        cpu_self_ns=cpu,
        gpu_ns=_kernel_time(trace, step),
    )


def _host_window(trace: Trace, step: Step) -> tuple[int, int]:
    """The host's time of a step: from its annotation to the next one, or to its end where the server then paused."""
    found = marks(trace)
    own = found[step.index]
    end = max(own.end, step.end_ns)
    if step.index + 1 < len(found):
        following = found[step.index + 1].start
        end = following if following <= end else max(own.end, min(end, following))
    return own.start, max(end, own.start)


def _cpu_parts(trace: Trace, step: Step, track: int, collectives: Collectives | None) -> dict[str, int]:
    """Parts of a trace without device work: self times of the step's thread; communication split where it can be."""
    own = host.self_times(trace, track, step.start_ns, step.end_ns)
    parts = {f"cpu.{name}": ns for name, ns in own.items() if name not in ("untraced", "communication")}
    inside = min(_in_helpers(trace, step, track), own.get("untraced", 0))
    if "untraced" in own:
        parts[device.UNATTRIBUTED] = own["untraced"] - inside
    total = own.get("communication", 0) + inside
    if total:
        split = collectives.host_split(trace.rank, step) if collectives is not None else None
        if split is None:
            parts["comm.unsplit"] = total
        else:
            wait = min(split, total)
            parts["comm.wait"] = wait
            parts["comm.transfer"] = total - wait
    return {k: v for k, v in parts.items() if v}


def _in_helpers(trace: Trace, step: Step, track: int) -> int:
    """Time in which the step's thread has no row open while another thread runs a collective for it (gloo)."""
    key = f"helpers{track}"
    if key not in trace.cache:
        events, tree = trace.events, nesting(trace)
        rows = np.array([c.row for c in calls(trace) if events.track[c.row] != track], np.int64)
        own = trace.rows(*NESTED_KINDS) if len(rows) else rows
        own = own[(events.track[own] == track) & (tree.depth[own] == 0)]
        trace.cache[key] = minus(
            union(events.ts_ns[rows], events.ts_ns[rows] + events.dur_ns[rows]),
            union(events.ts_ns[own], tree.end_ns[own]),
        )
    return clip(trace.cache[key], step.start_ns, step.end_ns).total


def _kernel_time(trace: Trace, step: Step) -> dict[str, int]:
    """Summed duration of the step's own device rows by class, overlaps counted in full."""
    lane = device.lanes(trace)
    at = lane.of(step.rows)
    sums = np.zeros(len(lane.classes), np.int64)
    np.add.at(sums, lane.cls[at], lane.end[at] - lane.start[at])
    return {lane.classes[k]: int(sums[k]) for k in np.flatnonzero(sums).tolist()}


def mean_breakdown(trace: Trace, steps: Sequence[Step], collectives: Collectives | None = None) -> Breakdown:
    """Mean account of the complete steps among `steps`. Raises ValueError where none is complete.

    Whole nanoseconds: the rounding remainder of the parts goes to "unattributed", at most one per part, so that the
    parts still sum to the mean wall.
    """
    good = [s for s in steps if s.complete]
    if not good:
        raise ValueError(f"{trace.path}: no complete step to average")
    account = mean([breakdown(trace, s, collectives) for s in good])
    rows = tuple(r for r in collectives.rows if r.rank == trace.rank) if collectives is not None else ()
    return replace(account, syncs=sync_points(trace, good), collectives=rows)


def mean(accounts: Sequence[Breakdown]) -> Breakdown:
    """Mean of accounts of one rank."""
    n = len(accounts)
    wall = _mean([a.wall_ns for a in accounts])
    parts = {k: _mean([a.parts.get(k, 0) for a in accounts]) for k in sorted({k for a in accounts for k in a.parts})}
    _settle(parts, wall - sum(parts.values()))
    names = sorted({k for a in accounts for k in a.counts})
    phases = {a.phase for a in accounts}
    busy = None if accounts[0].gpu_busy_ns is None else _mean([a.gpu_busy_ns or 0 for a in accounts])
    return Breakdown(
        rank=accounts[0].rank,
        phase=phases.pop() if len(phases) == 1 else Phase.MIXED,
        steps=n,
        wall_ns=wall,
        parts=parts,
        counts={k: sum(a.counts.get(k, 0.0) for a in accounts) / n for k in names},
        gpu_busy_ns=busy,
        gpu_idle_ns=None if busy is None else wall - busy,
        cpu_self_ns=_means([a.cpu_self_ns for a in accounts]),
        gpu_ns=_means([a.gpu_ns for a in accounts]),
    )


def _means(tables: list[dict[str, int]]) -> dict[str, int]:
    return {k: _mean([t.get(k, 0) for t in tables]) for k in sorted({k for t in tables for k in t})}


def _mean(values: list[int]) -> int:
    """Mean to the nearest whole number, in integers."""
    n = len(values)
    return (2 * sum(values) + n) // (2 * n)


def _settle(parts: dict[str, int], rest: int) -> None:
    """Put the rounding remainder where it changes least: on the largest part."""
    if rest and parts:
        largest = max(parts, key=lambda k: parts[k])
        parts[largest] += rest
