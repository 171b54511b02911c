"""Does knowledge pay: the same budget with and without it, on the fake engine, by the real loop and the real playbook."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from loop_fakes import Fakes, new_run
from typer.testing import CliRunner

from optimizer.knowledge import ablation, learning, trials
from optimizer.knowledge.ablation import WITH, WITHOUT, Reached, Trial
from optimizer.knowledge.blueprint import Blueprint, Detection, Entry, Gain, Gains, Scope, Status
from optimizer.knowledge.trials import AblationError, Job, Plan
from optimizer.loop import Loop
from optimizer.proposers import Budget, Declined, ProposeContext
from optimizer.proposers.playbook import Playbook
from optimizer.run import Limits
from optimizer.services import NoProposal, Question
from optimizer.types import Series
from trace_diff.types import Finding
from trace_diff.types import Status as Looked

ENVIRONMENT = {"hash": "env", "machine": "x86_64", "versions": {"torch": "2.13.0"}}
CODEMOD = """
def propose(sources, finding):
    text = sources["model.py"]
    return {{"sources": {{"model.py": text.replace({old!r}, {new!r})}}, "predicted_us": 10.0}} if {old!r} in text else {{"declined": "not there"}}
"""
SKILLS = {  # the dearest answers bring nothing, as on an engine whose traces mislead
    "rename-digest": ("range(count)", "range(0, count)"),
    "rename-ids": ("ids = list(prompt)", "ids = [*prompt]"),
    "faster-step": ("STEP_US = 1000", "STEP_US = 700"),
}
FOUND = tuple(
    Finding(name, name, Looked.FOUND, name, bound_us=bound, skills=(name,))
    for name, bound in (("rename-digest", 800.0), ("rename-ids", 700.0), ("faster-step", 400.0))
)


@pytest.fixture(scope="module")
def skills(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("skills")
    for name, (old, new) in SKILLS.items():
        (folder / name).mkdir()
        (folder / name / "SKILL.md").write_text(f"---\nname: {name}\ndescription: does {name}\nmetadata:\n  answers: {name}\n---\nText.\n")
        (folder / name / "codemod.py").write_text(CODEMOD.format(old=old, new=new))
    return folder


def executed(folder: Path, steps: list[Job]) -> Callable[[Job], None]:
    """Runs a job's loop in this process on the fake engine, the playbook as the proposer."""

    def execute(job: Job) -> None:
        steps.append(job)
        options = dict(zip(job.command, job.command[1:], strict=False))
        fields = {"without_knowledge": tuple(options.get("--without-knowledge", "").split(",")), "knowledge": Path(options["--knowledge"])}
        run = new_run(job.run_dir, Limits(attempts=6), seed=job.seed, environment=ENVIRONMENT, **fields)
        fakes = Fakes(run)
        began = datetime.fromisoformat(run.ledger.lines()[0]["t_utc"])
        run.ledger.now = lambda: (began + timedelta(seconds=fakes.clock.now)).isoformat()
        Loop(services(fakes, folder), run).go()
        run.ledger.close()

    return execute


def services(fakes: Fakes, folder: Path) -> Any:
    run = fakes.run
    playbook = Playbook([folder], built_in=None)

    def propose(question: Question) -> Series | NoProposal:
        budget = Budget(token_us=question.token_us, margin=question.margin)
        ctx = ProposeContext(question.sources, FOUND, question.history, learning.accepted(run), budget)  # type: ignore[arg-type]
        answer = playbook.propose(ctx)
        return NoProposal(str(answer)) if isinstance(answer, Declined) else answer

    return replace(fakes.services(), propose=propose)


def accepted(scope: Scope, name: str, mechanism: str, **more: Any) -> Entry:
    base: dict[str, Any] = {"id": name, "topic": "t", "mechanism": mechanism, "title": name, "rule": "r", "why": "measured", "detection": Detection(signature="s")}
    return Entry(**base, scope=scope, status=Status.ACCEPTED, reviewer="me", **more)


def book(folder: Path, tmp_path: Path) -> Path:
    """Accepted knowledge about the fake engine: one mechanism that helps, two that do not."""
    facts = learning.facts(new_run(tmp_path / "facts" / "run", environment=ENVIRONMENT))
    scope = Scope(**{name: [facts[name]] for name in Scope.model_fields})
    known = Blueprint((), folder)
    known.put(accepted(scope, "win", "faster-step", gain=Gains(marginal=Gain(ratio=0.7, ci95=(0.69, 0.71), pairs=6))))
    known.put(accepted(scope, "no-1", "rename-digest", helps=False))
    known.put(accepted(scope, "no-2", "rename-ids", helps=False))
    known.save("t")
    return folder


