"""Ranks: from the file, from its name, merged into one file, missing and double."""

from __future__ import annotations

import pytest
from build import Build, decode_steps

from trace_diff import summary
from trace_diff.ingest import TraceError, load, load_many
from trace_diff.ingest.ranks import from_name
from trace_diff.links import links


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json.gz", 3),
        ("rank-12.Apr_03_18_51_38.1102.pt.trace.json.gz", 12),
        ("graph_capture_rank_0.1773709742341309550.pt.trace.json.gz", 0),
        ("1712345.1234-TP-5.trace.json.gz", 5),
        ("dp0_pp0_tp3_dcp0_ep0_rank7.177.pt.trace.json.gz", 7),
        ("vllm_tp2_eager_custom_rank1.json.gz", 1),
        ("profile_trace_rank_2.json.gz", 2),
        ("worker4.trace.json", 4),
        ("run/rank2/trace.json", 2),
        ("trace.json", None),
        ("h100_qwen05b_prefill_eager.json.gz", None),
        ("vllm_graph_bs1_12tok.json.gz", None),
        ("step2000.json", None),
    ],
)
def test_rank_of_a_file_name(name, rank):
    assert from_name(name) == rank


def test_t25_without_distributed_info_the_name_tells_the_rank_with_a_note(tmp_path):
    trace = load(decode_steps(Build(rank=None)).write(tmp_path / "rank5.json"))
    assert (trace.rank, trace.rank_known) == (5, True)
    assert any("file name" in m for m in trace.notes.messages)
    trace = load(decode_steps(Build(rank=None)).write(tmp_path / "plain.json"))
    assert (trace.rank, trace.rank_known) == (0, False)
    assert any("no rank" in m for m in trace.notes.messages)


@pytest.mark.parametrize("info", [{"backend": "nccl"}, {"rank": None}, {"rank": "x"}, [], "text", None, {"rank": -1}])
def test_t25_distributed_info_without_a_usable_rank_falls_back(tmp_path, info):
    build = decode_steps(Build(rank=None))
    build.meta["distributedInfo"] = info
    trace = load(build.write(tmp_path / "r_rank3.json"))
    assert trace.rank == 3


def test_rank_and_world_size_may_be_text(tmp_path):
    build = decode_steps(Build(rank=None))
    build.meta["distributedInfo"] = {"rank": "2", "world_size": "4"}
    trace = load(build.write(tmp_path / "t.json"))
    assert (trace.rank, trace.world_size) == (2, 4)


def test_missing_and_double_ranks_are_named(tmp_path):
    for name, rank in (("a", 0), ("b", 2), ("c", 2), ("d", 5)):
        decode_steps(Build(rank, 8)).write(tmp_path / f"{name}.json")
    found = load_many(tmp_path, "run")
    assert list(found.traces) == [0, 2, 5]
    assert found.missing == (1, 3, 4, 6, 7)
    assert found.duplicates == ((2, str(tmp_path / "c.json")),)
    text = " ".join(found.notes)
    assert "1, 3-4, 6-7" in text
    assert "rank 2 is there twice" in text


def test_files_that_say_no_rank_are_numbered_in_order_with_a_note(tmp_path):
    for name in ("x", "y"):
        decode_steps(Build(None)).write(tmp_path / f"{name}.json")
    found = load_many([tmp_path / "x.json", tmp_path / "y.json"], "run")
    assert list(found.traces) == [0, 1]
    assert any("numbered" in n for n in found.notes)


def test_a_folder_gives_its_traces_and_not_its_indexes(tmp_path):
    decode_steps(Build(0, 1)).write(tmp_path / "rank0.json.gz")
    (tmp_path / "index.json").write_text('{"traces": []}')
    (tmp_path / "notes.txt").write_text("x")
    assert list(load_many(tmp_path).traces) == [0]
    with pytest.raises(TraceError, match="no trace file"):
        load_many(tmp_path / "nowhere" if (tmp_path / "nowhere").mkdir() is None else tmp_path)


