"""At the end of a run, hunks of an accepted patch that buy nothing are taken out of it."""

from __future__ import annotations

from dataclasses import replace

import loop_fakes as fake
from loop_fakes import Fakes, new_run

from optimizer.loop import Loop
from optimizer.minimise import hunks_of
from optimizer.run import Limits
from optimizer.shrink import active
from optimizer.types import Edit, GateResult, RejectReason

MIXED = fake.one(
    replace(
        fake.speed(700, title="faster, and a rename"),
        edits=(
            Edit("model.py", "STEP_US = 1000\n", "STEP_US = 700\n"),
            Edit("model.py", "    ids = list(prompt)\n", "    # a comment that explains\n    ids = list(prompt)\n"),
            Edit("model.py", "digest = hashlib.sha256(weights", "mixed = hashlib.sha256(weights"),
            Edit("model.py", "int.from_bytes(digest[:4]", "int.from_bytes(mixed[:4]"),
        ),
    )
)
SECOND = fake.speed(500, was=700, title="second")


def go(tmp_path, script, limits=None, gates=None):
    run = new_run(tmp_path / "run", limits)
    fakes = Fakes(run, script)
    services = fakes.services()
    Loop(replace(services, gates=gates or services.gates), run).go()
    return run


def test_a_hunk_that_buys_nothing_is_dropped_and_later_patches_stay(tmp_path):
    run = go(tmp_path, [MIXED, fake.one(SECOND)])
    text = run.repo.show(run.repo.incumbent(), "model.py")
    assert "STEP_US = 500" in text and "mixed" not in text
    assert "# a comment that explains" in text  # changes no program: it stays with what it explains
    commits = run.repo.log(run.base, run.repo.incumbent())
    assert [run.repo.message(c).partition("\n")[0] for c in commits] == ["faster, and a rename", "second"]
    assert run.repo.trailers(commits[0])["Attempt"] == "1"
    line = next(x["data"] for x in run.ledger.lines() if x["kind"] == "decided" and "hunks" in x["data"])
    assert line["kept"] < line["hunks"] and line["incumbent"] == run.repo.incumbent()


def test_a_smaller_patch_that_fails_a_gate_does_not_take_its_place(tmp_path):
    run = new_run(tmp_path / "run")
    real = Fakes(run, [MIXED]).services()

    def gates(stage, candidate, incumbent, base, commit):
        if candidate.label == "smaller":
            yield GateResult("greedy", "G08", False, RejectReason.WRONG_TOKENS, "token 0", 1.0)
            return
        yield from real.gates(stage, candidate, incumbent, base, commit)

    Loop(replace(real, gates=gates), run).go()
    assert "mixed" in run.repo.show(run.repo.incumbent(), "model.py")


def test_nothing_is_shrunk_without_time_for_it(tmp_path):
    run = go(tmp_path, [MIXED], Limits(wall_minutes=3))
    assert not [x for x in run.ledger.lines() if x["kind"] == "decided" and "hunks" in x["data"]]


def test_comments_and_layout_are_told_from_changes():
    before = {"a.py": "x = 1\n\n\ny = 2\n\n\nz = 3\n"}
    after = {"a.py": "x = 10\n\n\n# why\ny = 2\n\n\nz =  3\n"}
    live, quiet = active(before, hunks_of(before, after))
    assert [h.lines for h in live] == [("x = 10\n",)] and len(quiet) == 2
