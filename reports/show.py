"""`trace-diff show`: what trace files hold, rank by rank, as plain data and as a table.

Not for: comparing (`trace_diff.compare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.text import micro, short
from trace_diff import attribute, intervals, windows
from trace_diff.types import Kind

if TYPE_CHECKING:
    from trace_diff.ingest import Trace, TraceSet

_WORK = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)


def describe(sets: Sequence[TraceSet]) -> dict[str, Any]:
    """{"ranks": [...], "notes": [...]}: per rank the whole trace's device span, busy and idle, and every step.

    Times are integer nanoseconds. `gpu_*` are None where a trace holds no device work. `parts` of a step sum to
    its `wall_ns` exactly.
    """
    ranks: list[dict[str, Any]] = []
    notes: list[str] = []
    for found in sets:
        notes += found.notes
        ranks += [_rank(t) for t in found]
    return {"ranks": ranks, "notes": notes}


def _rank(trace: Trace) -> dict[str, Any]:
    e = trace.events
    rows = np.flatnonzero(np.isin(e.kind, _WORK))
    span = busy = idle = None
    if len(rows):
        start, end = e.ts_ns[rows], e.ts_ns[rows] + e.dur_ns[rows]
        busy = intervals.union(start, end).total
        span = int(end.max() - start.min())
        idle = span - busy
    return {
        "file": trace.path,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "events": len(e),
        "gpu_span_ns": span,
        "gpu_busy_ns": busy,
        "gpu_idle_ns": idle,
        "repaired": trace.notes.repaired,
        "quarantined": trace.notes.quarantined,
        "lost": trace.notes.lost,
        "truncated": trace.notes.truncated,
        "notes": list(trace.notes.messages),
        "steps": [_step(trace, s) for s in windows.steps(trace)],
    }


def _step(trace: Trace, step: Any) -> dict[str, Any]:
    account = attribute.breakdown(trace, step)
    return {
        "index": step.index,
        "name": step.name,
        "phase": str(step.phase),
        "requests": step.requests,
        "tokens": step.tokens,
        "start_ns": int(step.start_ns),
        "wall_ns": int(account.wall_ns),
        "complete": step.complete,
        "flags": list(step.flags),
        "parts": {k: int(v) for k, v in account.parts.items()},
        "counts": dict(account.counts),
    }


def table(data: dict[str, Any]) -> RenderableType:
    """One table per rank."""
    return Group(*[p for r in data["ranks"] for p in _rank_table(r)], *[Text(n, style="dim") for n in data["notes"]])


def _rank_table(r: dict[str, Any]) -> list[RenderableType]:
    damage = [f"{r[k]} {k}" for k in ("repaired", "quarantined", "lost") if r[k]] + ["cut off"] * r["truncated"]
    head = f"rank {r['rank']} of {r['world_size'] or '?'}: {short(r['file'], 90)}, {r['events']:,} events"
    out: list[RenderableType] = [Text(head, style="bold")]
    if r["gpu_span_ns"] is not None:
        share = r["gpu_busy_ns"] / r["gpu_span_ns"] if r["gpu_span_ns"] else 0.0
        out.append(Text(f"GPU: {micro(r['gpu_span_ns'] / 1000)} span, {micro(r['gpu_busy_ns'] / 1000)} busy ({share:.1%})"))
    else:
        out.append(Text("no device work in this trace"))
    if damage:
        out.append(Text(f"damage: {', '.join(damage)}", style="yellow"))
    out += [Text(n, style="dim") for n in r["notes"]]
    steps = Table(box=None, pad_edge=False)
    for name in ("step", "name", "phase", "wall", "largest parts", "flags"):
        steps.add_column(name, justify="right" if name == "wall" else "left", overflow="fold")
    for s in r["steps"]:
        parts = sorted(s["parts"].items(), key=lambda kv: -kv[1])[:3]
        text = ", ".join(f"{k} {v / s['wall_ns']:.0%}" for k, v in parts if s["wall_ns"] and v)
        flags = ", ".join(s["flags"]) or ("" if s["complete"] else "incomplete")
        steps.add_row(str(s["index"]), Text(short(s["name"], 60)), s["phase"], micro(s["wall_ns"] / 1000), text, flags)
    return [*out, steps, Text("")]
