"""The program: capture, diff, propose, apply, gate, screen, gate fully, decide, confirm, write back; again.

`Loop.attempt` is one attempt and reads like that sentence; each verb has a file of its own. Not for: anything
that a step does (look there), or the command line (cli.py).
"""

from __future__ import annotations

from optimizer import state
from optimizer.ablate import ablate
from optimizer.calibrating import calibrate, canary_due, run_canary
from optimizer.candidate import build
from optimizer.capturing import capture_incumbent
from optimizer.explain import explain
from optimizer.headline import bound_us, headline
from optimizer.judge import gates, pause_point, screen, stage
from optimizer.propose import propose
from optimizer.run import Run
from optimizer.services import Capture, Diagnosis, NoProposal, Services, Stop
from optimizer.shrink import shrink
from optimizer.stopping import goal_reached, nothing_left
from optimizer.types import Stage, Verdict
from optimizer.verdicts import accept, close, finish_attempt, finish_ended, follow, learn

PATIENCE = 3  # answers without a patch, one after another, from a proposer that may still find one


class Loop:
    """One run, from its first capture to its headline. Every decision is read out of the ledger."""

    def __init__(self, services: Services, run: Run) -> None:
        self.services, self.run = services, run
        self.declined: str | None = None
        self.misses = 0
        self.last: tuple[Capture, Diagnosis] | None = None

    def attempt(self) -> Verdict | None:
        """One attempt, or the rest of the one that was left open. None when there was nothing to propose."""
        do, run = self.services, self.run
        before = self.diagnose()
        proposal = propose(run, do, before)
        if isinstance(proposal, NoProposal):
            self.misses += 1
            if proposal.final or self.misses >= PATIENCE:
                self.declined = proposal.why
            return None
        self.misses = 0
        try:
            candidate = build(run, do, proposal)
            gates(run, do, candidate, "quick")
            screen(run, do, candidate)
            gates(run, do, candidate, "full")
            stage(run, do, candidate, Stage.DECIDE)
            result = stage(run, do, candidate, Stage.CONFIRM)
            explanation = explain(run, do, candidate, result, before)
            verdict = accept(run, candidate, result, explanation)
        except Stop as stop:
            verdict = close(run, proposal.number, stop)
        finish_attempt(run, do, proposal.number)
        return verdict

    def diagnose(self) -> Diagnosis:
        """Traces of the incumbent beside the references', and what they say."""
        capture = capture_incumbent(self.run, self.services)
        if self.last is not None and self.last[0].traces == capture.traces:
            return self.last[1]
        references = self.services.references(self.run.dir / "traces", capture)
        self.services.view.step("diff the traces")
        self.last = capture, self.services.diagnose(capture, references)
        return self.last[1]

    def go(self) -> str:
        """Begin or go on, try until there is a reason to stop, measure the whole. Returns that reason."""
        do, run = self.services, self.run
        follow(run)
        finish_ended(run, do)
        before = self.diagnose()
        for table in before.shown:
            do.view.show(table)
        calibrate(run, do)
        while (why := self.reason_to_stop(before)) is None:
            self.attempt()
            pause_point(run)
            before = self.diagnose()
            calibrate(run, do)
        ablate(run, do)
        shrink(run, do)
        learn(do, None)  # ablation may have told more of the accepted ones
        end = {"reason": why, "headline": headline(run, do), "bound_us_per_token": bound_us(run)}
        run.ledger.append("finished", None, {**end, **do.budget.facts()})
        return why

    def reason_to_stop(self, diagnosis: Diagnosis) -> str | None:
        """Target reached, budget spent, nothing left that could pay; an open attempt is always ended first."""
        run, do = self.run, self.services
        lines = run.ledger.lines()
        if state.open_attempt(lines) is not None or state.waiting(lines) is not None:
            return None
        if canary_due(lines) and (why := run_canary(run, do)) is not None:
            return why
        if self.declined is not None:
            return f"the proposer has nothing left: {self.declined}"
        return goal_reached(run, lines) or do.budget.spent() or nothing_left(lines, diagnosis)
