"""A cut keeps whole steps, byte for byte, with the device work that they launched, and says where it came from."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import build_trace
import pytest

from trace_diff import cut, ingest, windows
from trace_diff.types import Phase


def _load(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def test_steps_keep_their_wall_and_their_phase(tmp_path: Path) -> None:
    source = build_trace.write(tmp_path / "t.json", build_trace.events())
    report = cut.cut(source, tmp_path / "c.json.gz", prefill=1, decode=3)
    before = windows.steps(ingest.load(source))
    after = windows.steps(ingest.load(tmp_path / "c.json.gz"))
    assert [s.phase for s in after] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE, Phase.DECODE]
    assert [s.wall_ns for s in after[:3]] == [s.wall_ns for s in before[:3]]
    assert len(after[3].rows) == len(before[3].rows)
    assert report.steps == tuple(s.name for s in before[:4])


def test_kept_events_are_not_changed(tmp_path: Path) -> None:
    source = build_trace.write(tmp_path / "t.json", build_trace.events())
    cut.cut(source, tmp_path / "c.json", decode=2)
    every = [json.dumps(e, sort_keys=True) for e in _load(source)["traceEvents"]]
    kept = [json.dumps(e, sort_keys=True) for e in _load(tmp_path / "c.json")["traceEvents"]]
    assert 0 < len(kept) < len(every)
    assert set(kept) <= set(every)


def test_device_work_follows_its_launch_not_the_clock(tmp_path: Path) -> None:
    """The host runs ahead: work of the second step runs while the third is being launched, and stays."""
    rows = build_trace.events(ahead=True, launch_us=1.0)
    source = build_trace.write(tmp_path / "t.json", rows)
    cut.cut(source, tmp_path / "c.json", prefill=1, decode=1)
    kept = _load(tmp_path / "c.json")["traceEvents"]
    calls = {e["args"]["correlation"] for e in kept if e.get("cat") == "cuda_runtime"}
    work = [e for e in kept if e.get("cat") in ("kernel", "gpu_memcpy")]
    host_end = max(e["ts"] + e["dur"] for e in kept if e.get("cat") == "cuda_runtime")
    assert {e["args"]["correlation"] for e in work} <= calls
    assert len(work) == 2 * (3 * len(build_trace.LAYER) + 1)
    assert max(e["ts"] for e in work) > host_end, "the built trace must have work behind its host window"


def test_a_graph_replay_stays_whole(tmp_path: Path) -> None:
    source = build_trace.write(tmp_path / "t.json.gz", build_trace.events(graph=True))
    cut.cut(source, tmp_path / "c.json.gz", prefill=0, decode=1)
    kept = _load(tmp_path / "c.json.gz")["traceEvents"]
    assert sum(e.get("cat") == "kernel" for e in kept) == 3 * len(build_trace.LAYER)


def test_inferred_steps_are_marked_so_that_they_are_found_again(tmp_path: Path) -> None:
    rows = [e for e in build_trace.events(steps=8) if e["cat"] != "user_annotation"]
    source = build_trace.write(tmp_path / "t.json", rows)
    assert all("inferred" in s.flags for s in windows.steps(ingest.load(source)))
    cut.cut(source, tmp_path / "c.json", prefill=0, decode=2)
    assert [s.phase for s in windows.steps(ingest.load(tmp_path / "c.json"))] == [Phase.DECODE, Phase.DECODE]


def test_a_cut_says_what_it_was_cut_from_and_repeats_itself(tmp_path: Path) -> None:
    source = build_trace.write(tmp_path / "t.json.gz", build_trace.events())
    cut.cut(source, tmp_path / "a.json.gz", decode=2, command="same", control_step_us=812.5)
    cut.cut(source, tmp_path / "b.json.gz", decode=2, command="same", control_step_us=812.5)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    top = _load(tmp_path / "a.json.gz")
    assert top["hotloop_cut"]["parent_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert top["control_step_us"] == 812.5
    assert top["distributedInfo"] == {"backend": "nccl", "rank": 0, "world_size": 1}


@pytest.mark.parametrize(
    ("text", "word"), [(b'{"traceEvents": [{"ph": "X", "ts": 1}', "whole files"), (b"\x1f\x8b\x08\x00\x00", "gzip")]
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, text: bytes, word: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(text)
    with pytest.raises(cut.CutError, match=r"broken\.json") as caught:
        cut.split(path)
    assert word in str(caught.value)


def test_asking_for_more_steps_than_there_are_names_what_there_is(tmp_path: Path) -> None:
    source = build_trace.write(tmp_path / "t.json", build_trace.events(steps=3))
    with pytest.raises(cut.CutError, match=r"t\.json: no 9 neighbouring decode steps; the trace has prefill: 1, decode: 3"):
        cut.cut(source, tmp_path / "c.json", decode=9)
