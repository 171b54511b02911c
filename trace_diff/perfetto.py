"""All engines in one timeline for the Perfetto viewer, aligned on the start of one representative step.

Writes Chrome trace JSON (which ui.perfetto.dev and chrome://tracing open): per engine and rank one process for
the host and one for the device, the representative step with a neighbour on either side, launch arrows, and the
class of every row. Not for: accounts; nothing here is summed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_diff import classify
from trace_diff.types import Kind, Step

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.ingest import Trace

_HOST = (Kind.CPU_OP, Kind.RUNTIME, Kind.DRIVER, Kind.PYTHON, Kind.ANNOTATION)
_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)


def aligned_step(analysis: Analysis, rank: int) -> Step:
    """The step whose start becomes zero: the one of the typical sequence, at the same position on every rank."""
    own = analysis.steps[analysis.slowest]
    wanted = analysis.sequence.step if analysis.sequence is not None else None
    at = next((i for i, s in enumerate(own) if s.index == wanted), len(own) // 2)
    steps = analysis.steps[rank]
    return steps[min(at, len(steps) - 1)]


def _window(analysis: Analysis, rank: int, trace: Trace) -> list[Step]:
    from trace_diff import windows

    step = aligned_step(analysis, rank)
    every = sorted(windows.steps(trace), key=lambda s: s.start_ns)
    at = next((i for i, s in enumerate(every) if s.index == step.index), 0)
    return every[max(0, at - 1) : at + 2]


def _rows(trace: Trace, steps: Sequence[Step]) -> np.ndarray:
    rows = np.unique(np.concatenate([s.rows for s in steps]))
    return rows[np.isin(trace.events.kind[rows], (*_HOST, *_DEVICE))]


def _category(name: str, kind: int) -> str:
    if kind in _DEVICE:
        return classify.kernel_class(name)
    if kind in (Kind.RUNTIME, Kind.DRIVER):
        return classify.call_class(name)
    return {Kind.PYTHON: "python", Kind.ANNOTATION: "step"}.get(Kind(kind), "") or classify.op_class(name)


def _named(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}},
    ]


def _rank(analysis: Analysis, rank: int, trace: Trace, pid: int, zero_us: float) -> list[dict[str, Any]]:
    """Events of one rank; `zero_us` is where the aligned step starts on the common axis."""
    steps = _window(analysis, rank, trace)
    start = aligned_step(analysis, rank).start_ns
    e = trace.events
    mark = f", rank {rank}" if len(analysis.traceset) > 1 else ""
    out = [*_named(pid, f"{analysis.label}{mark}: host", pid), *_named(pid + 1, f"{analysis.label}{mark}: GPU", pid + 1)]
    launched: dict[int, dict[str, Any]] = {}
    for row in _rows(trace, steps).tolist():
        kind, name = int(e.kind[row]), trace.names[int(e.name[row])]
        device = kind in _DEVICE
        ts = round(zero_us + (int(e.ts_ns[row]) - start) / 1000, 3)
        correlation = int(e.correlation[row])
        event: dict[str, Any] = {
            "ph": "X", "name": name, "cat": _category(name, kind), "pid": pid + device,
            "tid": int(e.stream[row]) if device else int(e.track[row]), "ts": ts, "dur": int(e.dur_ns[row]) / 1000,
        }  # fmt: skip
        if correlation >= 0:
            event["args"] = {"correlation": correlation}
        out.append(event)
        if correlation >= 0 and kind in (Kind.RUNTIME, Kind.DRIVER):
            launched[correlation] = event
        elif device and correlation in launched:
            out += _arrow(launched[correlation], event, f"{pid}.{correlation}")
    return out


def _arrow(launch: dict[str, Any], work: dict[str, Any], name: str) -> list[dict[str, Any]]:
    ends = {"cat": "launch", "name": "launch", "id": name}
    return [
        {"ph": "s", **ends, "pid": launch["pid"], "tid": launch["tid"], "ts": launch["ts"]},
        {"ph": "f", "bp": "e", **ends, "pid": work["pid"], "tid": work["tid"], "ts": work["ts"]},
    ]


def export(analyses: Sequence[Analysis], out: Path) -> int:
    """Write the common timeline (gzip if `out` ends in .gz); returns the number of events."""
    plan = [(a, t.rank, t) for a in analyses for t in a.traceset if a.steps.get(t.rank)]
    lead = 0.0
    for a, rank, trace in plan:
        first = _window(a, rank, trace)[0]
        lead = max(lead, (aligned_step(a, rank).start_ns - first.start_ns) / 1000)
    zero = float(int(lead) + 1000)
    events: list[dict[str, Any]] = [
        {"ph": "i", "s": "g", "name": "the aligned step starts", "cat": "step", "pid": 0, "tid": 0, "ts": zero}
    ]
    for at, (a, rank, trace) in enumerate(plan):
        events += _rank(a, rank, trace, 10 + 2 * at, zero)
    text = json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":")).encode("utf-8", "replace")
    out.write_bytes(gzip.compress(text, 6, mtime=0) if out.suffix == ".gz" else text)
    return len(events)
