"""The record of a run on an H200: it verifies, and its report says what was measured and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer import seal
from optimizer.verify import verify
from reports import run_data, run_page
from reports.text import micro

RECORD = Path(__file__).resolve().parents[2] / "reports" / "gallery" / "h200-tp1"


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    return [json.loads(text) for text in (RECORD / "ledger.jsonl").read_text().splitlines()]


def test_nothing_in_it_fails_to_verify(monkeypatch) -> None:
    monkeypatch.setattr(seal, "verify", lambda: None)  # whether this checkout is sealed is another test's business
    found = {check.what: check.ok for check in verify(RECORD)}
    assert not [what for what, ok in found.items() if ok is False]
    assert found["ledger chain"] and found["attempt 2"] and found["attempt 3"] and found["repository"]


def test_before_is_the_first_engine_although_the_run_was_calibrated_again_later(lines) -> None:
    """The second calibration is of an engine ten times as fast; its pairs once were taken for the first engine's too."""
    calibrated = [n for n, line in enumerate(lines) if line["kind"] == "calibrated"]
    accepted = next(n for n, line in enumerate(lines) if line["kind"] == "accepted")
    assert len(calibrated) == 2 and calibrated[0] < accepted < calibrated[1]
    run = run_data.read(RECORD)
    first = [line["data"] for line in lines[:accepted] if line["kind"] == "pair" and line["data"]["stage"] == "calibrate"]
    times = [pair[arm] for pair in first for arm in ("a_us_per_token", "b_us_per_token")]
    assert min(times) <= run_page._start_us(run) <= max(times)
    assert min(times) > 60_000


def test_what_a_rule_parked_came_in_only_after_a_person_admitted_it(lines) -> None:
    ended = [(line["kind"], line["attempt"]) for line in lines if line["kind"] in ("parked", "reviewed", "accepted")]
    assert ended == [("parked", 1), ("reviewed", 1), ("accepted", 2), ("accepted", 3)]
    programs = {n: [line["data"]["patch_sha"] for line in lines if line["kind"] == "proposed" and line["attempt"] == n] for n in (1, 2)}
    assert programs[1] == programs[2] and len(programs[1]) == 3


def test_the_rate_after_is_that_of_the_headline(lines) -> None:
    said = lines[-1]["data"]["headline"]
    shown = run_page._headline(run_data.read(RECORD))
    assert shown.after_us == micro(said["b_us"]) and shown.before_us == micro(said["a_us"])
