"""The nouns of trace analysis: columns in, accounts and findings out.

Bulk events stay columnar (numpy); everything that crosses a module border is a frozen, slotted dataclass.
All times are integer nanoseconds unless the name says otherwise; a value that does not exist is None. Not
for: parsing (ingest), drawing (reports).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """What a row is, independent of the Kineto schema's version of the category name."""

    OTHER = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    CPU_OP = 4
    RUNTIME = 5  # cudaLaunchKernel, hipModuleLaunchKernel, cudaStreamSynchronize ...
    DRIVER = 6  # cuLaunchKernelEx ...
    PYTHON = 7  # python_function
    ANNOTATION = 8  # user_annotation on the CPU
    GPU_ANNOTATION = 9
    SYNC = 10  # cuda_sync rows: evidence, never work
    PROFILER = 11  # the profiler's own overhead rows, and the Trace span


@dataclass(frozen=True, slots=True)
class Events:
    """Columns of complete events (ph == "X"), sorted by start; all arrays have one length n."""

    ts_ns: npt.NDArray[np.int64]  # relative to Trace.base_ns
    dur_ns: npt.NDArray[np.int64]  # >= 0
    kind: npt.NDArray[np.int8]  # Kind
    name: npt.NDArray[np.int32]  # index into Trace.names
    track: npt.NDArray[np.int32]  # index into Trace.tracks: one (pid, tid)
    stream: npt.NDArray[np.int32]  # device stream, -1 for host rows
    device: npt.NDArray[np.int32]  # device index, -1 for host rows
    correlation: npt.NDArray[np.int64]  # -1: none
    external_id: npt.NDArray[np.int64]  # -1: none
    args_at: npt.NDArray[np.int64]  # offset into the arguments' store, -1: none; decoded by Trace.args(i)

    def __len__(self) -> int:
        return len(self.ts_ns)


@dataclass(frozen=True, slots=True)
class LoadNotes:
    """What loading had to do to a damaged or odd file."""

    repaired: int = 0  # strings or values mended, event kept
    quarantined: int = 0  # events kept out of every sum (absurd duration, zero time)
    lost: int = 0  # events that could not be kept at all
    truncated: bool = False
    messages: tuple[str, ...] = ()
    events_cut: bool = False  # the cut is inside the events: any step may have lost some


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step on one rank. GPU rows belong to it by launch correlation, not by time containment."""

    rank: int
    index: int
    name: str
    phase: Phase
    requests: int | None  # sequences in the step
    tokens: int | None  # tokens computed in the step
    start_ns: int  # wall window; steps of one rank do not overlap
    end_ns: int
    rows: npt.NDArray[np.int64]  # indices of every event of the step (host and device), ascending
    complete: bool = True
    flags: tuple[str, ...] = ()  # "first", "last", "empty", "under_recorded" ...
    context: int | None = None  # cached tokens per sequence, where the annotation says so

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """A host call that waited for the device (or copied from it), summed per call site over the averaged steps."""

    op: str  # "aten::item", "cudaStreamSynchronize", "cudaMemcpyAsync DtoH" ...
    site: str | None  # "file.py(123): function" when stacks are present
    per_step: float
    blocked_ns: float  # mean per step
    starves_ns: float  # mean per step: device idle time that it caused; what removing it could save


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One family of collectives on one rank, per step."""

    name: str  # "all_reduce", "broadcast" ...
    backend: str  # "nccl", "rccl", "gloo", "custom", "symm_mem", "shm"
    rank: int
    per_step: float
    wall_ns: float  # mean per step
    wait_ns: float | None  # waiting for peers; None when peers' traces are missing
    transfer_ns: float | None


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The account of one step (or of the mean of several) on one rank: `parts` sum to `wall_ns` exactly."""

    rank: int
    phase: Phase
    steps: int  # how many steps were averaged; 1 for a single one
    wall_ns: int
    parts: dict[str, int]  # e.g. gpu.gemm, gpu.attention, comm.wait, idle.host_late, cpu.python ... unattributed
    counts: dict[str, float]  # kernel_launches, graph_launches, host_reads, allocations, collectives ... per step
    gpu_busy_ns: int | None
    gpu_idle_ns: int | None
    cpu_self_ns: dict[str, int] = field(default_factory=dict)  # CPU categories, self time, step thread
    gpu_ns: dict[str, int] = field(default_factory=dict)  # GPU categories, summed kernel time
    syncs: tuple[SyncPoint, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()


class Status(StrEnum):
    FOUND = "found"
    NOT_FOUND = "not_found"
    COULD_NOT_LOOK = "could_not_look"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one rule. Its `bound_us` is an upper bound of what a fix could save."""

    id: str  # "host-reads", "comm-wait" ...; unique in a report
    rule: str
    status: Status
    title: str
    bound_us: float | None = None  # wall microseconds on the slowest rank, per `per`
    per: str = "token"  # output token of the compared cell, or "request"
    formula: str = ""
    evidence: tuple[dict[str, Any], ...] = ()  # rows: what, count per step, microseconds, call site
    skills: tuple[str, ...] = ()  # folders of skills/ that answer it
    inferred: bool = False
    missing: tuple[str, ...] = ()  # for could_not_look: the evidence that is not there
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
