"""The record of a run on an H200: it verifies, and its report says what was measured and no more."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from optimizer import seal
from optimizer.verify import verify
from reports import run_data, run_page
from reports.text import micro

GALLERY = Path(__file__).resolve().parents[2] / "reports" / "gallery"
RECORD = GALLERY / "h200-tp1"


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    return [json.loads(text) for text in (RECORD / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("record", "accepted"), [("h200-tp1", 4), ("h200-tp2", 6)])
def test_nothing_in_it_fails_to_verify(monkeypatch, record, accepted) -> None:
    monkeypatch.setattr(seal, "verify", lambda: None)  # whether this checkout is sealed is another test's business
    found = {check.what: check.ok for check in verify(GALLERY / record)}
    assert not [what for what, ok in found.items() if ok is False]
    assert found["ledger chain"] and found["repository"] and all(found[f"attempt {n}"] for n in range(1, accepted + 1))


@pytest.mark.parametrize("record", ["h200-tp1", "h200-tp2"])
def test_every_trace_that_its_knowledge_cites_lies_beside_it(record) -> None:
    entries = [e for file in (GALLERY / record / "knowledge").glob("*.json") for e in json.loads(file.read_text())["entries"]]
    cited = {(name.split(": ")[1], sha) for entry in entries for name, sha in entry["evidence"]["traces"].items()}
    assert cited and all(hashlib.sha256((GALLERY / record / name).read_bytes()).hexdigest() == sha for name, sha in cited)


def test_before_is_the_first_engine_although_the_run_was_calibrated_again_later(lines) -> None:
    """Later calibrations are of engines up to fifteen times as fast; their pairs once were taken for the first engine's too."""
    calibrated = [n for n, line in enumerate(lines) if line["kind"] == "calibrated"]
    accepted = next(n for n, line in enumerate(lines) if line["kind"] == "accepted")
    assert len(calibrated) == 3 and calibrated[0] < accepted < calibrated[1]
    run = run_data.read(RECORD)
    first = [line["data"] for line in lines[:accepted] if line["kind"] == "pair" and line["data"]["stage"] == "calibrate"]
    times = [pair[arm] for pair in first for arm in ("a_us_per_token", "b_us_per_token")]
    assert min(times) <= run_page._start_us(run) <= max(times)
    assert min(times) > 50_000


def test_every_gain_was_accepted_and_what_a_guard_stopped_is_there_too(lines) -> None:
    ended = [(line["kind"], line["attempt"]) for line in lines if line["kind"] in ("parked", "reviewed", "accepted", "rejected")]
    assert ended == [("accepted", 1), ("accepted", 2), ("accepted", 3), ("accepted", 4), ("rejected", 5)]
    assert "decode.ttft_p50_us" in next(line["data"]["detail"] for line in lines if line["kind"] == "rejected")


def test_the_rate_after_is_that_of_the_headline_of_the_last_engine(lines) -> None:
    """The run ended, and went on with more time: two headlines, whose pairs were once shown as one."""
    said = lines[-1]["data"]["headline"]
    assert sum(line["kind"] == "finished" for line in lines) == 2
    shown = run_page._headline(run_data.read(RECORD))
    assert shown.after_us == micro(said["b_us"]) and shown.before_us == micro(said["a_us"])
