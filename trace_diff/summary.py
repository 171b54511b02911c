"""What a set of traces holds, as one plain dictionary: totals per rank and the account of every step.

Not for: comparing (compare), drawing (reports).
"""

from __future__ import annotations

from typing import Any

from trace_diff.attribute import breakdown
from trace_diff.backlog import queue
from trace_diff.collectives import Collectives, match
from trace_diff.ingest.schema import WORK_KINDS
from trace_diff.ingest.trace import Trace, TraceSet
from trace_diff.intervals import union
from trace_diff.links import links
from trace_diff.types import Kind, LoadNotes
from trace_diff.windows import steps


def show(traceset: TraceSet) -> dict[str, Any]:
    """Per rank: device span, busy and idle time over the whole trace (None without device work), damage, and steps
    whose `parts` sum to `wall_ns` exactly. JSON-ready; times in nanoseconds."""
    together = match(traceset)
    return {
        "label": traceset.label,
        "ranks": [rank(trace, together) for trace in traceset],
        "missing": list(traceset.missing),
        "duplicates": [{"rank": r, "path": p} for r, p in traceset.duplicates],
        "notes": [*traceset.notes, *together.notes],
        "clock_offsets_ns": {str(r): o for r, o in together.offsets.items()},
        "late": _late(together),
    }


def _late(together: Collectives) -> dict[str, Any] | None:
    late = together.late
    if late is None:
        return None
    return {
        "rank": late.rank,
        "wait_ns_per_step": late.wait_ns,
        "share": late.share,
        "cause": late.cause,
        "doing": [{"part": p, "ns": ns} for p, ns in late.doing],
        "sites": list(late.sites),
    }


def totals(trace: Trace) -> dict[str, int | None]:
    """Device span, busy (union over kernels, copies and sets of all streams and devices) and idle, in nanoseconds."""
    events = trace.events
    rows = trace.rows(*WORK_KINDS)
    if len(rows) == 0:
        return {"gpu_span_ns": None, "gpu_busy_ns": None, "gpu_idle_ns": None}
    end = events.ts_ns[rows] + events.dur_ns[rows]
    span = int(end.max()) - int(events.ts_ns[rows].min())
    busy = union(events.ts_ns[rows], end).total
    return {"gpu_span_ns": span, "gpu_busy_ns": busy, "gpu_idle_ns": span - busy}


def rank(trace: Trace, together: Collectives | None = None) -> dict[str, Any]:
    """One rank's entry of `show`."""
    events, tied = trace.events, links(trace)
    kernels = int((events.kind == Kind.KERNEL).sum())
    return {
        "rank": trace.rank,
        "file": trace.path,
        "world_size": trace.world_size,
        **totals(trace),
        "events": len(events),
        "kernels": kernels,
        "device_rows": len(tied.device_rows),
        "graph_rows": int(tied.in_graph.sum()),
        "unlinked_rows": int((tied.launch < 0).sum()),
        "negative_latency_rows": tied.negative,
        **damage(trace.notes),
        "steps": [_step(trace, step, together) for step in steps(trace)],
    }


def damage(notes: LoadNotes) -> dict[str, Any]:
    """What loading had to do."""
    return {
        "repaired": notes.repaired,
        "quarantined": notes.quarantined,
        "lost": notes.lost,
        "truncated": notes.truncated,
        "notes": list(notes.messages),
    }


def _step(trace: Trace, step: Any, together: Collectives | None) -> dict[str, Any]:
    account = breakdown(trace, step, together)
    waiting = queue(trace, step)
    return {
        "index": step.index,
        "name": step.name,
        "phase": str(step.phase),
        "requests": step.requests,
        "tokens": step.tokens,
        "start_ns": step.start_ns,
        "wall_ns": account.wall_ns,
        "parts": account.parts,
        "gpu_busy_ns": account.gpu_busy_ns,
        "gpu_idle_ns": account.gpu_idle_ns,
        "counts": account.counts,
        "queue": None if waiting is None else {"most": waiting[0], "mean": waiting[1]},
        "complete": step.complete,
        "flags": list(step.flags),
    }
