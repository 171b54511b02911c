"""The scripts for several GPUs, over gloo with the tiny model: they run, and say what they are read for."""

from __future__ import annotations

import json

import pytest

from benchmarks import all_reduce, gpu_ladder, gpu_ranks


def _rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_engines_on_two_ranks_are_compared_with_one_held_up_and_replayed(repo, tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(gpu_ranks, "CELLS", {"batch 1": (1, 9), "batch 32": (32, 5)})
    model = repo / "engine/tiny_qwen3"
    gpu_ranks.main([str(tmp_path / "out"), "--place", str(tmp_path), "--tp", "2", "--device", "cpu", "--model", str(model), "--only", "one,ranks", "--replays", "28"])
    rows = _rows(capfd.readouterr().out)
    one, ranks = rows[:2]
    assert one["streams as one's"] == ranks["streams as one's"] == "33 of 33"
    assert set(ranks["wait_us"]) == set(ranks["transfer_us"]) == {"0", "1"} and min(ranks["transfer_us"].values()) > 0
    held = [r for r in rows if "delays" in r]
    assert [r["same"] for r in held] == [r["streams"] for r in held] == [1, 8, 32] and sum(r["holds"] for r in held) > 0
    replayed = [r for r in rows if "replays" in r]
    assert len(replayed) == len(gpu_ranks.BUCKETS) and {r["other ways"] for r in replayed} == {0}
    assert {r["wrong"] for r in rows} == {0} and max(r["largest gap"] for r in rows) < 0.01
    with pytest.raises(SystemExit, match="no step engine; there are: engines, delays, replays"):
        gpu_ranks.main([str(tmp_path / "out"), "--place", str(tmp_path), "--steps", "engine"])
    with pytest.raises(SystemExit, match="no engine nobody; there are: one, one with all skills, plain"):
        gpu_ranks.main([str(tmp_path / "out"), "--place", str(tmp_path), "--device", "cpu", "--model", str(model), "--only", "nobody"])


def test_a_rung_that_is_not_there_is_refused_before_weights_are_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_ladder", str(tmp_path / "out"), "--place", str(tmp_path / "place"), "--only", "skinny,gated"])
    with pytest.raises(SystemExit, match="no rung gated; there are: plain, graph"):
        gpu_ladder.main()
    assert not (tmp_path / "place").exists()


def test_an_all_reduce_is_right_before_it_is_timed(tmp_path, capfd) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('made for another torch')")
    all_reduce.main(["--device", "cpu", "--kib", "8,2048", "--calls", "3", "--repeats", "2", "--vllm-site", str(tmp_path)])
    *rows, other = _rows(capfd.readouterr().out)
    assert [(r["way"], r["kib"]) for r in rows] == [("gloo", 8), ("gloo", 2048), ("custom-all-reduce", 8)]
    assert all(r["wrong"] == 0 and r["us_range"][0] <= r["us"] <= r["us_range"][1] for r in rows)
    assert other == {"way": "vLLM", "ranks": 2, "why": "ImportError: made for another torch"}
