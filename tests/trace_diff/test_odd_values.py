"""Values of the wrong type or size, other ways to write an event, accelerators that no table knows: a named answer, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from build import HOST, Build, decode_steps

from trace_diff import summary
from trace_diff.api import analyse, find
from trace_diff.ingest import gather, load, load_many
from trace_diff.products import product_of
from trace_diff.types import Kind, Status


def _put(tmp_path: Path, text: str, name: str = "t.json") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def _pair(name: str, start: int, end: int, cat: str = "cpu_op", first: str = "B", last: str = "E", **extra) -> list[str]:
    common = {"pid": HOST, "tid": HOST, **extra}
    return [
        json.dumps({"ph": first, "cat": cat, "name": name, "ts": start / 1000, "args": {"External id": 7}, **common}),
        json.dumps({"ph": last, "cat": cat, "name": name, "ts": end / 1000, **common}),
    ]


def test_begin_and_end_events_are_complete_events_of_that_length(tmp_path):
    build = Build()
    outer, inner = _pair("aten::linear", 1_000, 9_500), _pair("aten::mm", 2_000, 8_000)
    for event in (outer[0], inner[0], inner[1], outer[1]):
        build.raw(event)
    trace = load(build.write(tmp_path / "t.json"))
    assert [(trace.name(i), int(d)) for i, d in enumerate(trace.events.dur_ns)] == [("aten::linear", 8_500), ("aten::mm", 6_000)]
    assert trace.args(1) == {"External id": 7}
    assert trace.events.external_id.tolist() == [7, 7]
    assert "2 events were written as begin and end" in trace.notes.messages


def test_ends_close_the_innermost_begin_of_their_own_thread_in_order_of_time(tmp_path):
    a, b = _pair("a", 1_000, 5_000), _pair("b", 2_000, 9_000, tid=2)
    nameless_end = json.dumps({"ph": "E", "pid": HOST, "tid": HOST, "ts": 5.0})
    trace = load(Build().raw(b[1]).raw(nameless_end).raw(b[0]).raw(a[0]).write(tmp_path / "t.json"))
    assert [(trace.name(i), int(d)) for i, d in enumerate(trace.events.dur_ns)] == [("a", 4_000), ("b", 7_000)]


def test_a_begin_without_an_end_and_an_end_without_a_begin_are_counted(tmp_path):
    whole, half = _pair("whole", 1_000, 2_000), _pair("half", 3_000, 4_000)
    trace = load(Build().raw(whole[1]).raw(whole[0]).raw(half[0]).raw(_pair("x", 5_000, 6_000)[0]).write(tmp_path / "t.json"))
    assert len(trace.events) == 1
    assert "2 begin or end events without their other half were left out" in trace.notes.messages


def test_kernels_written_as_begin_and_end_count_like_complete_ones(tmp_path):
    build = Build().call("cudaLaunchKernel", 0, 1_000, 3)
    for event in _pair("gemm", 2_000, 7_000, cat="kernel", pid=0, tid=7):
        build.raw(event.replace('"External id": 7', '"correlation": 3, "stream": 7, "device": 0'))
    shown = summary.show(gather([load(build.write(tmp_path / "t.json"))], "x"))["ranks"][0]
    assert (shown["gpu_busy_ns"], shown["unlinked_rows"]) == (5_000, 0)


def test_asynchronous_pairs_of_work_overlap_by_their_id_and_requests_are_only_counted(tmp_path):
    build = Build()
    one = _pair("copy one", 1_000, 6_000, "gpu_memcpy", "b", "e", id="0x1", pid=0, tid=7)
    two = _pair("copy two", 2_000, 4_000, "gpu_memcpy", "b", "e", id="0x2", pid=0, tid=7)
    request = _pair("request 17", 0, 9_000, "http", "b", "e", id=17)
    for event in (request[0], one[0], two[0], two[1], one[1], request[1]):
        build.raw(event)
    trace = load(build.write(tmp_path / "t.json"))
    assert [(trace.name(i), int(d)) for i, d in enumerate(trace.events.dur_ns)] == [("copy one", 5_000), ("copy two", 2_000)]
    assert "events that are no durations, not counted: 2 asynchronous" in trace.notes.messages


def test_instants_and_counters_are_counted_and_never_work(tmp_path):
    build = decode_steps(Build())
    for k in range(4):
        build.raw(json.dumps({"ph": "C", "cat": "kernel", "name": "memory", "pid": 0, "ts": k, "args": {"bytes": k}}))
        build.raw(json.dumps({"ph": "i", "cat": "kernel", "name": "mark", "pid": 0, "tid": 7, "ts": k, "s": "g"}))
    trace = load(build.write(tmp_path / "t.json"))
    assert len(trace.events) == 40
    assert "events that are no durations, not counted: 4 counter, 4 instant" in trace.notes.messages


@pytest.mark.parametrize(
    ("cat", "kind"),
    [
        ("xpu_runtime", Kind.RUNTIME), ("xpu_driver", Kind.DRIVER), ("npu_kernel", Kind.KERNEL), ("privateuse1_kernel", Kind.KERNEL),
        ("privateuse1_driver", Kind.DRIVER), ("musa_memcpy", Kind.MEMCPY), ("mlu_memset", Kind.MEMSET), ("xpu_sync", Kind.SYNC),
        ("glow_runtime", Kind.RUNTIME), ("hpu_op", Kind.RUNTIME), ("cuda_event", Kind.SYNC), ("External correlation", Kind.PROFILER),
        ("mtia_insight", Kind.OTHER), ("TensorCore", Kind.OTHER),
    ],
)  # fmt: skip
def test_rows_of_every_accelerator_have_their_kind_or_none(tmp_path, cat, kind):
    trace = load(Build().event(cat, "x", 0, 5).write(tmp_path / "t.json"))
    assert int(trace.events.kind[0]) == kind
    assert trace.unknown == ((cat,) if kind is Kind.OTHER else ())


def test_an_accelerator_that_no_table_knows_is_no_cpu_and_gets_no_verdict(tmp_path):
    build = decode_steps(Build())
    build.events = [e.replace('"kernel"', '"npu_task"') for e in build.events]
    analysis = analyse(load_many(build.write(tmp_path / "t.json"), "npu"))
    assert analysis.cell.device == "unknown accelerator (npu_task)"
    findings = find(analysis)
    assert {f.status for f in findings} == {Status.COULD_NOT_LOOK}
    assert any("npu_task" in m for m in findings[0].missing)


def test_the_profiler_before_kineto_wrote_no_categories(tmp_path):
    build = Build(rank=None)
    for name, pid, tid, start in (("aten::mm", "CPU functions", 1, 0), ("volta_sgemm_128x64_tn", "CUDA functions", 0, 9)):
        build.raw(json.dumps({"name": name, "ph": "X", "ts": start, "dur": 4, "tid": tid, "pid": pid, "args": {}}))
    trace = load(build.write(tmp_path / "t.json", as_list=True))
    assert trace.events.kind.tolist() == [Kind.CPU_OP, Kind.KERNEL]
    assert summary.totals(trace)["gpu_busy_ns"] == 4_000


def test_text_nested_deeper_than_a_decoder_goes_costs_its_event_only(tmp_path):
    good = decode_steps(Build())
    deep = '{"ph": "X", "cat": "cpu_op", "name": "deep", "pid": 1, "tid": 1, "ts": 1.000, "dur": 1.000, "args": {"x": '
    text = good.text().replace(good.events[3], good.events[3] + ", " + deep + "[" * 5000 + "]" * 5000 + "}}")
    trace = load(_put(tmp_path, text))
    assert (len(trace.events), trace.notes.lost) == (40, 1)


@pytest.mark.parametrize("value", ['"text"', "1.5", "[1]", "true"])
def test_arguments_that_are_no_object_do_no_harm_where_flows_are_needed(tmp_path, value):
    build = Build().event("cuda_runtime", "cudaLaunchKernel", 1_000, 500, args={}).event("kernel", "k", 3_000, 500, 0, 7, {})
    build.raw(f'{{"ph": "X", "cat": "cpu_op", "name": "odd", "pid": "100", "tid": 100, "ts": 0.5, "dur": 1, "args": {value}}}')
    build.raw('{"ph": "s", "id": 5, "pid": "100", "tid": "100", "ts": 1.000, "cat": "ac2g", "name": "ac2g"}')
    build.raw('{"ph": "f", "id": 5, "pid": 0, "tid": "7", "ts": 3.000, "cat": "ac2g", "name": "ac2g"}')
    build.raw('{"ph": "s", "id": [5], "pid": {"a": 1}, "tid": [], "ts": 3.000, "cat": ["ac2g"], "name": "ac2g"}')
    shown = summary.show(gather([load(build.write(tmp_path / "t.json"))], "x"))["ranks"][0]
    assert shown["unlinked_rows"] == 0


@pytest.mark.parametrize("rank", [1 << 40, -1, "99999999999", 2.5, True, None, [0]])
def test_a_rank_that_is_none_is_guessed_and_no_list_of_a_billion_missing_ranks_is_made(tmp_path, rank):
    build = decode_steps(Build(rank=None, distributedInfo={"rank": rank, "world_size": rank}))
    found = load_many(build.write(tmp_path / "trace_rank1767189312.json"), "x")
    assert list(found.traces) == [0]
    assert found.missing == ()


@pytest.mark.parametrize(
    "meta",
    [
        {"deviceProperties": 7}, {"deviceProperties": [None, {"name": 5}, {"name": ""}]}, {"control_step_us": "soon"},
        {"control_step_us": [1]}, {"control_step_us": float("1e300")}, {"baseTimeNanoseconds": "x"},
        {"baseTimeNanoseconds": 1 << 70}, {"engine": {"tp": "x", "model": [], "batch": [1]}}, {"distributedInfo": 5},
    ],
)  # fmt: skip
def test_top_level_values_of_any_type_are_no_traceback(tmp_path, meta):
    analysis = analyse(load_many(decode_steps(Build(rank=None, **meta)).write(tmp_path / "t.json"), "x"))
    assert analysis.observer.control_us is None
    assert find(analysis)


def test_a_numeric_control_in_the_file_is_used(tmp_path):
    analysis = analyse(load_many(decode_steps(Build(control_step_us=80)).write(tmp_path / "t.json"), "x"))
    assert analysis.observer.control_us == 80.0


@pytest.mark.parametrize(
    "args",
    [
        {"Input Dims": 2.5}, {"Input Dims": "[[1, 2]]"}, {"Input Dims": [[1, 2], [2, 1 << 60]]}, {"Input Dims": [[1.5, 2], [2, 3]]},
        {"Input Dims": [[1, 2], [3, 4]], "Input type": 7},
    ],
)  # fmt: skip
def test_shapes_that_are_none_are_no_product(args):
    assert product_of(args) is None


def test_a_step_without_operators_does_not_hide_those_that_have_some(tmp_path):
    build = Build()
    for step in range(5):
        build.mark(f"step_{step}_decode", step * 100_000, 90_000)
        if step % 2:
            build.op("aten::mm", step * 100_000 + 10_000, 50_000)
    analysis = analyse(load_many(build.write(tmp_path / "t.json"), "x"))
    assert analysis.sequence is not None
    assert set(analysis.sequence.names) == {"aten::mm"}


@pytest.mark.parametrize("value", [[1, 2], [7], {"a": 1}, "x", "12", 1 << 70, 2.0, None])
def test_an_identifier_of_any_type_costs_no_event(tmp_path, value):
    build = Build().kernel("k", 0, 5_000, stream=value, device=value, corr=3)
    build.raw(json.dumps({"ph": "X", "cat": "cpu_op", "name": "o", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {"External id": value}}))
    trace = load(build.write(tmp_path / "t.json"))
    assert (len(trace.events), summary.totals(trace)["gpu_busy_ns"]) == (2, 5_000)


def test_events_with_a_start_or_a_duration_as_text_are_counted_once(tmp_path):
    build = Build()
    for ts, dur in (('"1.000"', '"2.000"'), ('"5.000"', "2.000"), ("9.000", '"2.000"'), ("12.000", "2.000")):
        build.raw(f'{{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": {ts}, "dur": {dur}}}')
    trace = load(build.write(tmp_path / "t.json"))
    assert trace.notes.repaired == 3
    assert "times of 3 events were written as text" in trace.notes.messages
