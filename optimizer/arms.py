"""Both arms of a pair: launch, warm up by a fixed count, time the target cell and the guard cells, read memory, close.

On a CPU one arm after the other; on GPUs both are launched and warmed at once, off the clock, and then timed one after
the other. Nothing is profiled here. Not for: what is sent, verifying what came, numbers (`measure.py`, `targets.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from optimizer import environment
from optimizer.confine import procfs
from optimizer.confine.launch import LaunchError, launch
from optimizer.targets import Timed
from optimizer.traffic.client import ClientError, Request
from optimizer.traffic.loadgen import Load, LoadGenerator
from optimizer.types import Cell, LaunchSpec, RejectReason, Stream

SLOWEST_TOKEN_S = 2.0  # deadlines: no engine worth timing needs longer for one step
DEADLINE_FLOOR_S = 30.0


class Lost(Exception):
    """Arm `name` failed; `started` is False when it did not even come up."""

    def __init__(self, name: str, started: bool, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.name, self.started, self.reason, self.detail = name, started, reason, detail


class _ArmFailed(Exception):
    """Either arm, before it is known which."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Bench:
    """What a pair is taken with; tests hand in fakes."""

    launch: Callable[[LaunchSpec], AbstractContextManager[Any]] = launch
    generator: Callable[[], AbstractContextManager[Any]] = LoadGenerator
    snapshot: Callable[..., environment.Snapshot] = environment.snapshot
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Job:
    """One cell's requests, the same for both arms."""

    cell: Cell
    rounds: tuple[tuple[Request, ...], ...]
    sequential: int  # steps of all rounds, one after another: for the deadline


@dataclass(frozen=True, slots=True)
class Work:
    """Everything both arms are sent."""

    warm_up: tuple[Job, ...]
    timed: tuple[Job, ...]  # the target cell first
    sha: str


@dataclass(frozen=True, slots=True)
class Arm:
    """What one arm showed."""

    timed: tuple[Timed, ...]
    start_s: float  # launch until healthy
    warm_s: float
    memory_bytes: float
    window: environment.Window
    client_us_per_token: float


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    try:
        yield
    except (LaunchError, _ArmFailed) as error:
        raise Lost(name, isinstance(error, _ArmFailed), error.reason, error.detail) from error


def in_turn(specs: Mapping[str, LaunchSpec], order: str, bench: Bench, work: Callable[[], Work]) -> dict[str, Arm]:
    """One arm after the other: on a CPU two engines at once would share its cores. `work` is called once one is up."""
    arms = {}
    with bench.generator() as generator:
        for name in order:
            with _blamed(name), bench.launch(specs[name]) as server:
                sent = work()
                warm_s = _warm(server, generator, sent, bench)
                arms[name] = _time(server, generator, sent, specs[name], bench, warm_s)
    return arms


def together(specs: Mapping[str, LaunchSpec], order: str, bench: Bench, work: Callable[[], Work]) -> dict[str, Arm]:
    """Both arms up and warm, then timed one after the other: an engine without requests leaves the GPU alone."""
    held = {name: ExitStack() for name in order}
    with ThreadPoolExecutor(len(order)) as pool:  # a sandbox dies with the thread that started it: they stay to the end

        def each(act: Callable[[str], Any]) -> dict[str, Any]:
            running = {name: pool.submit(act, name) for name in order}
            return {name: future.result() for name, future in running.items()}

        def up(name: str) -> tuple[Any, Any]:
            generator = held[name].enter_context(bench.generator())  # comes up meanwhile
            with _blamed(name):
                return held[name].enter_context(bench.launch(specs[name])), generator

        def warm(name: str) -> float:
            server, generator = ready[name]
            with _blamed(name):
                return _warm(server, generator, sent, bench)

        try:
            ready = each(up)
            sent = work()
            warm_s = each(warm)
            arms = {}
            for name in order:
                server, generator = ready[name]
                with _blamed(name):
                    arms[name] = _time(server, generator, sent, specs[name], bench, warm_s[name])
            return arms
        finally:
            each(lambda name: held[name].close())


