"""What a proposer gets and what it may answer. It sees findings, code, knowledge and history; never gates' data.

Not for: deciding which patch is tried (each proposer does), or reading the ledger (the loop hands history in).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

from optimizer.knowledge.blueprint import Entry
from optimizer.runrepo import unfrozen
from optimizer.types import Series
from trace_diff.types import Finding

MAX_FILES, MAX_LINES = 3, 120  # the envelope of one patch; the scope gate has the last word


class HistoryItem(TypedDict, total=False):
    """One earlier attempt of this run, as the loop reads it out of the ledger; absent keys mean unknown."""

    attempt: int
    verdict: str  # accept, reject, undecided, parked
    reason: str | None  # RejectReason of a reject
    detail: str
    stage: str
    mechanism: str
    finding_ids: list[str]
    params: dict[str, Any]
    ast_hash: str
    patch_sha: str
    incumbent_commit: str
    token_us: float | None  # the incumbent's wall us per token when it was judged
    predicted_us: float | None
    measured_ratio_ci95: list[float] | None


@dataclass(frozen=True, slots=True)
class Budget:
    """What is left, and what a saving must reach; None means no limit, or not known yet."""

    token_us: float | None = None  # the incumbent's wall us per output token in the target cell
    margin: float = 0.0  # smallest improvement that could be accepted, as a fraction
    usd: float | None = None
    requests: int | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ProposeContext:
    """Everything one call of `propose` may look at."""

    sources: Mapping[str, str]  # path relative to the target's root -> text; files that the editable globs name
    findings: Sequence[Finding]
    history: Sequence[HistoryItem] = ()
    knowledge: Sequence[Entry] = ()  # accepted entries whose scope is exactly this run's
    budget: Budget = field(default_factory=Budget)
    incumbent: str | None = None  # commit
    exchanges: Path | None = None  # where recorded conversations go
    attempt: int | None = None
    frozen: Sequence[str] = ()  # globs of files among the sources that may be read and never changed
    try_out: Callable[[Mapping[str, str]], str | None] | None = None  # start these sources briefly: what went wrong
    stopped: Callable[[], bool] | None = None  # whether the user asked the run to stop
    note: Callable[[str], None] | None = None  # says a line to the user, live

    def open(self) -> dict[str, str]:
        """The sources that a patch may change."""
        return unfrozen(self.sources, self.frozen)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one (finding, skill) pair gives no patch."""

    finding: str
    skill: str
    why: str


@dataclass(frozen=True, slots=True)
class Declined:
    """No patch this time, and why; `final` says that asking again without a change gives the same answer."""

    proposer: str
    refusals: tuple[Refusal, ...] = ()
    why: str = ""
    final: bool = True
    usd: float = 0.0
    exchange: str | None = None

    def __str__(self) -> str:
        parts = [self.why] if self.why else []
        parts += [f"{r.finding} / {r.skill}: {r.why}" for r in self.refusals]
        return "; ".join(parts) or "nothing to propose"


class Proposer(Protocol):
    """`propose` is called once per attempt and may be called again after a verdict."""

    name: str

    def propose(self, ctx: ProposeContext) -> Series | Declined: ...