def test_entries_that_pay_are_seen_to_pay_and_only_the_budget_is_the_same(tmp_path: Path, skills: Path) -> None:
    plan = Plan(tmp_path / "runs", book(tmp_path / "book", tmp_path), ("--tp", "1"), (1, 2))
    jobs: list[Job] = []
    found = trials.ablate(plan, executed(skills, jobs))
    assert [(j.seed, j.arm) for j in jobs] == [(1, WITH), (1, WITHOUT), (2, WITHOUT), (2, WITH)]
    for one in found.trials:
        assert one.arms[WITH].attempts == 1 and one.arms[WITH].mechanisms[0] == "+faster-step"
        assert one.arms[WITHOUT].attempts == 3 and one.arms[WITHOUT].mechanisms[:2] == ("rename-digest", "rename-ids")
        assert one.final == pytest.approx(1 / 0.7, rel=0.02)
    assert found.attempts is not None and found.attempts.mean == pytest.approx(1 / 3) and found.attempts.interval == pytest.approx((1 / 3, 1 / 3), rel=1e-4)
    assert found.seconds is not None and found.seconds.mean < 0.6
    assert found.pays is True and "it pays" in ablation.words(found)
    assert json.loads(trials.to_json(found, {"what": "test"}))["pays"] is True
    assert trials.ablate(plan, executed(skills, jobs)) == found and len(jobs) == 4  # finished runs are not run again


def test_one_entry_is_left_out_alone(tmp_path: Path, skills: Path) -> None:
    plan = Plan(tmp_path / "runs", book(tmp_path / "book", tmp_path), (), (1, 2), without=("no-1",))
    found = trials.ablate(plan, executed(skills, []))
    assert {one.arms[WITHOUT].attempts for one in found.trials} == {1}  # the win is still known
    assert found.attempts is not None and found.attempts.mean == 1.0 and found.pays is not True


def test_an_entry_that_hides_the_only_win_is_never_seen_to_pay(tmp_path: Path, skills: Path) -> None:
    folder = book(tmp_path / "book", tmp_path)
    known = Blueprint.load(folder)
    known.put(known.get("win").model_copy(update={"helps": False, "gain": Gains()}))
    known.save("t")
    found = trials.ablate(Plan(tmp_path / "runs", folder, (), (1, 2), without=("win",)), executed(skills, []))
    assert {one.arms[WITH].attempts for one in found.trials} == {None}
    assert found.attempts is not None and found.attempts.never == {WITH: 2, WITHOUT: 0} and found.pays is not True


def test_what_cannot_be_compared_is_said_in_one_line(tmp_path: Path) -> None:
    folder = book(tmp_path / "book", tmp_path)
    with pytest.raises(AblationError, match="no entry 'gone'"):
        trials.check(Plan(tmp_path, folder, (), (1,), without=("gone",)))
    known = Blueprint.load(folder)
    known.put(known.get("win").model_copy(update={"status": Status.PROPOSED}))
    known.save("t")
    with pytest.raises(AblationError, match="proposers read accepted entries only"):
        trials.check(Plan(tmp_path, folder, (), (1,), without=("win",)))
    with pytest.raises(AblationError, match="no accepted entry"):
        trials.check(Plan(tmp_path, tmp_path / "empty", (), (1,)))
    elsewhere = new_run(tmp_path / "gpu" / "run", environment=ENVIRONMENT, tp=1, dtype="bfloat16", knowledge=folder)
    with pytest.raises(AblationError, match="does not hold for this run"):
        trials.in_scope(Plan(tmp_path, folder, (), (1,)), elsewhere)
    with pytest.raises(AblationError, match="need 6; 4 are there"):
        trials.shares([0, 1, 2, 3], 3, 2)
    assert trials.shares([4, 5, 6, 7], 2, None) == [frozenset({4, 5}), frozenset({6, 7})]


def arm(attempts: int | None, tried: int = 6, speedup: float = 1.5) -> Reached:
    return Reached(attempts, None if attempts is None else 10.0 * attempts, tried, 60.0, speedup, ())


def both(seed: int, with_: int | None, without: int | None) -> Trial:
    return Trial(seed, {WITH: arm(with_), WITHOUT: arm(without)})


