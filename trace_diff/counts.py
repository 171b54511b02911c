"""What happened how often in a step. Not for: times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trace_diff import classify
from trace_diff.ingest.trace import Trace
from trace_diff.nesting import nesting
from trace_diff.types import Kind, Step

Bools = npt.NDArray[np.bool_]
EMPTY_FAMILY = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::empty_permuted"})
COPY_OPS = frozenset({"aten::copy_", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::cat"})


# What is counted, as (kinds of rows, test of the name). An operator nested in one that is counted alike is not counted
# again where the name is in _OUTERMOST.
_CALLS = (Kind.RUNTIME, Kind.DRIVER)
_OPS = (Kind.CPU_OP,)
_COUNTED: dict[str, tuple[tuple[Kind, ...], Callable[[str], bool]]] = {
    "kernel_launches": (_CALLS, lambda n: classify.call_class(n) == "launch"),
    "graph_launches": (_CALLS, lambda n: classify.call_class(n) == "graph_launch"),
    "syncs": (_CALLS, lambda n: classify.call_class(n) == "sync"),
    "stream_syncs": (_CALLS, lambda n: "streamsynchronize" in n.lower()),
    "queries": (_CALLS, lambda n: classify.call_class(n) in ("query", "event_query")),
    "device_mallocs": (_CALLS, lambda n: classify.call_class(n) == "malloc"),
    "host_reads": (_OPS, lambda n: classify.op_class(n) == "host_read"),
    "allocations": (_OPS, lambda n: n in EMPTY_FAMILY),
    "autograd_nodes": (_OPS, lambda n: classify.op_class(n) == "autograd" and not n.startswith("autograd::engine")),
    "clones": (_OPS, lambda n: n == "aten::clone"),
    "copies": (_OPS, lambda n: n in COPY_OPS),
    "d2h": ((Kind.MEMCPY,), lambda n: classify.copy_kind(n) == "d2h"),
    "h2d": ((Kind.MEMCPY,), lambda n: classify.copy_kind(n) == "h2d"),
    "d2d": ((Kind.MEMCPY,), lambda n: classify.copy_kind(n) == "d2d"),
    "collectives": ((Kind.KERNEL,), lambda n: classify.collective(n) is not None),
    "host_collectives": (_OPS, lambda n: classify.op_class(n) == "communication"),
}
_OUTERMOST = ("host_reads", "host_collectives")


def doubled(trace: Trace) -> Bools:
    """Host rows that a dispatch mode records a second time: nested in a row of the same name, and of the same extent
    or external id. They are kept out of counts (their self time is their own, so times need no care)."""
    if "doubled" not in trace.cache:
        events = trace.events
        up = nesting(trace).parent
        safe = np.maximum(up, 0)
        same = (up >= 0) & (events.kind == Kind.CPU_OP) & (events.name == events.name[safe]) if len(events) else up >= 0
        if len(events):
            extent = (events.ts_ns == events.ts_ns[safe]) & (events.dur_ns == events.dur_ns[safe])
            ident = (events.external_id == events.external_id[safe]) & (events.external_id != -1)
            same &= extent | ident
        trace.cache["doubled"] = same
    return trace.cache["doubled"]


def count(trace: Trace, step: Step) -> dict[str, float]:
    """Counts of one step: host rows that began in it and device rows launched by it."""
    events = trace.events
    rows = step.rows[~doubled(trace)[step.rows]]
    kind, name = events.kind[rows], events.name[rows]
    by_name: dict[tuple[Kind, ...], npt.NDArray[np.int64]] = {}
    out: dict[str, float] = {}
    for key, (kinds, test) in _COUNTED.items():
        if kinds not in by_name:
            here = kind == kinds[0] if len(kinds) == 1 else (kind == kinds[0]) | (kind == kinds[1])
            by_name[kinds] = np.bincount(name[here], minlength=len(trace.names))
        flags = trace.flags(f"count {key}", kinds, test)
        total = int(by_name[kinds][flags[:-1]].sum())
        if total and key in _OUTERMOST:
            total = _outermost(trace, rows[(kind == kinds[0])], flags)
        out[key] = float(total)
    host = out.pop("host_collectives")
    out["collectives"] = out["collectives"] or host
    totals = np.bincount(kind, minlength=16)
    out["kernels"] = float(totals[Kind.KERNEL])
    out["memsets"] = float(totals[Kind.MEMSET])
    out["cpu_ops"] = float(totals[Kind.CPU_OP])
    out["python_calls"] = float(totals[Kind.PYTHON])
    return out


def _outermost(trace: Trace, rows: npt.NDArray[np.int64], flags: Bools) -> int:
    """How many of `rows` are flagged and not called directly by a flagged row."""
    rows = rows[flags[trace.events.name[rows]]]
    up = nesting(trace).parent[rows]
    return int(((up < 0) | ~flags[trace.events.name[np.maximum(up, 0)]]).sum())
