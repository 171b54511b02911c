"""A simulated host and device that run a step program and write the Kineto trace of it.

The machine is the ground truth of the planted bench: the cost of a planted cause is the wall of the program
with it minus the wall of the program without, both run here. It knows a host thread, device streams, blocking
calls and collectives between ranks; nothing in it is shared with trace_diff. Not for: programs (programs).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LAUNCH_NS = 4_000  # host time of a launch call
LATENCY_NS = 3_000  # from the end of a launch call to the start of its kernel
QUEUE_NS = 700  # between two kernels that were both launched in time
GRAPH_GAP_NS = 400  # between two kernels of one graph
HOST, HELPER, DEVICE = 100, 101, 0

Yield = tuple[int, int]  # (when this rank is at the collective, its transfer)
Program = Callable[["Machine"], Generator[Yield, int, None]]


@dataclass
class Machine:
    """One rank. Times are integer nanoseconds; `now` is the host's clock."""

    rank: int = 0
    world: int = 1
    device: str | None = "NVIDIA H200"
    now: int = 1_000_000
    free: dict[int, int] = field(default_factory=dict)  # stream -> end of its last item
    events: list[dict[str, Any]] = field(default_factory=list)
    step_starts: list[int] = field(default_factory=list)
    correlation: int = 1
    sequence: int = 1000
    grad: tuple[int, int] | None = None  # (ns per autograd dispatch, ns per recorded node) while recording
    reads: list[int] = field(default_factory=list)  # ends of asynchronous read-backs

    def event(self, cat: str, name: str, start: int, end: int, tid: int | str, **args: Any) -> None:
        pid = DEVICE if cat in ("kernel", "gpu_memcpy", "gpu_memset") else 1000 + self.rank
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}
        )

    def python(self, ns: int) -> None:
        """Host time that no operator covers."""
        self.now += ns

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        start = self.now
        self.step_starts.append(start)
        yield
        self.event("user_annotation", name, start, self.now, HOST)

    @contextmanager
    def op(self, name: str, ns: int, node: bool = True, **args: Any) -> Iterator[None]:
        """An operator with `ns` of its own time in front of what it calls."""
        start = self.now
        if self.grad is not None and not args.pop("below_autograd", False):
            args["Sequence number"] = self.sequence
            self.now += self.grad[0] + (self.grad[1] if node else 0)
            self.sequence += int(node)
        else:
            args.pop("below_autograd", None)
        self.now += ns
        yield
        self.event("cpu_op", name, start, self.now, HOST, **args)

    def leaf(self, name: str, ns: int, **args: Any) -> None:
        with self.op(name, ns, **args):
            pass

    def call(self, name: str, ns: int) -> int:
        """A runtime call; returns its correlation id."""
        self.correlation += 1
        self.event("cuda_runtime", name, self.now, self.now + ns, HOST, correlation=self.correlation)
        self.now += ns
        return self.correlation

    def kernel(self, name: str, ns: int, stream: int = 7, cat: str = "kernel", **args: Any) -> tuple[int, int]:
        """Launch one item; returns its (start, end) on the device."""
        call = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}[cat]
        ident = self.call(call, LAUNCH_NS)
        return self._run(name, ns, stream, ident, cat, self.now + LATENCY_NS, QUEUE_NS, **args)

    def graph(self, kernels: list[tuple[str, int]], stream: int = 7, launch_ns: int = 20_000) -> None:
        """One graph launch of many kernels."""
        ident = self.call("cudaGraphLaunch", launch_ns)
        for name, ns in kernels:
            self._run(name, ns, stream, ident, "kernel", self.now + LATENCY_NS, GRAPH_GAP_NS)

    def _run(
        self, name: str, ns: int, stream: int, ident: int, cat: str, ready: int, gap: int, **args: Any
    ) -> tuple[int, int]:
        start = max(ready, self.free.get(stream, 0) + gap)
        self.event(cat, name, start, start + ns, stream, correlation=ident, stream=stream, device=0, **args)
        self.free[stream] = start + ns
        return start, start + ns

    def copy(self, name: str, ns: int = 1_200, size: int = 64, blocking: bool = False, stream: int = 7) -> None:
        """A copy; a blocking one returns when it is done."""
        if not blocking:
            self.kernel(name, ns, stream, "gpu_memcpy", bytes=size)
            return
        start = self.now
        self.correlation += 1
        ident = self.correlation
        _, end = self._run(name, ns, stream, ident, "gpu_memcpy", start + LAUNCH_NS + LATENCY_NS, QUEUE_NS, bytes=size)
        self.now = max(start + LAUNCH_NS, end + 2_000)
        self.event("cuda_runtime", "cudaMemcpyAsync", start, self.now, HOST, correlation=ident)

    def item(self, stream: int = 7) -> None:
        """`.item()` on a device tensor that is ready when its stream is."""
        with self.op("aten::item", 1_000, below_autograd=True), self.op(
            "aten::_local_scalar_dense", 1_500, below_autograd=True
        ):
            self.copy("Memcpy DtoH (Device -> Pageable)", 1_500, 8, blocking=True, stream=stream)
            self.call("cudaStreamSynchronize", 1_500)

    def read_later(self) -> None:
        """Start reading a token back without waiting for it."""
        _, end = self.kernel("Memcpy DtoH (Device -> Pinned)", 1_300, 7, "gpu_memcpy", bytes=8)
        self.reads.append(end)

    def wait_for_read(self, back: int = 1) -> None:
        """Wait for the read-back that was started `back` reads ago (an event, as asynchronous schedulers do)."""
        if len(self.reads) < back:
            return
        start = self.now
        self.correlation += 1
        self.now = max(start + 1_500, self.reads[-back] + 1_500)
        self.event("cuda_runtime", "cudaEventSynchronize", start, self.now, HOST, correlation=self.correlation)

    def at_device_collective(self) -> int:
        """Enter a collective kernel on the compute stream: its start on the device."""
        self.call("cudaLaunchKernel", LAUNCH_NS)
        return max(self.now + LATENCY_NS, self.free.get(7, 0) + QUEUE_NS)

    def leave_device_collective(self, name: str, start: int, end: int) -> None:
        self.event(
            "kernel", name, start, end, 7, correlation=self.correlation, stream=7, device=0
        )
        self.free[7] = end

    def trace(self, control_us: float | None) -> dict[str, Any]:
        """The Kineto object; times as decimal microseconds."""
        events: list[dict[str, Any]] = [
            {**e, "ts": e["ts"] / 1000, "dur": e["dur"] / 1000} for e in sorted(self.events, key=lambda e: e["ts"])
        ]
        out: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": self.device}] if self.device else [],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world},
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
            "traceEvents": events,
        }
        if control_us is not None:
            out["control_step_us"] = control_us
        return out


def run(program: Callable[[Machine, int], Generator[Yield, int, None]], machines: list[Machine], steps: int) -> None:
    """Run `steps` steps on all ranks; every rank meets the others at its collectives."""

    def whole(m: Machine) -> Generator[Yield, int, None]:
        for k in range(steps):
            yield from program(m, k)

    running = [whole(m) for m in machines]
    waiting: list[Yield | None] = [next(g, None) for g in running]
    while any(w is not None for w in waiting):
        if any(w is None for w in waiting):
            raise RuntimeError("ranks disagree about their collectives")
        end = max(w[0] + w[1] for w in waiting if w is not None)
        fresh: list[Yield | None] = []
        for g in running:
            try:
                fresh.append(g.send(end))
            except StopIteration:
                fresh.append(None)
        waiting = fresh


def step_ns(m: Machine) -> float:
    """Mean period of the last half of the steps: between read-backs on a device, else between step starts."""
    marks = m.reads or m.step_starts
    half = marks[len(marks) // 2 :]
    return (half[-1] - half[0]) / (len(half) - 1)
