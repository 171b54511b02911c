"""Budgets: nothing is started that would not fit, and each limit ends the run under its own name."""

from __future__ import annotations

import json

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run

from optimizer import budget
from optimizer.loop import Loop
from optimizer.run import Limits
from optimizer.targets import PROTOCOLS
from optimizer.types import Series

MANY = [fake.NO_OP, *(fake.one(fake.edit("HOST_READS = 4\n", f"HOST_READS = {n}\n", title=f"reads {n}")) for n in range(5, 12))]


def go(tmp_path, script, limits, **fields):
    run = new_run(tmp_path / "run", limits)
    fakes = Fakes(run, script, **fields)
    return run, fakes, Loop(fakes.services(), run).go()


def count(run, kind: str) -> int:
    return sum(1 for line in run.ledger.lines() if line["kind"] == kind)


def test_attempts_are_counted(tmp_path):
    run, fakes, why = go(tmp_path, MANY, Limits(attempts=2))
    assert why == "2 of 2 attempts made" and fakes.asked == [1, 2]
    assert count(run, "finished") == 1


def test_consecutive_rejections_end_the_run_and_a_win_starts_the_count_anew(tmp_path):
    script = [fake.NO_OP, fake.WIN, *(fake.one(fake.edit("HOST_READS = 4\n", f"HOST_READS = {n}\n")) for n in (5, 6, 7))]
    run, _, why = go(tmp_path, script, Limits(consecutive_rejections=2))
    assert why == "2 attempts in a row brought nothing"
    assert count(run, "accepted") == 1 and count(run, "proposed") == 4


def test_money_is_counted_and_caps_the_run(tmp_path):
    dear = [Series(series.patches, "scripted", usd=0.6) for series in MANY]
    run, fakes, why = go(tmp_path, dear, Limits(usd=1.0))
    assert why == "1.20 of 1.00 USD spent" and fakes.asked == [1, 2]
    assert run.ledger.lines()[-1]["data"]["usd_total"] == pytest.approx(1.2)


def test_no_attempt_is_started_that_would_not_fit_by_measured_cost(tmp_path):
    _, fakes, why = go(tmp_path, MANY, Limits(wall_minutes=5), pair_s=20.0)
    assert "an attempt takes" in why
    used = fakes.clock.now
    assert used <= 5 * 60, "the budget was overrun"
    need = float(why.split("takes ")[1].split(" s")[0])
    assert used + need > 5 * 60 - 75, "an attempt that would have fitted was not started"


def test_an_attempt_that_runs_over_is_stopped_between_two_pairs_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(budget.Budget, "attempt_s", lambda self: 0.0)
    run, fakes, _ = go(tmp_path, [fake.WIN], Limits(wall_minutes=2), pair_s=15.0)
    end = next(line for line in run.ledger.lines() if line["kind"] == "undecided")
    assert end["data"]["reason"] == "no_budget"
    assert fakes.clock.now <= 120


def test_time_for_the_headline_is_set_aside(tmp_path):
    run, fakes, _ = go(tmp_path, [fake.WIN, *MANY], Limits(wall_minutes=8), pair_s=15.0)
    headline = run.ledger.lines()[-1]["data"]["headline"]
    assert headline["pairs"] == headline["planned"] and headline["short"] is None
    assert fakes.clock.now <= 8 * 60


def test_a_headline_that_is_cut_short_says_so(tmp_path, monkeypatch):
    run = new_run(tmp_path / "run", Limits(wall_minutes=10))
    fakes = Fakes(run, [fake.WIN], pair_s=10.0)
    fakes.on_call = lambda what: setattr(fakes, "pair_s", 80.0) if what == "pair headline" else None
    Loop(fakes.services(), run).go()
    monkeypatch.undo()
    headline = run.ledger.lines()[-1]["data"]["headline"]
    assert headline["pairs"] >= 1
    assert headline["pairs"] == headline["planned"] or headline["short"] == "the time set aside was spent"


def test_gpu_minutes_count_every_card(tmp_path):
    run = new_run(tmp_path / "run", Limits(gpu_minutes=10))
    fakes = Fakes(run, MANY)
    services = fakes.services()
    services.budget.gpus = 4
    why = Loop(services, run).go()
    assert "GPU minutes spent" in why


def test_wall_time_of_earlier_processes_counts(tmp_path):
    run = new_run(tmp_path / "run", Limits(wall_minutes=10))
    services = Fakes(run, MANY).services()
    services.budget.earlier_s = 580.0
    why = Loop(services, run).go()
    assert "an attempt takes" in why and count(run, "proposed") == 0


def test_time_in_which_no_process_worked_is_not_spent():
    from optimizer.state import wall_s

    def line(kind: str, minute: int, **data):
        return {"kind": kind, "t_utc": f"2026-01-01T00:{minute:02d}:00.000+00:00", "data": data}

    lines = [
        line("run_started", 0),
        line("pair", 2),
        line("pair", 30, discarded="interrupted"),
        line("resumed", 30),
        line("pair", 33),
        line("resumed", 50),
    ]
    assert wall_s(lines) == (2 + 3) * 60


def test_a_review_days_later_is_no_working_time():
    from optimizer.state import wall_s

    def line(kind: str, at: str) -> dict:
        return {"kind": kind, "t_utc": f"2026-01-{at}:00.000+00:00", "data": {}}

    lines = [line("run_started", "01T10:00"), line("finished", "01T10:05"), line("reviewed", "09T08:00")]
    assert wall_s(lines) == 5 * 60


@pytest.mark.parametrize("record", ["h200-tp1", "h200-tp2"])
def test_a_dear_first_attempt_does_not_speak_for_all_after_it(record, repo):
    """Three patches in a series: 220 s were said of attempts that took 140, and a run ended with time for one more."""
    lines = [json.loads(text) for text in (repo / "reports/gallery" / record / "ledger.jsonl").read_text().splitlines()]
    took = {line["attempt"]: line["data"]["attempt_s"] for line in lines if line["kind"] == "budget"}
    accepted = [line["attempt"] for line in lines if line["kind"] == "accepted"]
    for number in accepted[-2:]:
        before = lines[: next(n for n, line in enumerate(lines) if line["kind"] == "proposed" and line["attempt"] == number)]
        said = budget.Budget(Limits(), PROTOCOLS["quick"], lambda before=before: before, lambda: 0.0).attempt_s()
        assert said < 1.5 * took[number]
