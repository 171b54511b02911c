"""One case through the real gates, and what became of it. Not for: the list (`cheats.py`) or the table."""

from __future__ import annotations

import time
from dataclasses import dataclass

from optimizer import gates
from optimizer.gates.context import Lab
from optimizer.types import GateResult
from redteam.arena import Arena
from redteam.case import Case


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    stopped: GateResult | None  # the gate that refused or parked it
    seconds: float
    gates: tuple[GateResult, ...] = ()
    broken: str | None = None  # the case itself does not work

    @property
    def right(self) -> bool:
        """Cheats: stopped by a check that was expected to. Controls: stopped by nothing."""
        if self.broken is not None:
            return False
        if not self.case.expected:
            return self.stopped is None
        return self.stopped is not None and bool(set(self.stopped.check.split()) & self.case.expected)

    def caught_by(self) -> str:
        if self.broken is not None:
            return f"BROKEN: {self.broken}"
        if self.stopped is None:
            return "-"
        how = "parked" if self.stopped.parked else str(self.stopped.reason)
        return f"{self.stopped.check} {self.stopped.gate}: {how}: {self.stopped.detail.splitlines()[0] if self.stopped.detail else ''}"


def judge(arena: Arena, case: Case) -> Outcome:
    """Apply the case's patch to the engine's snapshot and run quick and full gates until one stops it."""
    began = time.perf_counter()
    commit = arena.commit(case.make(arena.sources()), f"{case.id} {case.idea}")
    context = arena.context(commit, case.tp)
    seen: list[GateResult] = []
    stopped: GateResult | None = None
    try:
        for stage in ("quick", "full"):
            chosen = [gate for gate in gates.chosen(stage, context) if gate.name not in case.without]
            lab = Lab(context)
            try:
                for gate in chosen:
                    result = gates.one(gate, lab)
                    seen.append(result)
                    if not result.passed:
                        stopped = result
                        break
            finally:
                lab.close()
            if stopped is not None:
                break
    finally:
        arena.drop(commit)
    return Outcome(case, stopped, time.perf_counter() - began, tuple(seen))
