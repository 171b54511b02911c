"""The headline's lower bound: measured before the first candidate, kept by the ledger, said at the end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run

from optimizer import summary
from optimizer.gates.model_math import Model
from optimizer.loop import Loop

SHAPE = {"intermediate_size": 16, "num_attention_heads": 2, "head_dim": 4}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    place = shutil.copytree(fake.WEIGHTS, tmp_path / "weights")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **SHAPE}))
    return place


def test_the_bound_is_the_weights_over_the_bandwidth_and_is_measured_once(tmp_path: Path, weights: Path) -> None:
    asked: list[int] = []

    def bandwidth(size: int) -> float:
        asked.append(size)
        return 2e9

    run = new_run(tmp_path / "run", model_dir=weights)
    Loop(replace(Fakes(run, [fake.one(fake.speed(500))]).services(), bandwidth=bandwidth), run).go()
    size = 4 * (2 * (8 * (2 * 2 * 4 + 2 * 2 * 4) + 3 * 8 * 16) + 8 * 512)  # float32: two layers and the head
    assert asked == [size] == [Model.of(weights).pass_bytes(4)]
    calibrated = [line["data"] for line in run.ledger.lines() if line["kind"] == "calibrated"]
    assert len(calibrated) == 2  # the step became much faster, so the noise was measured again, and the bound was not
    assert calibrated[0]["bound_us_per_token"] == pytest.approx(size / 2e9 * 1e6) and "bound_us_per_token" not in calibrated[1]
    finished = run.ledger.lines()[-1]["data"]
    assert finished["bound_us_per_token"] == calibrated[0]["bound_us_per_token"]
    assert f"{1e6 / finished['bound_us_per_token']:,.0f} tok/s here" in summary.total(run.ledger.lines())


def test_without_anything_to_measure_with_there_is_none(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    Loop(Fakes(run, []).services(), run).go()
    assert run.ledger.lines()[-1]["data"]["bound_us_per_token"] is None
    other = new_run(tmp_path / "other")  # weights whose config does not say what a pass reads
    Loop(replace(Fakes(other, []).services(), bandwidth=lambda size: 1e9), other).go()
    assert other.ledger.lines()[-1]["data"]["bound_us_per_token"] is None
