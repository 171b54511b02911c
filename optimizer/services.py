"""What the loop needs from the rest, as callables: tests hand in fakes, `wiring.real` hands in the real ones.

Not for: any behaviour; this file holds signatures and the nouns that only the loop's steps exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from typing import Protocol as Shape

from optimizer.budget import Budget
from optimizer.types import (
    GateResult,
    LaunchSpec,
    Pair,
    Patch,
    Protocol,
    RejectReason,
    Series,
    Stage,
    Verdict,
)
from trace_diff.types import Finding


class Stop(Exception):
    """An attempt ends here with this verdict; everything but an acceptance."""

    def __init__(self, verdict: Verdict, stage: str, reason: RejectReason | None, detail: str) -> None:
        super().__init__(f"{verdict} at {stage}: {reason or 'not resolved'}: {detail}")
        self.verdict, self.stage, self.reason, self.detail = verdict, stage, reason, detail


class Interrupted(Exception):
    """The user asked to stop; the attempt stays open and a resumed run goes on with it."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Traces of one engine at the target cell, and how fast the same work ran without the profiler."""

    label: str
    traces: tuple[Path, ...]  # one per rank
    tp: int
    batch: int
    control_us_per_token: float | None  # wall per output token of one stream, unprofiled
    metadata: dict[str, Any] = field(default_factory=dict)  # what the server says of itself
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the traces of the incumbent say, beside those of others."""

    findings: tuple[Finding, ...]
    step_us: float | None  # mean wall of a decode step, slowest rank, profiled
    tokens_per_step: int
    rows: tuple[Mapping[str, float], ...] | None = None  # per rank: trace row -> count per decode step
    shown: tuple[Any, ...] = ()  # rich renderables, for the terminal
    facts: dict[str, Any] = field(default_factory=dict)  # JSON: tables of the diff, for the report


@dataclass(frozen=True, slots=True)
class Question:
    """What a proposer is asked with; `wiring` makes its own context of it."""

    sources: Mapping[str, str]
    findings: Sequence[Finding]
    history: Sequence[dict[str, Any]]
    incumbent: str
    attempt: int
    token_us: float | None
    margin: float
    usd_left: float | None
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A series and the number of the attempt that tries it."""

    number: int
    series: Series
    admitted: bool = False  # a person looked at it when it was parked: it is not parked again


@dataclass(frozen=True, slots=True)
class NoProposal:
    """The proposer has nothing; `final` says that asking again changes nothing."""

    why: str
    final: bool = True
    usd: float = 0.0


class View(Shape):
    """Where progress goes: a terminal, a log, or nowhere."""

    def step(self, text: str, seconds: float | None = None) -> None:
        """The loop now does this, and expects it to take so long."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def show(self, renderable: Any) -> None:
        """A table or the like."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """Everything outside the loop that it calls. Errors that each may raise stand at its real implementation."""

    protocol: Protocol
    budget: Budget
    view: View
    capture: Callable[[LaunchSpec, Path], Capture]
    references: Callable[[Path, Capture], list[Capture]]
    diagnose: Callable[[Capture, Sequence[Capture]], Diagnosis]
    propose: Callable[[Question], Series | NoProposal]
    apply_edits: Callable[[Mapping[str, str], Patch], dict[str, str]]
    gates: Callable[[str, LaunchSpec, LaunchSpec, str, str], Iterator[GateResult]]
    run_pair: Callable[[LaunchSpec, LaunchSpec, Stage, int, str], Pair]
    check_seal: Callable[[], None]
    learn: Callable[[int | None], list[str]]
    compiling: Callable[[Sequence[LaunchSpec]], AbstractContextManager[None]] = lambda specs: nullcontext()  # ahead of gates
    bandwidth: Callable[[int], float] | None = None  # bytes/s of memory that all ranks together reach on so many bytes