def test_an_error_in_a_worker_names_its_file(tmp_path):
    decode_steps(Build(0, 2)).write(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").write_text("nonsense")
    with pytest.raises(TraceError, match=r"rank1\.json: byte 0"):
        load_many([tmp_path / "rank0.json", tmp_path / "rank1.json"], workers=2)


def test_many_ranks_load_side_by_side_as_one_by_one(tmp_path):
    for rank in range(4):
        decode_steps(Build(rank, 4), count=3 + rank).write(tmp_path / f"rank{rank}.json.gz")
    alone, together = load_many(tmp_path, workers=1), load_many(tmp_path, workers=2)
    assert [len(t.events) for t in alone] == [len(t.events) for t in together] == [30, 40, 50, 60]
    for a, b in zip(alone, together, strict=True):
        assert (a.events.ts_ns == b.events.ts_ns).all()
        assert a.args(3) == b.args(3)


def _merged(label: str) -> Build:
    """Two ranks in one file, with equal correlation ids and thread ids."""
    build = Build(rank=None)
    for rank in range(2):
        pid = label.format(rank)
        for i in range(20):
            at = i * 50_000 + rank * 7_000
            build.event("cuda_runtime", "cudaLaunchKernel", at, 5_000, pid + "100", 100, {"correlation": i + 1})
            args = {"correlation": i + 1, "device": rank, "stream": 7}
            build.event("kernel", f"gemm{rank}", at + 10_000, 20_000, pid + str(rank), 7, args)
    return build


@pytest.mark.parametrize("label", ["[TP0{}] ", "rank{}: ", "[DP00-TP0{}] "])
def test_t27_ranks_merged_into_one_file_never_cross_link(tmp_path, label):
    path = _merged(label).write(tmp_path / "merged.json")
    trace = load(path)
    tied = links(trace)
    assert (tied.launch >= 0).all()
    for row, launch in zip(tied.device_rows.tolist(), tied.launch.tolist(), strict=True):
        host, device = trace.tracks[trace.events.track[launch]][0], trace.tracks[trace.events.track[row]][0]
        assert str(host)[:6] == str(device)[:6]
    found = load_many(path, "run")
    assert list(found.traces) == [0, 1]
    for rank, part in found.traces.items():
        assert {part.name(i) for i in range(len(part.events))} == {"cudaLaunchKernel", f"gemm{rank}"}
        assert summary.totals(part)["gpu_busy_ns"] == 20 * 20_000


def test_t27_colliding_ids_without_labels_are_told_apart_by_where_else_a_process_launches(tmp_path):
    build = Build(rank=None)
    for rank in range(2):
        for i in range(10):
            at = i * 50_000 + rank * 1_000
            corr = i + 1 if i < 5 else 100 * (rank + 1) + i  # half of the ids collide
            build.call("cudaLaunchKernel", at, 2_000, corr, pid=100 + rank)
            build.kernel("gemm", at + 10_000, 20_000, corr, device=rank)
    trace = load(build.write(tmp_path / "t.json"))
    tied = links(trace)
    for row, launch in zip(tied.device_rows.tolist(), tied.launch.tolist(), strict=True):
        assert trace.tracks[trace.events.track[launch]][0] == 100 + int(trace.events.device[row])


@pytest.mark.parametrize(("stream", "device"), [("7", "0"), ("stream 7", "cuda:0"), (7.0, 0.0), (None, None), (4294967295, -1)])
def test_streams_and_devices_written_as_text_fall_back_to_the_track(tmp_path, stream, device):
    build = Build()
    build.event("kernel", "gemm", 0, 5_000, pid=0, tid=7, args={"stream": stream, "device": device})
    trace = load(build.write(tmp_path / "t.json"))
    assert (trace.events.stream.tolist(), trace.events.device.tolist()) == ([7], [0])


def test_ranks_of_different_devices_in_one_folder_are_named_as_perhaps_several_runs(tmp_path):
    for rank, device in enumerate(("NVIDIA H200", "AMD Instinct MI300X")):
        decode_steps(Build(rank, 2, deviceProperties=[{"id": 0, "name": device}])).write(tmp_path / f"rank{rank}.json")
    notes = load_many(tmp_path).notes
    assert any("AMD Instinct MI300X, NVIDIA H200" in n and "several runs" in n for n in notes)
