"""`optimize reproduce` on runs of the fake engine: what is applied, gated, timed and compared again, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loop_fakes import ENABLED_WIN, ENGINE, WEIGHTS, WIN, Fakes, new_run, one, speed
from typer.testing import CliRunner

from optimizer import cli, reproduce, start
from optimizer.loop import Loop
from optimizer.recorded import Incomplete, whole_copy
from optimizer.reproduce import Options, Ratio, ReproduceError, agree, weights_for
from optimizer.run import MODEL_CONFIG, Run, load
from optimizer.services import Services, View
from optimizer.truth import weights
from optimizer.types import GateResult, Pair, RejectReason
from optimizer.view import Quiet

SECOND = one(speed(500, was=700, title="faster still"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two accepted attempts (1000 to 700 to 500 microseconds a step), finished."""
    run = new_run(tmp_path_factory.mktemp("made") / "record", weights_sha256=weights.digest(WEIGHTS))
    Loop(Fakes(run, [WIN, SECOND]).services(), run).go()
    return run.dir


@pytest.fixture
def record(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy of it, to be changed at will. The seal of a checkout that is being worked on is not its matter."""
    monkeypatch.setattr(reproduce.seal, "verify", lambda: None)
    shutil.copytree(made, tmp_path / "record")
    return load(tmp_path / "record")


def fakes(change: Callable[[Services], Services] = lambda s: s) -> Any:
    @contextmanager
    def services(run: Run, view: View) -> Iterator[Services]:
        yield change(Fakes(run, noise=0.003).services())

    return services


def again(record: Run, attempt: int | None = None, change: Callable[[Services], Services] = lambda s: s, **more: Any) -> reproduce.Reproduced:
    options = Options(attempt, keep=record.dir.parent / "again", unsafe_no_sandbox=True, **more)
    return reproduce.reproduce(record, options, Quiet(), fakes(change))


def test_an_accepted_patch_is_applied_gated_and_timed_again_and_agrees(record):
    before = {p: p.read_bytes() for p in record.dir.rglob("*") if p.is_file()}
    found = again(record, 2)
    assert found.ok and found.agree and found.what == "attempt 2 (test)"
    assert found.here is not None and found.here.ratio == pytest.approx(500 / 700, rel=0.02)
    assert found.recorded is not None and found.recorded.ratio == pytest.approx(500 / 700, rel=0.02)
    assert [g.gate for g in found.gates] == ["scope", "greedy"] * 2 and len(found.applied) == 1
    assert before == {p: p.read_bytes() for p in record.dir.rglob("*") if p.is_file()}, "the record is only read"
    kept = json.loads((record.dir.parent / "again" / "reproduced.json").read_text())
    assert kept["ok"] and kept["weights"]["sha256"] == record.request.weights_sha256


def test_all_accepted_patches_are_the_first_engine_against_the_final_one(record):
    found = again(record)
    assert found.ok and found.here is not None and found.here.ratio == pytest.approx(0.5, rel=0.02)
    assert len(found.applied) == 2 and "all 2 accepted attempts" in reproduce.said(found)[0]
    assert [g.gate for g in found.gates] == ["scope", "greedy"] * 3, "quick gates of each commit, the others of the last"


def test_without_a_headline_the_record_is_the_product_of_its_confirmations(record):
    path = record.dir / "ledger.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"kind":"finished"' not in line))
    recorded = reproduce.arms_of(load(record.dir), None).recorded
    assert recorded is not None and recorded.ratio == pytest.approx(0.5, rel=0.02)
    assert recorded.ci95[0] < recorded.ratio < recorded.ci95[1]


def test_a_series_is_reproduced_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce.seal, "verify", lambda: None)
    run = new_run(tmp_path / "record", weights_sha256=weights.digest(WEIGHTS))
    Loop(Fakes(run, [ENABLED_WIN]).services(), run).go()
    found = again(load(run.dir), 1)
    assert found.ok and len(found.applied) == 2


def test_another_ratio_than_recorded_does_not_agree(record):
    def level(do: Services) -> Services:
        def pair(*args: Any) -> Pair:
            taken = do.run_pair(*args)
            return replace(taken, b_us_per_token=(taken.a_us_per_token or 0.0) * (1 + taken.index / 1000))

        return replace(do, run_pair=pair)

    found = again(record, 1, level)
    assert found.agree is False and not found.ok
    assert any("do NOT agree" in line and "no gain is shown" in line for line in reproduce.said(found))


def test_an_interval_that_is_too_wide_to_show_the_gain_reproduces_nothing(record):
    def noisy(do: Services) -> Services:
        def pair(*args: Any) -> Pair:
            taken = do.run_pair(*args)
            return replace(taken, b_us_per_token=(taken.b_us_per_token or 0.0) * (3.0 if taken.index % 2 else 0.6))

        return replace(do, run_pair=pair)

    found = again(record, 1, noisy)
    assert found.agree and not found.ok and any("too wide to show the gain" in line for line in reproduce.said(found))


def test_a_gate_that_fails_here_ends_it_before_anything_is_timed(record):
    def broken(do: Services) -> Services:
        def gates(*args: Any) -> Iterator[GateResult]:
            yield GateResult("greedy", "G08", False, RejectReason.WRONG_TOKENS, "token 3")

        return replace(do, gates=gates)

    found = again(record, 1, broken)
    assert not found.ok and found.here is None and len(found.gates) == 1
    assert "gate greedy FAILED: token 3" in reproduce.said(found)


def test_an_engine_that_breaks_while_it_is_timed_is_no_number(record):
    from optimizer.measure import CandidateFailed

    def crash(do: Services) -> Services:
        def pair(*args: Any) -> Pair:
            raise CandidateFailed(RejectReason.CRASH, "died")

        return replace(do, run_pair=pair)

    found = again(record, 1, crash)
    assert not found.ok and found.here is None and found.gates[-1].detail == "died"


def test_a_patch_that_is_not_the_commit_is_refused(record):
    file = record.attempt_dir(1) / "patch.json"
    file.write_text(file.read_text().replace("STEP_US = 700", "STEP_US = 699"))
    with pytest.raises(ReproduceError, match="other sources than its commit holds"):
        again(record, 1)


def test_what_was_not_accepted_is_named_with_what_was(record):
    with pytest.raises(ReproduceError, match="accepted were: 1, 2"):
        again(record, 7)


def test_a_machine_without_the_device_is_told_so_before_anything_starts(record):
    request = json.loads((record.dir / "run.json").read_text())
    request |= {"device": "cuda", "environment": {"hash": "env", "gpus": [{"name": "NVIDIA H200"}]}}
    (record.dir / "run.json").write_text(json.dumps(request))
    with pytest.raises(ReproduceError, match="NVIDIA H200 with TP=1; this machine shows 0 NVIDIA GPUs"):
        again(load(record.dir), 1)
    assert not (record.dir.parent / "again").exists()


def test_the_committed_record_is_read_as_it_is(repo, tmp_path):
    record = load(repo / "reports" / "gallery" / "h200-tp1")
    copy = whole_copy(record, tmp_path / "repo.git", tmp_path / "trees")
    for attempt in (1, 2, 3, 4, None):
        arms = reproduce.arms_of(record, attempt)
        assert reproduce.reapply(record, copy, arms) and arms.recorded is not None
    whole = reproduce.arms_of(record, None).recorded
    assert whole is not None and whole.ratio == pytest.approx(0.0810, rel=0.01)
    tree = copy.tree(reproduce.arms_of(record, None).after, "final")
    assert (tree / "engine" / "tiny_qwen3" / "model.safetensors").is_file(), "the blob it leaves out came from this checkout"


def test_a_file_that_the_record_leaves_out_and_is_nowhere_here_is_an_error(tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(ENGINE, engine)
    (engine / "table.txt").write_text("a" * 100)
    run = new_run(tmp_path / "record", engine=engine)
    sha = run.repo.git("rev-parse", f"{run.base}:table.txt").strip()
    (run.repo.git_dir / "objects" / sha[:2] / sha[2:]).unlink()
    assert whole_copy(run, tmp_path / "copy.git", tmp_path / "trees").show(run.base, "table.txt") == "a" * 100
    (engine / "table.txt").write_text("changed since")
    with pytest.raises(Incomplete, match=sha[:12]):
        whole_copy(run, tmp_path / "copy.git", tmp_path / "trees")


def _seeded(record: Run, repo: Path, tmp_path: Path) -> Run:
    """The same record, as if of random weights that are not on this machine."""
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(repo / "engine" / "tiny_qwen3" / "config.json", config)
    sha = weights.digest(weights.write_random(config, tmp_path / "there", 5))
    dimensions = {"hidden_size": json.loads((config / "config.json").read_text())["hidden_size"]}
    shutil.copy(config / "config.json", record.dir / MODEL_CONFIG)
    record.request = replace(record.request, model_dir=tmp_path / "gone", weights_seed=5, weights_sha256=sha, model=dimensions)
    return record


def test_a_run_with_random_weights_keeps_what_they_follow_from(repo, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(repo / "engine" / "tiny_qwen3" / "config.json", model)
    made, seed = start._weights("auto", model, tmp_path / "run", 5)
    assert seed == 5 and (tmp_path / "run" / MODEL_CONFIG).read_bytes() == (made / "config.json").read_bytes()
    assert start._weights("auto", repo / "engine" / "tiny_qwen3", tmp_path / "other", 5)[1] is None and not (tmp_path / "other").exists()


def test_random_weights_are_written_again_from_the_seed_and_the_kept_config(record, repo, tmp_path):
    found = weights_for(_seeded(record, repo, tmp_path), None, tmp_path / "again")
    assert found.sha256 == record.request.weights_sha256 and found.seed == 5
    assert "random weights of seed 5" in found.words and "the record's own" in found.words


def test_a_real_model_is_taken_where_it_is_given_and_said_to_be_another(record, repo, tmp_path):
    seeded = _seeded(record, repo, tmp_path)
    found = weights_for(seeded, repo / "engine" / "tiny_qwen3", tmp_path / "again")
    assert found.seed is None and "real weights" in found.words and "not the record's" in found.words
    config = json.loads((repo / "engine" / "tiny_qwen3" / "config.json").read_text()) | {"hidden_size": 7}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReproduceError, match="hidden_size is 7"):
        weights_for(seeded, other, tmp_path / "again")


def test_weights_that_cannot_be_had_are_asked_for(record, repo, tmp_path):
    seeded = _seeded(record, repo, tmp_path)
    (seeded.dir / MODEL_CONFIG).unlink()
    with pytest.raises(ReproduceError, match=r"config\.json \(random weights follow from seed 5\)"):
        weights_for(seeded, None, tmp_path / "again")
    with pytest.raises(ReproduceError, match=r"no config\.json there"):
        weights_for(seeded, tmp_path, tmp_path / "again")


def test_intervals_that_do_not_meet_do_not_agree():
    def ratio(middle: float, half: float) -> Ratio:
        return Ratio(middle, (middle * math.exp(-half), middle * math.exp(half)), 6)

    assert agree(ratio(0.5, 0.05), ratio(0.52, 0.05)) and not agree(ratio(0.5, 0.05), ratio(0.6, 0.05))


def test_nothing_is_added_beside_a_record_that_lies_elsewhere(record: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []

    def refuse(run: Run, options: Options, view: View) -> None:
        asked.append(options)
        raise ReproduceError("enough")

    monkeypatch.setattr(reproduce, "reproduce", refuse)
    runs = tmp_path / "runs"
    for more in ([], ["--keep", str(tmp_path / "here")]):
        assert CliRunner().invoke(cli.app, ["reproduce", str(record.dir), "--runs", str(runs), *more]).exit_code
    assert asked[0].keep is not None and asked[0].keep.parent == runs and "-again-" in asked[0].keep.name
    assert asked[1].keep == tmp_path / "here"
