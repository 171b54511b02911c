"""What happened how often in a step. Not for: times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trace_diff import classify
from trace_diff.ingest.trace import Trace
from trace_diff.nesting import nesting
from trace_diff.types import Kind, Step

Bools = npt.NDArray[np.bool_]
EMPTY_FAMILY = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::empty_permuted"})
COPY_OPS = frozenset({"aten::copy_", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::cat"})


class _Tables(NamedTuple):
    """One flag per name."""

    launch: Bools
    graph: Bools
    sync: Bools
    stream_sync: Bools
    malloc: Bools
    query: Bools
    item: Bools
    empty: Bools
    autograd: Bools
    clone: Bools
    copies: Bools
    host_comm: Bools
    comm: Bools
    d2h: Bools
    h2d: Bools
    d2d: Bools


def _tables(trace: Trace) -> _Tables:
    if "count_tables" not in trace.cache:
        calls = [classify.call_class(n) for n in trace.names]
        ops = [classify.op_class(n) for n in trace.names]
        kinds = [classify.copy_kind(n) for n in trace.names]

        def flags(values: list[bool]) -> Bools:
            return np.array([*values, False])

        trace.cache["count_tables"] = _Tables(
            launch=flags([c == "launch" for c in calls]),
            graph=flags([c == "graph_launch" for c in calls]),
            sync=flags([c == "sync" for c in calls]),
            stream_sync=flags(["streamsynchronize" in n.lower() for n in trace.names]),
            malloc=flags([c == "malloc" for c in calls]),
            query=flags([c in ("query", "event_query") for c in calls]),
            item=flags([o == "host_read" for o in ops]),
            empty=flags([n in EMPTY_FAMILY for n in trace.names]),
            autograd=flags([o == "autograd" and not n.startswith("autograd::engine") for o, n in zip(ops, trace.names, strict=True)]),
            clone=flags([n == "aten::clone" for n in trace.names]),
            copies=flags([n in COPY_OPS for n in trace.names]),
            host_comm=flags([o == "communication" for o in ops]),
            comm=flags([classify.collective(n) is not None for n in trace.names]),
            d2h=flags([k == "d2h" for k in kinds]),
            h2d=flags([k == "h2d" for k in kinds]),
            d2d=flags([k == "d2d" for k in kinds]),
        )
    return trace.cache["count_tables"]


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
    t, events = _tables(trace), trace.events
    rows = step.rows[~doubled(trace)[step.rows]]
    kind, name = events.kind[rows], events.name[rows]
    call = (kind == Kind.RUNTIME) | (kind == Kind.DRIVER)
    op, copy = kind == Kind.CPU_OP, kind == Kind.MEMCPY
    up = nesting(trace).parent[rows]
    outer = (up < 0) | ~t.item[np.where(up >= 0, events.name[np.maximum(up, 0)], len(t.item) - 1)]
    kernel = kind == Kind.KERNEL
    collectives = (kernel & t.comm[name]).sum()
    if collectives == 0:
        up_name = np.where(up >= 0, events.name[np.maximum(up, 0)], len(t.item) - 1)
        collectives = (op & t.host_comm[name] & ~t.host_comm[up_name]).sum()
    found = {
        "kernel_launches": (call & t.launch[name]).sum(),
        "graph_launches": (call & t.graph[name]).sum(),
        "kernels": kernel.sum(),
        "syncs": (call & t.sync[name]).sum(),
        "stream_syncs": (call & t.stream_sync[name]).sum(),
        "queries": (call & t.query[name]).sum(),
        "host_reads": (op & t.item[name] & outer).sum(),
        "d2h": (copy & t.d2h[name]).sum(),
        "h2d": (copy & t.h2d[name]).sum(),
        "d2d": (copy & t.d2d[name]).sum(),
        "memsets": (kind == Kind.MEMSET).sum(),
        "allocations": (op & t.empty[name]).sum(),
        "device_mallocs": (call & t.malloc[name]).sum(),
        "autograd_nodes": (op & t.autograd[name]).sum(),
        "clones": (op & t.clone[name]).sum(),
        "copies": (op & t.copies[name]).sum(),
        "collectives": collectives,
        "cpu_ops": op.sum(),
        "python_calls": (kind == Kind.PYTHON).sum(),
    }
    return {k: float(v) for k, v in found.items()}