def test_an_arm_that_never_gets_there_cannot_decide_for_itself() -> None:
    assert ablation.answer([both(1, 1, None), both(2, 1, None), both(3, 1, 6)]).pays is True  # its 7 is the least it can be
    assert ablation.answer([both(1, None, 6), both(2, None, 6)]).pays is False  # and so is this one's
    assert ablation.answer([both(1, None, 9), both(2, None, 9)]).pays is None  # it would have to be above 9 to cost
    assert ablation.answer([both(1, 6, 1), both(2, 5, 1), both(3, 6, 1)]).pays is False
    assert ablation.answer([both(1, 1, 6)]).pays is None  # one seed has no interval
    nothing = Trial(1, {WITH: arm(None, speedup=1.0), WITHOUT: arm(None, speedup=1.0)})
    assert ablation.answer([nothing]).attempts is None and "nothing can be said" in ablation.answer([nothing]).why


def run_of(*tried: tuple[str, float | None]) -> list[dict[str, Any]]:
    """Ledger lines of a run: (program, confirmed ratio, or None for a rejection) of every attempt, ten seconds each."""
    found = [("run_started", None, {})]
    for number, (program, ratio) in enumerate(tried, 1):
        found.append(("proposed", number, {"ast_hash": program, "mechanism": program}))
        found += [("confirmed", number, {"ratio": ratio}), ("accepted", number, {})] if ratio else [("rejected", number, {})]
    return [{"kind": k, "attempt": n, "data": d, "t_utc": f"2026-01-01T00:{n or 0:02d}:00+00:00"} for k, n, d in found]


def test_arms_that_end_in_one_program_have_one_gain_whatever_each_of_them_measured() -> None:
    """Both arms accepted the same patch in each of two seeds; where the last arm measured it low, it "never got there"."""
    seeds = {
        1: {WITH: run_of(("w", 0.5)), WITHOUT: run_of(("a", None), ("b", None), ("w", 0.7))},
        2: {WITH: run_of(("w", 0.8)), WITHOUT: run_of(("a", None), ("b", None), ("w", 0.55), ("x", 0.9))},
    }
    one, two = ablation.trials(seeds)
    assert [one.arms[arm].attempts for arm in (WITH, WITHOUT)] == [1, 3]
    w = (0.5 * 0.7 * 0.8 * 0.55) ** -0.25
    assert one.arms[WITH].speedup == one.arms[WITHOUT].speedup == pytest.approx(w)
    assert two.arms[WITHOUT].speedup == pytest.approx(w / 0.9), "one more step, on what its engine gained in all runs"
    assert [two.arms[arm].attempts for arm in (WITH, WITHOUT)] == [None, 4]
    there_and_back = [run_of(("p", 0.9), ("q", 0.9)), run_of(("q", 0.9), ("p", 0.9))]
    found = ablation.speedups(ablation.curve(lines) for lines in there_and_back)
    assert found[""] == 1.0 and found["p"] > 1 and found["q"] > 1


def test_a_killed_ablation_goes_on_with_the_run_that_was_left(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "runs", book(tmp_path / "book", tmp_path), ("--tp", "1"), (1,), without=("win",))
    fresh = trials.job(plan, 1, WITHOUT)
    assert fresh.command[3:] == ("--tp", "1", "--seed", "1", "--knowledge", str(plan.knowledge), "--run-dir", str(plan.place / "1-without"), "--without-knowledge", "win")
    new_run(plan.place / "1-without")
    assert trials.job(plan, 1, WITHOUT).command[3:] == ("resume", str(plan.place / "1-without"))
    assert not trials.finished(plan.place / "1-without") and trials.read(plan).trials == ()


def test_the_command_line_refuses_before_it_runs_anything(tmp_path: Path, monkeypatch) -> None:
    from optimizer import seal
    from optimizer.cli import app

    monkeypatch.setattr(seal, "verify", lambda: None)  # whether this checkout is sealed is another test's business

    folder = book(tmp_path / "book", tmp_path)
    for words in (["--all", "win"], [], ["gone"], ["--all", "--out", str(tmp_path / "runs")]):
        done = CliRunner().invoke(app, ["knowledge", "ablate", *words, "--blueprint", str(folder)])
        assert isinstance(done.exception, AblationError), words
    assert "does not hold" in str(done.exception)  # the last one: accepted for the fake engine, asked of the real one
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_is_bound_to_its_cpus_and_one_that_fails_says_its_last_line(tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    said = "import os, time; time.sleep(0.3); print(sorted(os.sched_getaffinity(0)))"
    good = Job(1, WITH, tmp_path / "good", (sys.executable, "-c", said), frozenset({one}))
    trials.spawn(good)
    assert good.log.read_text().strip() == str([one])
    with pytest.raises(AblationError, match=r"seed 1, with: exit 3: no such engine"):
        trials.spawn(Job(1, WITH, tmp_path / "bad", (sys.executable, "-c", "print('no such engine'); raise SystemExit(3)")))
