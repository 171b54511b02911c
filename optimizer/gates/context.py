"""What a gate is given: the job, and a laboratory that keeps one engine running between gates.

Not for: any check of its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optimizer.confine import procfs
from optimizer.confine.launch import Server, launch
from optimizer.gates.model_math import vocabulary
from optimizer.traffic.client import Request
from optimizer.traffic.prompts import PromptSource
from optimizer.truth import weights
from optimizer.truth.oracle import Oracle
from optimizer.types import GateResult, LaunchSpec, Protocol, RejectReason, Stream, Target

IDLE = "threads that want a core without any work"


@dataclass(frozen=True, slots=True)
class GateContext:
    """One candidate before the gates. `repo` is a git directory that holds both commits."""

    candidate: LaunchSpec
    incumbent: LaunchSpec
    repo: Path
    base_commit: str
    candidate_commit: str
    target: Target
    oracle: Oracle
    prompts: PromptSource
    protocol: Protocol
    run_dir: Path
    accept_numeric_drift: bool = False  # what lies in the tolerance band passes instead of being parked


@dataclass(frozen=True, slots=True)
class Setup:
    """Which engine a gate needs. Gates that need the same one, one after another, share its launch."""

    tp: int
    weights: str = "real"  # "secret": random ones of the same architecture; "perturbed": one layer redrawn
    probes: frozenset[str] = frozenset()
    small_cache: bool = False
    arm: str = "candidate"


@dataclass(slots=True)
class Lab:
    """The engine under test, started on demand, and what gates learnt on the way."""

    ctx: GateContext
    notes: dict[str, Any] = field(default_factory=dict)
    starts: list[tuple[Setup, float]] = field(default_factory=list)  # every launch and its start-up seconds
    _spent: float = 0.0
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _setup: Setup | None = None
    _server: Server | None = None

    @property
    def on_gpu(self) -> bool:
        return self.ctx.candidate.device != "cpu"

    @property
    def tp(self) -> int:
        return self.ctx.candidate.tp

    def setup(self, **changes: Any) -> Setup:
        return replace(Setup(self.tp), **changes)

    def server(self, setup: Setup) -> Server:
        """The engine of this setup; the one that runs already when it is the same. Raises LaunchError."""
        if self._server is None or setup != self._setup or not self._server.alive():
            self.close()
            self._server = self._open.enter_context(launch(self.spec(setup), log_to=self.log_path))
            self._setup = setup
            self.starts.append((setup, self._server.start_s))
        return self._server

    def stated(self, commit: str) -> Path:
        return self.ctx.run_dir / "gates" / f"stated-{commit}.json"

    def incumbent_metadata(self) -> dict[str, Any]:
        """What the incumbent says of itself: kept from when it was judged, or asked once by starting it. And what was
        seen of it without work: IDLE."""
        path = self.stated(self.ctx.base_commit)
        if not path.is_file():
            server = self.server(self.setup(arm="incumbent"))
            self.remember(self.ctx.base_commit, server.metadata | {IDLE: idle_threads(server)})
        return json.loads(path.read_text())

    def remember(self, commit: str, metadata: dict[str, Any]) -> None:
        path = self.stated(commit)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(metadata, sort_keys=True))
        if not self.stated("first").is_file():  # of the run: what many patches give away a little of shows against it
            self.stated("first").write_text(json.dumps(metadata, sort_keys=True))

    def incumbent_serves(self, what: str, probe: Callable[[Server], bool]) -> bool:
        """Whether the incumbent offers an extension, found by `probe` and kept: a candidate must not give it up.

        Asking ends the engine that runs: take it from `server` again.
        """
        path = self.stated(f"{self.ctx.base_commit}-serves")
        known = json.loads(path.read_text()) if path.is_file() else {}
        if what not in known:
            known[what] = probe(self.server(self.setup(arm="incumbent")))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known, sort_keys=True))
        return known[what]

    def first_metadata(self) -> dict[str, Any]:
        """What the first engine of the run said of itself."""
        path = self.stated("first")
        return json.loads(path.read_text()) if path.is_file() else self.incumbent_metadata()

    @property
    def log_path(self) -> Path:
        return self.ctx.run_dir / "gates" / f"server-{self.ctx.candidate_commit[:12]}.log"

    def spec(self, setup: Setup) -> LaunchSpec:
        arm = self.ctx.candidate if setup.arm == "candidate" else self.ctx.incumbent
        extra = tuple(arg.format(pages=SMALL_CACHE_PAGES) for arg in self.ctx.target.small_cache)
        return replace(
            arm,
            tp=setup.tp,
            model_dir=self.model_dir(setup.weights),
            probes=setup.probes,
            extra_args=(*arm.extra_args, *(extra if setup.small_cache else ())),
            label=setup.arm,
        )

    def model_dir(self, which: str) -> Path:
        """The real weights, or a copy made once a run from the run's secret key."""
        real = self.ctx.candidate.model_dir
        if which == "real":
            return real
        seed = self.ctx.prompts.integers(f"weights/{which}", 1, 2**62)[0]
        # A candidate can read its mounts: the name must not say which weights these are.
        out = (
            self.ctx.run_dir
            / "weights"
            / f"{self.ctx.prompts.integers(f'weights/name/{which}', 1, 2**62)[0]:016x}"
        )
        if which == "secret":
            return weights.write_random(real, out, seed)
        return weights.write_perturbed(real, out, weights.layers(real) // 2, seed)

    def oracle(self, setup: Setup) -> Oracle:
        """The oracle with the same weights as the engine of this setup."""
        return self.ctx.oracle.at(self.model_dir(setup.weights))

    def draw(self, name: str, n: int, tokens: Any, **kinds: Any) -> list[tuple[int, ...]]:
        """Secret prompts of this candidate's evaluation: drawn when asked for, so after its engine is up."""
        return self.ctx.prompts.draw(f"gate/{self.ctx.candidate_commit}/{name}", n, tokens, **kinds)

    def cpu_s(self) -> float:
        """CPU seconds of all engines, of the oracle where it says so, and of this process."""
        running = 0.0 if self._server is None else self._server.cpu_s()
        oracle = getattr(self.ctx.oracle, "cpu_s", lambda: 0.0)()
        return self._spent + running + oracle + time.process_time()

    def close(self) -> None:
        if self._server is not None:
            self._spent += self._server.cpu_s()
        self._server = self._setup = None
        self._open.close()


SMALL_CACHE_PAGES = 48
IDLE_LOOKS = 10


def idle_threads(server: Server) -> float:
    """IDLE of an engine: the least of several looks. On a busy machine what little an engine does waits for its core, and
    work of the start may still go on; whoever waits by asking for ever wants a core at every look."""
    least = procfs.wanting(server.processes())
    for _ in range(IDLE_LOOKS):
        if least < 0.3:
            break
        least = min(least, procfs.wanting(server.processes()))
    return least


def ask(server: Server, requests: list[Request], seconds: float = 60.0) -> list[Stream]:
    """Concurrent streams. Raises Failed when one of them ended with an error or holds what is no token."""
    streams = server.client.complete(requests, seconds)
    known = vocabulary(server.spec.model_dir)
    for request, stream in zip(requests, streams, strict=True):
        if stream.error is not None and request.abort_after is None:
            raise broken(server, stream.error)
        if outside := [token for token in stream.token_ids if token >= known]:
            detail = f"token {outside[0]} is outside the vocabulary of {known}"
            raise Failed(RejectReason.TOKEN_ACCOUNTING, detail, "G11")
    return streams


class Failed(Exception):
    """A gate's way out of the middle of a check."""

    def __init__(self, reason: RejectReason, detail: str, check: str | None = None) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.check = reason, detail, check


def broken(server: Server, error: str) -> Failed:
    """What a failed stream means: a deadline, a dead engine, or a broken protocol."""
    deadline = time.monotonic() + (1.0 if "ended" in error or "receive" in error else 0.0)
    while (
        server.alive() and time.monotonic() < deadline
    ):  # a stream that breaks off may be an engine that is dying
        time.sleep(0.02)
    if reason := server.over_limit():
        return Failed(RejectReason.RESOURCES, reason, "G04")
    if not server.alive():
        return Failed(RejectReason.CRASH, f"the engine ended: {server.log_tail(6)}")
    if "not finished" in error:
        return Failed(RejectReason.HANG, error)
    if error.startswith(("HTTP", "receive", "send", "no answer")):
        return Failed(RejectReason.CRASH, error)
    return Failed(RejectReason.TOKEN_ACCOUNTING, f"the stream breaks the protocol: {error}", "G11")


def passed(gate: str, check: str, detail: str = "", /, **facts: Any) -> GateResult:
    return GateResult(gate, check, True, None, detail, facts=facts)


def failed(gate: str, check: str, reason: RejectReason, detail: str, /, **facts: Any) -> GateResult:
    return GateResult(gate, check, False, reason, detail, facts=facts)


def parked(gate: str, check: str, reason: RejectReason, detail: str, /, **facts: Any) -> GateResult:
    return GateResult(gate, check, False, reason, detail, parked=True, facts=facts)
