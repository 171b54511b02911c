"""The loop on the fake engine: what is accepted, what is stopped, and for which reason."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run

from optimizer.ledger import Ledger
from optimizer.loop import Loop
from optimizer.run import Goal, Limits
from optimizer.services import NoProposal
from optimizer.types import RejectReason


def go(tmp_path: Path, script, limits: Limits | None = None, sealed: bool = False, **fields):
    run = new_run(tmp_path / "run", limits, **fields)
    fakes = Fakes(run, script, sealed=sealed)
    why = Loop(fakes.services(), run).go()
    return run, fakes, why


def verdicts(run) -> list[tuple[str, str | None]]:
    ends = ("accepted", "rejected", "undecided", "parked")
    return [(line["kind"], line["data"].get("reason")) for line in run.ledger.lines() if line["kind"] in ends]


def test_a_real_win_is_accepted_committed_and_measured_as_a_headline(tmp_path):
    run, _, why = go(tmp_path, [fake.WIN])
    assert verdicts(run) == [("accepted", None)]
    assert "nothing left" in why
    accepted = next(line for line in run.ledger.lines() if line["kind"] == "accepted")
    trailers = run.repo.trailers(accepted["data"]["commit"])
    assert trailers["Attempt"] == "1" and trailers["Finding"] == "host-reads"
    assert trailers["Gates-digest"] == "digest-of-seal"
    confirmed = next(line for line in run.ledger.lines() if line["kind"] == "confirmed")
    assert trailers["Ledger-hash"] == confirmed["hash"]
    assert accepted["data"]["ratio"] == pytest.approx(0.7, rel=0.02)
    assert accepted["data"]["traced_us"] == pytest.approx(300)
    assert accepted["data"]["measured_us"] == pytest.approx(300, rel=0.05)
    assert run.repo.show(run.repo.incumbent(), "model.py").count("STEP_US = 700") == 1
    finished = run.ledger.lines()[-1]
    assert finished["kind"] == "finished"
    assert finished["data"]["headline"]["ratio"] == pytest.approx(0.7, rel=0.02)


def test_the_ledger_tells_the_attempt_in_the_order_of_the_sentence(tmp_path):
    run, _, _ = go(tmp_path, [fake.WIN])
    order = [k for k in dict.fromkeys(fake.kinds(run)) if k not in ("pair", "gate", "budget")]
    assert order == [
        "run_started", "captured", "calibrated", "proposed", "screened", "decided", "confirmed", "accepted",
        "knowledge_proposed", "finished",
    ]  # fmt: skip


@pytest.fixture
def short_deadlines(monkeypatch):
    """A seal that holds whatever is being worked on, and a client that does not wait a minute for a hang."""
    from optimizer import seal
    from optimizer.traffic.client import Client

    complete = Client.complete
    monkeypatch.setattr(seal, "verify", lambda: None)
    monkeypatch.setattr(seal, "digest", lambda: "digest-of-seal")
    monkeypatch.setattr(Client, "complete", lambda self, requests, deadline_s: complete(self, requests, min(deadline_s, 0.7)))


@pytest.mark.parametrize(
    ("series", "reason", "gate"),
    [
        (fake.WRONG_TOKENS, RejectReason.WRONG_TOKENS, "greedy"),
        (fake.HANG, RejectReason.HANG, ""),
        (fake.CRASH, RejectReason.BOOT, "boot"),
        (fake.GATE_EDIT, RejectReason.SCOPE, "scope"),
    ],
    ids=["wrong tokens", "hang", "crash at start", "gate edit"],
)
def test_a_bad_patch_is_stopped_by_the_sealed_quick_gates_for_its_own_reason(tmp_path, short_deadlines, series, reason, gate):
    run, _, _ = go(tmp_path, [series], sealed=True)
    assert verdicts(run) == [("rejected", reason)]
    end = next(line for line in run.ledger.lines() if line["kind"] == "rejected")
    assert end["data"]["stage"] == "quick" and end["data"]["detail"].startswith(gate)
    assert not [line for line in run.ledger.lines() if line["kind"] == "pair" and line["attempt"] == 1]


def test_a_good_patch_passes_the_sealed_quick_gates(tmp_path, short_deadlines):
    run, _, _ = go(tmp_path, [fake.WIN], sealed=True)
    assert verdicts(run) == [("accepted", None)]
    passed = [g["data"]["gate"] for g in run.ledger.lines() if g["kind"] == "gate" and g["data"]["stage"] == "quick"]
    assert {"scope", "policy", "boot", "greedy"} <= set(passed)


def test_a_patch_without_effect_is_not_accepted(tmp_path):
    run, _, _ = go(tmp_path, [fake.NO_OP])
    assert verdicts(run)[0][0] in ("rejected", "undecided")
    assert run.repo.incumbent() == run.base


def test_an_edit_that_does_not_match_is_declined_with_the_nearest_lines(tmp_path):
    run, _, _ = go(tmp_path, [fake.one(fake.edit("STEP_US = 999\n", "STEP_US = 1\n")), fake.WIN])
    assert verdicts(run) == [("rejected", "declined"), ("accepted", None)]
    assert "STEP_US = 1000" in next(x for x in run.ledger.lines() if x["kind"] == "rejected")["data"]["detail"]


def test_a_win_that_no_trace_explains_is_parked_and_the_run_goes_on(tmp_path):
    run = new_run(tmp_path / "run")
    fakes = Fakes(run, [fake.WIN, fake.NO_OP], lying_trace=True)
    Loop(fakes.services(), run).go()
    assert verdicts(run)[0] == ("parked", "not_activated")
    assert len(verdicts(run)) == 2
    assert run.repo.incumbent() == run.base


def test_a_series_is_judged_at_its_end_and_becomes_a_commit_each(tmp_path):
    run, _, _ = go(tmp_path, [fake.ENABLED_WIN])
    assert verdicts(run) == [("accepted", None)]
    commits = run.repo.log(run.base, run.repo.incumbent())
    assert [run.repo.trailers(c)["Series"] for c in commits] == ["1/2", "2/2"]
    proposed = [line["data"]["member"] for line in run.ledger.lines() if line["kind"] == "proposed"]
    assert proposed == [0, 1]


def test_later_programs_of_a_series_are_compiled_beside_gates_and_never_beside_a_pair(tmp_path):
    run, diary = new_run(tmp_path / "run"), []

    @contextmanager
    def compiling(specs):
        diary.append([(spec.tree / "model.py").read_text() for spec in specs])
        yield
        diary.append("over")

    services = Fakes(run, [fake.ENABLED_WIN]).services()
    pair = services.run_pair
    noted = replace(services, compiling=compiling, run_pair=lambda *a: diary.append("pair") or pair(*a))
    Loop(noted, run).go()
    end = run.repo.sources(run.repo.incumbent(), ("**/*.py",))["model.py"]
    judged = [what for what in diary if what != "pair"]
    assert judged == [[end], "over"] * 2, "the first program is compiled by its own gates"
    assert all(diary[at + 1] == "over" for at, what in enumerate(diary) if what == [end]), diary


def test_an_enabler_that_is_plainly_faster_needs_one_pair_and_a_neutral_one_two(tmp_path):
    for name, first, pairs in (("faster", 300, 1), ("neutral", 1000, 2)):
        enabler = fake.ENABLED_WIN.patches[0] if first == 1000 else fake.speed(first, title="enabler")
        series = fake.Series((enabler, fake.speed(200, was=first, title="pays")), "scripted")
        run, _, _ = go(tmp_path / name, [series])
        assert verdicts(run) == [("accepted", None)]
        screened = [line["data"] for line in run.ledger.lines() if line["kind"] == "screened"]
        assert screened[0]["member"] == 0 and screened[0]["pairs"] == pairs


def test_no_engine_of_a_series_is_started_before_the_texts_of_all_may_run(tmp_path):
    """A line of 233 characters in the third patch was found after the engines of two had been started and asked."""
    series = fake.Series((*fake.ENABLED_WIN.patches[:1], *fake.GATE_EDIT.patches), "scripted")
    run, _, _ = go(tmp_path, [series])
    end = next(line for line in run.ledger.lines() if line["kind"] == "rejected")
    assert (end["data"]["reason"], end["data"]["stage"]) == ("scope", "quick")
    gates = [line["data"] for line in run.ledger.lines() if line["kind"] == "gate"]
    assert [(g["gate"], g["member"], g["passed"]) for g in gates] == [("scope", 1, False)]


def test_a_series_whose_enabler_makes_it_slower_is_stopped(tmp_path):
    slow = fake.Series((fake.speed(1300, title="slower"), fake.speed(700, was=1300, title="pays")), "scripted")
    run, _, _ = go(tmp_path, [slow])
    assert verdicts(run)[0][0] == "rejected"
    end = next(line for line in run.ledger.lines() if line["kind"] == "rejected")
    assert end["data"]["reason"] == "guard" and "patch 1 of the series" in end["data"]["detail"]


class _HiccupFirst(Fakes):
    """The first screening pair of every patch meets a busy machine in arm b."""

    def _noise(self, stage: str, index: int, arm: str) -> float:
        busy = stage == "screen" and index == 0 and arm == "b"
        return super()._noise(stage, index, arm) * (1.05 if busy else 1.0)


def test_an_enabler_that_few_pairs_make_look_worse_gets_more_of_them(tmp_path):
    run = new_run(tmp_path / "run")
    fakes = _HiccupFirst(run, [fake.ENABLED_WIN])
    Loop(fakes.services(), run).go()
    screened = next(line for line in run.ledger.lines() if line["kind"] == "screened")
    assert screened["data"]["member"] == 0 and screened["data"]["passed"] and screened["data"]["pairs"] > 2
    assert verdicts(run) == [("accepted", None)]


def test_a_retry_of_the_same_program_takes_no_new_pairs_and_gets_the_same_verdict(tmp_path):
    commented = fake.one(
        fake.Patch(
            (*fake.NO_OP.patches[0].edits, fake.Edit("model.py", "STEP_US = 1000\n", "STEP_US = 1000  # again\n")),
            ("host-reads",), "rename", 50.0, title="the same program in other words",
        )
    )  # fmt: skip
    run, _, _ = go(tmp_path, [fake.NO_OP, commented])
    first, second = verdicts(run)
    assert first == second
    pairs = [line["attempt"] for line in run.ledger.lines() if line["kind"] == "pair" and line["attempt"]]
    assert 1 in pairs and 2 not in pairs


def test_two_wins_add_up_and_the_second_builds_on_the_first(tmp_path):
    run, _, _ = go(tmp_path, [fake.WIN, fake.one(fake.speed(500, was=700))])
    assert verdicts(run) == [("accepted", None)] * 2
    headline = run.ledger.lines()[-1]["data"]["headline"]
    assert headline["ratio"] == pytest.approx(0.5, rel=0.02)
    assert Ledger(run.dir / "ledger.jsonl").verify() == []


def test_the_goal_ends_the_run(tmp_path):
    _, fakes, why = go(tmp_path, [fake.WIN, fake.one(fake.speed(500, was=700))], goal=Goal("factor", 1.3))
    assert "goal reached" in why
    assert fakes.asked == [1]


def test_a_proposer_that_may_still_find_something_is_asked_again_but_not_for_ever(tmp_path):
    run = new_run(tmp_path / "run")
    fakes = Fakes(run)
    answers = [NoProposal("not this time", final=False, usd=0.1), fake.WIN, *[NoProposal("tired", final=False)] * 9]
    services = replace(fakes.services(), propose=lambda question: answers.pop(0))
    why = Loop(services, run).go()
    assert "tired" in why and len(answers) == 6
    assert verdicts(run) == [("accepted", None)]
    assert run.ledger.lines()[-1]["data"]["usd_total"] == pytest.approx(0.1)
