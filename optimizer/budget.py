"""What a run may spend, what it has spent, and what the next thing would cost by measured costs.

The time for the headline is set aside first; an attempt that would not fit in what is left is not started, and
one that runs over it is stopped between two pairs. Not for: deciding what is tried, or the alpha of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optimizer import rules, state
from optimizer.ledger import Line
from optimizer.run import Limits
from optimizer.types import Protocol

HEADLINE_S = 90.0  # set aside for the headline, but never more than a quarter of the budget
REPORT_S = 15.0  # the report is written after the last pair, within the budget too
# Before any gate has been timed: what the gates launch, in pairs (a pair is two launches).
UNTIMED_GATES_PAIRS = 3


@dataclass(slots=True)
class Costs:
    """Measured seconds of the parts of an attempt; None where nothing was measured yet."""

    pair: float | None = None  # the latest three, mean
    gates: float | None = None  # quick and full of an attempt that passed the quick ones: the latest three, mean
    capture: float | None = None  # the latest


def measured(lines: Sequence[Line]) -> Costs:
    """Costs out of the ledger."""
    pair_s = [line["data"]["seconds"] for line in lines if line["kind"] == "pair" and line["data"].get("seconds")]
    captures = [
        line["data"]["seconds"]
        for line in lines
        if line["kind"] == "captured" and line["data"].get("seconds") and not line["data"].get("reference")
    ]
    costs = Costs(capture=captures[-1] if captures else None)
    if pair_s:
        costs.pair = sum(pair_s[-3:]) / len(pair_s[-3:])
    gates = [[g for g in attempt.data("gate") if g["gate"] != "all"] for attempt in state.attempts(lines)]
    through = [sum(g["seconds"] for g in of) for of in gates if any(g["stage"] == "full" for g in of)][-3:]
    if through:  # not the dearest: a series of three patches would speak for every attempt after it
        costs.gates = sum(through) / len(through)
    return costs


@dataclass(slots=True)
class Budget:
    """Limits of a run against its ledger and this process's clock."""

    limits: Limits
    protocol: Protocol
    lines: Callable[[], Sequence[Line]]
    clock: Callable[[], float]  # seconds, monotonic
    gpus: int = 0
    earlier_s: float = 0.0  # wall seconds of the processes before this one
    started_s: float = 0.0  # this process's clock when it began

    def __post_init__(self) -> None:
        self.started_s = self.started_s or self.clock()

    def spent_s(self) -> float:
        return self.earlier_s + self.clock() - self.started_s

    @property
    def total_s(self) -> float | None:
        return None if self.limits.wall_minutes is None else self.limits.wall_minutes * 60

    def reserve_s(self) -> float:
        """Seconds that stay free for the headline."""
        return 0.0 if self.total_s is None else min(HEADLINE_S, self.total_s / 4)

    def left_s(self, reserve: bool = True) -> float | None:
        """Wall seconds left, without those set aside; None when there is no limit."""
        if self.total_s is None:
            return None
        return self.total_s - self.spent_s() - (self.reserve_s() if reserve else 0.0)

    def attempt_s(self) -> float:
        """What an attempt that is accepted at its earliest looks would take, by the costs measured so far.

        One that needs more pairs is stopped between two of them when the time is up.
        """
        costs = measured(self.lines())
        pair = costs.pair or 0.0
        gates = UNTIMED_GATES_PAIRS * pair if costs.gates is None else costs.gates
        return rules.fewest_pairs(self.protocol) * pair + gates + (costs.capture or 0.0)

    def pair_s(self) -> float:
        return measured(self.lines()).pair or 0.0

    def fits(self, seconds: float, reserve: bool = True) -> bool:
        left = self.left_s(reserve)
        return left is None or seconds <= left

    def spent(self) -> str | None:
        """Why no further attempt may start, in words; None while one may."""
        lines, limits = self.lines(), self.limits
        tried = len(state.attempts(lines))
        rejected = state.consecutive_rejections(lines)
        usd, gpu = state.usd(lines), state.device_s(lines) * self.gpus / 60
        if limits.attempts is not None and tried >= limits.attempts:
            return f"{tried} of {limits.attempts} attempts made"
        if limits.consecutive_rejections is not None and rejected >= limits.consecutive_rejections:
            return f"{rejected} attempts in a row brought nothing"
        if limits.usd is not None and usd >= limits.usd:
            return f"{usd:.2f} of {limits.usd:.2f} USD spent"
        if limits.gpu_minutes is not None and gpu >= limits.gpu_minutes:
            return f"{gpu:.1f} of {limits.gpu_minutes:.1f} GPU minutes spent"
        need = self.attempt_s()
        if not self.fits(need):
            left = self.left_s()
            return f"an attempt takes {need:.0f} s by what was measured, {max(left or 0.0, 0.0):.0f} s are left for it"
        return None

    def facts(self) -> dict[str, object]:
        """The `budget` line of the ledger."""
        lines = self.lines()
        return {
            "attempts": len(state.attempts(lines)),
            "wall_s": round(self.spent_s(), 3),
            "gpu_minutes": round(state.device_s(lines) * self.gpus / 60, 3),
            "usd_total": state.usd(lines),
            "consecutive_rejections": state.consecutive_rejections(lines),
            "next_attempt_s": round(self.attempt_s(), 1),
        }


def headline_pairs(budget: Budget, done: int) -> bool:
    """Whether another headline pair is wanted and fits in what was set aside for them."""
    planned = budget.protocol.headline_pairs
    return done < planned and budget.fits(budget.pair_s() + min(REPORT_S, budget.reserve_s() / 2), reserve=False)

