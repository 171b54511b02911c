"""A run killed at any moment, by SIGKILL in a child process, goes on without losing or repeating anything."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run

from optimizer import state
from optimizer.confine.launch import LaunchError
from optimizer.ledger import Ledger
from optimizer.loop import Loop
from optimizer.measure import CandidateFailed, InfrastructureError
from optimizer.resume import reopen, weights_there
from optimizer.review.admit import admit
from optimizer.run import MODEL_CONFIG, Run, RunError, load
from optimizer.services import Interrupted
from optimizer.truth import weights
from optimizer.types import RejectReason

SCRIPT = [fake.WIN, fake.NO_OP, fake.one(fake.speed(500, was=700))]
ENDS = ("accepted", "rejected", "undecided", "parked")


def in_child(work) -> int:
    """Run `work` in a forked child; returns its exit status (-9: killed)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(run: Run, count: int, torn: bool = False) -> bool:
    """Go on with the run in a child that dies at its `count`-th call or ledger line. True when it died."""

    def work() -> None:
        left = count

        def strike(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        fakes = Fakes(run, SCRIPT, on_call=strike)
        write = Ledger._write

        def risky(ledger: Ledger, raw: bytes) -> None:
            strike("before a line")
            if torn and left <= 3:
                write(ledger, raw[: len(raw) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            write(ledger, raw)
            strike("after a line")

        Ledger._write = risky
        Loop(fakes.services(), run).go()

    status = in_child(work)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def story(run: Run) -> list:
    """What was decided, without anything that may differ between two runs."""
    lines = Ledger(run.dir / "ledger.jsonl").lines()
    return [
        (line["kind"], line["attempt"], line["data"].get("reason"), line["data"].get("ratio"))
        for line in lines
        if line["kind"] in ENDS
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    run = new_run(tmp_path_factory.mktemp("whole") / "run")
    Loop(Fakes(run, SCRIPT).services(), run).go()
    return run


def resumed(place: Path) -> Run:
    run = load(place)
    reopen(run, {"hash": "env"})
    Loop(Fakes(run, SCRIPT).services(), run).go()
    return run


def check_whole(run: Run, undisturbed: Run) -> None:
    assert Ledger(run.dir / "ledger.jsonl").verify() == []
    lines = run.ledger.lines()
    ends = [line["attempt"] for line in lines if line["kind"] in ENDS]
    assert ends == sorted(set(ends)), "an attempt ended twice"
    proposed = [(line["attempt"], line["data"]["member"]) for line in lines if line["kind"] == "proposed"]
    assert len(proposed) == len(set(proposed)), "an attempt was proposed twice"
    assert [a.number for a in state.attempts(lines)] == [1, 2, 3]
    pairs = [
        (line["data"]["stage"], line["data"]["key"], line["data"]["index"], line["incumbent_commit"])
        for line in lines
        if line["kind"] == "pair"
    ]
    assert len(pairs) == len(set(pairs)), "a pair was taken twice"
    assert [kind for kind, *_ in story(run)] == [kind for kind, *_ in story(undisturbed)]
    assert run.repo.tree_of(run.repo.incumbent()) == undisturbed.repo.tree_of(undisturbed.repo.incumbent())
    assert lines[-1]["kind"] == "finished"


def test_an_undisturbed_run_is_what_the_others_are_compared_with(undisturbed):
    kinds = [kind for kind, *_ in story(undisturbed)]
    assert kinds[::2] == ["accepted", "accepted"] and kinds[1] in ("rejected", "undecided")


@pytest.mark.parametrize("count", [1, 2, 4, 9, 14, 23, 33, 41, 52, 61, 72, 85, 101])
def test_a_kill_loses_no_finished_attempt_and_repeats_none(tmp_path, undisturbed, count):
    place = tmp_path / "run"
    new_run(place).ledger.close()
    assert killed_at(load(place), count), "choose a smaller count: the run was over before"
    check_whole(resumed(place), undisturbed)


def test_a_run_killed_again_and_again_still_ends_the_same(tmp_path, undisturbed):
    place = tmp_path / "run"
    new_run(place).ledger.close()
    for count in (17, 13, 21, 16):
        killed_at(load(place), count)
    run = resumed(place)
    check_whole(run, undisturbed)


def test_a_torn_last_line_is_dropped_and_written_anew(tmp_path, undisturbed):
    place = tmp_path / "run"
    new_run(place).ledger.close()
    assert killed_at(load(place), 24, torn=True)
    raw = (place / "ledger.jsonl").read_bytes()
    assert not raw.endswith(b"\n")
    check_whole(resumed(place), undisturbed)


def test_a_pair_in_flight_becomes_interrupted_and_finished_pairs_are_kept(tmp_path):
    place = tmp_path / "run"
    run = new_run(place)
    run.ledger.close()

    def work() -> None:
        mine = load(place)
        seen = 0

        def strike(what: str) -> None:
            nonlocal seen
            seen += what == "pair decide"
            if seen == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        Loop(Fakes(mine, SCRIPT, on_call=strike).services(), mine).go()

    assert in_child(work) == -signal.SIGKILL
    before = [line for line in Ledger(place / "ledger.jsonl").lines() if line["kind"] == "pair"]
    after = resumed(place)
    pairs = [line for line in after.ledger.lines() if line["kind"] == "pair" and line["attempt"] == 1]
    decide = [line["data"] for line in pairs if line["data"]["stage"] == "decide"]
    assert [p["discarded"] for p in decide[:2]] == [None, "interrupted"]
    assert decide[1]["a_us_per_token"] is None
    assert [line["hash"] for line in before] == [line["hash"] for line in after.ledger.lines() if line["kind"] == "pair"][: len(before)]


def test_a_second_process_cannot_write_the_same_run(tmp_path):
    from optimizer.ledger import LedgerBusy

    run = new_run(tmp_path / "run")
    other = load(run.dir)
    with pytest.raises(LedgerBusy):
        other.ledger.append("budget", None, {})


def test_ctrl_c_ends_after_the_present_step_and_the_run_can_go_on(tmp_path, undisturbed):
    from optimizer.services import Interrupted

    place = tmp_path / "run"
    run = new_run(place)

    def ask(what: str) -> None:
        run.stop_requested = run.stop_requested or what == "pair screen"

    with pytest.raises(Interrupted):
        Loop(Fakes(run, SCRIPT, on_call=ask).services(), run).go()
    screens = [x for x in run.ledger.lines() if x["kind"] == "pair" and x["data"]["stage"] == "screen"]
    assert len(screens) == 1 and screens[0]["data"]["discarded"] is None
    run.ledger.close()
    check_whole(resumed(place), undisturbed)


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("pair calibrate", InfrastructureError("the load generator is gone")),
        ("pair screen", InfrastructureError("the load generator is gone")),
        ("pair decide", CandidateFailed(RejectReason.CRASH, "exit status -15")),
        ("gate greedy full", LaunchError(RejectReason.BOOT, "ended before it was healthy")),
        ("pair headline", CandidateFailed(RejectReason.CRASH, "exit status -15")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_dies_together_with_the_run_is_nobodys_fault(at, error, tmp_path, undisturbed):
    """`systemctl stop` and `kill -- -PGID` signal every process: the engine and the clients end with the loop."""
    from optimizer.services import Interrupted

    place = tmp_path / "run"
    run = new_run(place)

    def die(what: str) -> None:
        if what == at:
            run.stop_requested = True
            raise error

    with pytest.raises(Interrupted):
        Loop(Fakes(run, SCRIPT, on_call=die).services(), run).go()
    ended = [line["kind"] for line in run.ledger.lines() if line["kind"] in ENDS or line["kind"] == "finished"]
    assert not ended or (at == "pair headline" and "finished" not in ended)
    run.ledger.close()
    check_whole(resumed(place), undisturbed)


def test_a_run_goes_on_although_the_users_folder_changed_or_vanished(tmp_path):
    engine = tmp_path / "mine"
    shutil.copytree(fake.ENGINE, engine, ignore=shutil.ignore_patterns("__pycache__"))
    run = new_run(tmp_path / "run", engine=engine)
    run.ledger.close()
    shutil.rmtree(engine)
    assert [kind for kind, *_ in story(resumed(run.dir))][::2] == ["accepted", "accepted"]


def test_a_parked_patch_that_a_person_admits_is_judged_when_the_run_is_resumed(tmp_path):
    place = tmp_path / "run"
    run = new_run(place)
    Loop(Fakes(run, [fake.WIN], lying_trace=True).services(), run).go()
    assert story(run)[0][:3] == ("parked", 1, "not_activated")
    with pytest.raises(RunError, match="not parked; parked: 1"):
        admit(run, 2, "me", "why not")
    assert "shrank" in admit(run, 1, "me", "the profiler hides it; read the code")
    with pytest.raises(RunError, match="admitted already"):
        admit(run, 1, "me", "again")
    run.ledger.close()
    again = load(place)
    reopen(again, {"hash": "env"})
    Loop(Fakes(again, [fake.WIN], lying_trace=True).services(), again).go()
    assert [row[:2] for row in story(again)] == [("parked", 1), ("accepted", 2)]
    proposed = [x["data"] for x in again.ledger.lines() if x["kind"] == "proposed"]
    assert [p["admits"] for p in proposed] == [None, 1]
    pairs = [x["data"]["stage"] for x in again.ledger.lines() if x["kind"] == "pair" and x["attempt"] == 2]
    assert pairs == [], "the same program against the same incumbent takes no new pairs"


def test_a_person_may_give_up_the_open_attempt_and_what_it_measured_stays(tmp_path):
    place = tmp_path / "run"
    run = new_run(place)
    with pytest.raises(Interrupted):
        Loop(Fakes(run, SCRIPT, on_call=lambda what: setattr(run, "stop_requested", what == "pair decide")).services(), run).go()
    pairs = [line for line in run.ledger.lines() if line["kind"] == "pair" and line["attempt"] == 1]
    run.ledger.close()
    again = load(place)
    with pytest.raises(RunError, match="--give-up: an empty reason"):
        reopen(again, {"hash": "env"}, give_up=" ")
    notes = reopen(again, {"hash": "env"}, give_up="its cause is another one")
    assert notes == ["attempt 1 was open and is given up"]
    Loop(Fakes(again, SCRIPT).services(), again).go()
    assert [row[:2] for row in story(again)][:2] == [("undecided", 1), ("rejected", 2)]
    end = next(line for line in again.ledger.lines() if line["kind"] == "undecided")
    assert end["data"] == {"stage": "decide", "reason": None, "detail": "given up by a person: its cause is another one"}
    assert [line for line in again.ledger.lines() if line["kind"] == "pair" and line["attempt"] == 1] == pairs
    assert [line["attempt"] for line in again.ledger.lines() if line["kind"] == "budget"][:2] == [1, 2], "its cost is entered"
    with pytest.raises(RunError, match=f"--give-up: no attempt of run {again.request.id} is open"):
        reopen(again, {"hash": "env"}, give_up="why")


def test_on_another_machine_random_weights_are_drawn_again_from_the_seed(repo, tmp_path):
    config = tmp_path / "config"
    config.mkdir()
    shutil.copyfile(repo / "engine" / "tiny_qwen3" / "config.json", config / "config.json")
    place = tmp_path / "run" / "weights" / "dummy"
    sha = weights.digest(weights.write_random(config, place, 5))
    run = new_run(tmp_path / "run", model_dir=place, weights_seed=5, weights_sha256=sha)
    shutil.copyfile(config / "config.json", run.dir / MODEL_CONFIG)
    assert weights_there(run) is None
    shutil.rmtree(place.parent)
    assert "seed 5" in str(weights_there(run)) and weights.digest(place) == sha
    shutil.rmtree(place.parent)
    (run.dir / MODEL_CONFIG).unlink()
    with pytest.raises(RunError, match="cannot be written there"):
        weights_there(run)


def test_other_weights_than_the_runs_are_refused(tmp_path):
    with pytest.raises(RunError, match="are not those of run"):
        weights_there(new_run(tmp_path / "run", weights_sha256="0" * 64))
