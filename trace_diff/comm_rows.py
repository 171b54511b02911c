"""The collectives of one rank: rows that communicate, with what identifies them across ranks. Not for: matching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trace_diff import classify, device
from trace_diff.ingest.columns import CollectiveArgs
from trace_diff.ingest.trace import Trace
from trace_diff.nesting import nesting
from trace_diff.types import Kind

# Ranks leave these together, so their ends tell the clocks; in the others a rank may leave early.
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "all_reduce_norm"})


@dataclass(frozen=True, slots=True)
class Call:
    """One collective on one rank. Times are absolute nanoseconds of the rank's own clock.

    A kernel that was launched early has arrived when what is in front of it on its stream has ended.
    """

    row: int
    backend: str
    operation: str
    start: int
    end: int
    group: str | None  # process group's name
    seq: int | None  # sequence number in its group
    size: int | None  # ranks in the group

    @property
    def signature(self) -> tuple[str, str, str | None]:
        """What must agree for two ranks' calls to be one collective."""
        return self.backend, self.operation, self.group


def calls(trace: Trace) -> list[Call]:
    """Collectives of `trace` by start: device kernels, else the workers' spans (gloo:all_reduce), else host operators."""
    if "comm_calls" not in trace.cache:
        found = _device(trace) or _host(trace)
        trace.cache["comm_calls"] = found
    return trace.cache["comm_calls"]


def _device(trace: Trace) -> list[Call]:
    wanted = trace.flags("collective", (Kind.KERNEL,), lambda n: classify.collective(n) is not None)
    kernels = trace.rows(Kind.KERNEL)
    kernels = kernels[wanted[trace.events.name[kernels]]]
    amd = is_rocm(trace)
    out = []
    for row, alone in zip(kernels.tolist(), device.alone_ns(trace, kernels).tolist(), strict=True):
        pair = classify.collective(trace.name(row))
        assert pair is not None
        told = trace.collectives.get(int(trace.events.args_at[row]), _NOTHING)
        backend = "rccl" if pair[0] == "nccl" and amd else pair[0]
        out.append(_call(trace, row, backend, _named(told.operation) or pair[1], told, alone))
    return out


def is_rocm(trace: Trace) -> bool:
    """An AMD device: its runtime calls are hip*, or the file says so."""
    if "rocm" not in trace.cache:
        keys = " ".join(trace.meta)
        trace.cache["rocm"] = "roctracer" in keys or "hip_" in keys or any(n.startswith("hip") for n in trace.names)
    return trace.cache["rocm"]


def _host(trace: Trace) -> list[Call]:
    """Workers' spans where the backend records them, else the outermost communicating operators."""
    wanted = trace.flags(
        "host collective", (Kind.ANNOTATION, Kind.CPU_OP), lambda n: classify.host_collective(n) is not None
    )
    marks = trace.rows(Kind.ANNOTATION)
    spans = marks[wanted[trace.events.name[marks]]]
    spans = np.array([i for i in spans.tolist() if ":" in trace.name(i) and "::" not in trace.name(i)], np.int64)
    if len(spans) == 0:
        ops = trace.rows(Kind.CPU_OP)
        ops = ops[wanted[trace.events.name[ops]]]
        up = nesting(trace).parent[ops]
        spans = ops[(up < 0) | ~wanted[trace.events.name[np.maximum(up, 0)]]] if len(ops) else ops
    out = []
    for row in spans.tolist():
        pair = classify.host_collective(trace.name(row))
        assert pair is not None
        if pair[1] == "other":
            continue
        out.append(_call(trace, row, pair[0], pair[1], _NOTHING, int(trace.events.dur_ns[row])))
    return out


_NOTHING = CollectiveArgs(None, None, None, None)


def _call(trace: Trace, row: int, backend: str, operation: str, told: CollectiveArgs, lasted: int) -> Call:
    end = trace.base_ns + int(trace.events.ts_ns[row]) + int(trace.events.dur_ns[row])
    return Call(
        row=row,
        backend=backend,
        operation=operation,
        start=end - lasted,
        end=end,
        group=str(told.group) if told.group is not None else None,
        seq=told.seq if isinstance(told.seq, int) else None,
        size=told.size if isinstance(told.size, int) else None,
    )


_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
}


def _named(name: Any) -> str | None:
    """The operation that the framework states, which a kernel's name may hide (a gather made of sends)."""
    if not isinstance(name, str):
        return None
    text = name.lower().replace("_", "")
    for key, operation in _OPERATIONS.items():
        if key in text:
            return operation
    return None
