"""Leave-one-out at the end of a run: is every accepted patch still needed, enablers of a series included?

Arm a is the final engine without one commit, arm b the final engine. A commit is dropped only when it is shown to
buy less than the margin and what is left passes every gate. Taken only as far as the budget allows. Not for: the
headline (headline.py), or making patches smaller (shrink.py).
"""

from __future__ import annotations

from typing import Any

from optimizer import accept, budget, state
from optimizer.candidate import incumbent_name
from optimizer.judge import calibration_of, failures, take_pair
from optimizer.patching import ast_hash
from optimizer.run import Run
from optimizer.runrepo import Conflict
from optimizer.serial import plain
from optimizer.services import Services, Stop
from optimizer.types import LaunchSpec, Stage, StageResult, Verdict
from optimizer.verdicts import follow


def ablate(run: Run, do: Services) -> None:
    """Try each accepted commit, newest first; what a killed run had finished is not repeated."""
    for commit in reversed(run.repo.log(run.base, run.repo.incumbent())):
        final = run.repo.incumbent()
        commits = run.repo.log(run.base, final)
        if len(commits) < 2:
            return  # the headline says what a single patch is worth
        title = run.repo.message(commit).partition("\n")[0]
        if commit not in commits or title in _done(run):
            continue
        if not do.budget.fits(_cost(do)):
            left = len(commits)
            do.view.note(f"ablation: no time for {left} patches" if not _done(run) else f"ablation: stopped at {title}")
            return
        _leave_out(run, do, commit, title)


def _cost(do: Services) -> float:
    costs = budget.measured(do.budget.lines())
    return do.protocol.decide_pairs * (costs.pair or 0.0) + (costs.gates or 0.0)


def _done(run: Run) -> set[str]:
    return {d["title"] for d in _lines(run)}


def _lines(run: Run) -> list[dict[str, Any]]:
    return [
        line["data"]
        for line in run.ledger.lines()
        if line["kind"] == "decided" and line["data"]["stage"] == Stage.ABLATE
    ]


def _leave_out(run: Run, do: Services, commit: str, title: str) -> None:
    final = run.repo.incumbent()
    rest = [c for c in run.repo.log(run.base, final) if c != commit]
    attempt = int(run.repo.trailers(commit).get("Attempt", "0"))
    data: dict[str, Any] = {"commit": commit, "of_attempt": attempt, "title": title}
    try:
        without = run.repo.replay(rest, run.base)
    except Conflict as error:
        why = f"cannot be left out: later patches build on it ({error})"
        run.ledger.append("decided", None, {**plain(_unknown(why)), **data})
        return
    arm = run.spec(without, f"without-{commit[:12]}", "without")
    last = run.spec(final, incumbent_name(final), "final")
    key = ast_hash(run.repo.sources(without, run.target.editable))
    try:
        with failures(run, Stage.ABLATE):
            result = compare(run, do, arm, last, key, attempt)
        if not result.passed:
            pass_gates(do, arm, last, final, without)
            data["incumbent"] = without
    except Stop as stop:
        result = _unknown(f"{stop.reason}: {stop.detail}")
    run.ledger.append("decided", None, {**plain(result), **data})
    do.view.note(f"without “{title}”: {result.why}{'; dropped' if 'incumbent' in data else ''}")
    run.repo.drop_tree(arm.tree.name)
    follow(run)


def compare(run: Run, do: Services, arm: LaunchSpec, last: LaunchSpec, key: str, attempt: int) -> StageResult:
    """The final engine (arm b) against one that lacks something. Passed: what is lacking buys something, or may."""
    while True:
        pairs = state.pairs(run.ledger.lines(), Stage.ABLATE, key, run.ledger.context.incumbent_commit)
        result = accept.judge(Stage.ABLATE, pairs, calibration_of(run), do.protocol)
        if result is not None:
            return result
        take_pair(run, do, arm, last, Stage.ABLATE, key, attempt)


def pass_gates(do: Services, arm: LaunchSpec, last: LaunchSpec, final: str, without: str) -> None:
    """All gates on an engine that would take the final one's place. Raises Stop."""
    for stage in ("quick", "full"):
        for result in do.gates(stage, arm, last, final, without):
            if not result.passed or result.parked:
                raise Stop(Verdict.REJECT, stage, result.reason, f"{result.gate}: {result.detail}")


def _unknown(why: str) -> StageResult:
    """The commit stays: nothing was shown against it."""
    return StageResult(Stage.ABLATE, True, None, 1.0, (0.0, float("inf")), 0, why=why)