def _warm(server: Any, generator: Any, work: Work, bench: Bench) -> float:
    """A fixed count of requests, every shape once; seconds it took."""
    began = bench.clock()
    for job in work.warm_up:
        _run_job(server, job, generator)
    return bench.clock() - began


def _time(server: Any, generator: Any, work: Work, spec: LaunchSpec, bench: Bench, warm_s: float) -> Arm:
    memory = [_memory(server, spec)]
    pids = [*server.processes(), *generator.pids]
    before = bench.snapshot(pids, spec.devices)
    timed: list[Timed] = []
    cpu = 0.0
    for job in work.timed:
        done, cost = _run_job(server, job, generator)
        timed.append(done)
        cpu += cost
        memory.append(_memory(server, spec))
    after = bench.snapshot(pids, spec.devices)
    if not server.alive():
        raise _ArmFailed(RejectReason.CRASH, _tail(server))
    tokens = sum(len(s.token_ids) for t in timed for s in t.streams)
    window = environment.window(before, after, _ours(server))
    return Arm(tuple(timed), server.start_s, warm_s, max(memory), window, cpu * 1e6 / tokens)


def _memory(server: Any, spec: LaunchSpec) -> float:
    """Bytes that all ranks allocated on the host; on GPUs what they hold there, else what the cards have in use."""
    if spec.device != "cuda":
        return float(server.own_bytes())
    held = environment.gpu_memory(spec.devices)
    mine = [held[pid] for pid in server.processes() if pid in held]
    return sum(mine) if mine else sum(g.used_mib for g in environment.query_gpus(spec.devices)) * 2**20


def _ours(server: Any) -> list[int]:
    """Processes whose use of a GPU is not foreign: this one, the oracle and all others below it, and the engine's."""
    return [os.getpid(), *procfs.descendants(os.getpid()), *server.processes()]


def _run_job(server: Any, job: Job, generator: Any) -> tuple[Timed, float]:
    """(streams and walls of a cell, CPU seconds of the client). Errors: _ArmFailed."""
    deadline = DEADLINE_FLOOR_S + SLOWEST_TOKEN_S * job.sequential / len(job.rounds)
    streams: list[Stream] = []
    walls: list[int] = []
    cpu = 0.0
    for requests in job.rounds:
        try:
            load: Load = generator.run(server.client, requests, deadline)
        except ClientError as error:
            raise _ArmFailed(RejectReason.CRASH, f"{error}; {_tail(server)}") from error
        _check(requests, load.streams, server)
        streams += load.streams
        walls.append(max(s.arrivals_ns[-1] for s in load.streams) - min(s.sent_ns for s in load.streams))
        cpu += load.cpu_s
    return Timed(job.cell, tuple(streams), tuple(walls)), cpu


def _check(requests: Sequence[Request], streams: Sequence[Stream], server: Any) -> None:
    """All requests finish, with the tokens that were asked for, counted alike by both sides."""
    for request, s in zip(requests, streams, strict=True):
        if s.error is not None:
            if s.error.startswith("not finished") and server.alive():
                raise _ArmFailed(RejectReason.HANG, s.error)
            raise _ArmFailed(RejectReason.CRASH, f"{s.error}; {_tail(server)}")
        if len(s.token_ids) != request.max_tokens or len(s.arrivals_ns) != len(s.token_ids):
            raise _ArmFailed(RejectReason.TOKEN_ACCOUNTING, f"{len(s.token_ids)} tokens of {request.max_tokens} came")
        if s.finish_reason != "length":
            raise _ArmFailed(RejectReason.TOKEN_ACCOUNTING, f"finish reason {s.finish_reason!r}, not 'length'")
        usage = s.usage or {}
        counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if counted != (len(request.prompt_ids), request.max_tokens):
            raise _ArmFailed(RejectReason.TOKEN_ACCOUNTING, f"usage says {counted}, sent and received differ")


def _tail(server: Any) -> str:
    if getattr(server, "killed_for", None):
        return f"killed: {server.killed_for}"
    lines = server.log_tail(5).strip()
    return f"log ends: {lines[-400:]}" if lines else "no log"
