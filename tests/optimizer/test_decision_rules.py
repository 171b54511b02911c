"""Simulated sessions of our own rules: how often nothing is accepted for something, and what is seen of real gains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import decision_rules, noise
from optimizer.targets import PROTOCOLS

SESSIONS = 300  # of 30 candidates


@pytest.mark.parametrize("name", list(noise.MODELS))
@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_at_most_one_session_in_a_hundred_accepts_a_patch_that_does_nothing(protocol, name):
    source = noise.MODELS[name]
    row = decision_rules.simulate(PROTOCOLS[protocol], name, source, source, "cuda", 4, SESSIONS)
    assert row.session_false_accept <= 0.02  # the goal is 0.01; 300 sessions cannot tell it from 0.02
    assert row.false_accept <= 0.0005


def test_three_percent_is_seen_on_a_quiet_machine():
    quiet = noise.MODELS["quiet"]
    row = decision_rules.simulate(PROTOCOLS["full"], "quiet", quiet, quiet, "cuda", 4, SESSIONS)
    assert row.power["0.03"] >= 0.9 and row.pairs_at_zero < 5


def test_quick_sees_what_a_first_version_leaves_lying_about():
    noisy = noise.MODELS["noisy"]
    row = decision_rules.simulate(PROTOCOLS["quick"], "noisy", noisy, noisy, "cpu", 4, SESSIONS)
    assert row.power["0.20"] >= 0.7 and row.power["1.00"] >= 0.99 and row.pairs["1.00"] < 6


def test_a_machine_that_gets_louder_after_its_calibration_is_survived():
    row = decision_rules.simulate(
        PROTOCOLS["quick"], "louder", noise.MODELS["oversubscribed"], noise.MODELS["typical"], "cpu", 4, SESSIONS
    )
    assert row.false_accept <= 0.005


def test_recorded_noise_is_drawn_in_runs_and_has_no_favourite_arm(tmp_path):
    path = tmp_path / "noise.json"
    path.write_text(json.dumps({"schema": 1, "series": [{"name": "here", "log_ratios": [0.1, 0.2, 0.3, 0.4, 0.5]}]}))
    source = noise.recorded(path)["here"]
    drawn = source.gains(4000, 7, np.random.default_rng(1))
    assert drawn.shape == (4000, 7) and abs(drawn.mean()) < 0.01
    assert set(np.round(np.abs(drawn), 3).ravel()) == {0.1, 0.2, 0.3, 0.4, 0.5}
    steps = np.round(np.abs(drawn[:, 1]) - np.abs(drawn[:, 0]), 3)
    assert set(steps) == {0.1, -0.4}  # neighbours stay neighbours, round the end
    assert noise.recorded(tmp_path / "absent.json") == {}


def test_the_last_line_is_the_summary(capsys):
    decision_rules.main(["--protocol", "full", "--sessions", "20"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"session_false_accept", "power_at_3pct_quiet", "rows"} <= last.keys()
