"""Where steps begin and end: annotations of every engine, launch correlation, repetition, incomplete steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from build import Build, decode_steps

from trace_diff import summary
from trace_diff.attribute import breakdown, mean_breakdown
from trace_diff.cut import choose
from trace_diff.grammar import parse
from trace_diff.ingest import gather, load
from trace_diff.repetition import find_period
from trace_diff.types import Kind, Phase
from trace_diff.windows import steps

D, P, M, U = Phase.DECODE, Phase.PREFILL, Phase.MIXED, Phase.UNKNOWN


@pytest.mark.parametrize(
    ("name", "phase", "requests", "tokens"),
    [
        ("execute_context_0(0)_generation_1(1)", D, 1, 1),
        ("execute_context_0(0)_generation_32(32)", D, 32, 32),
        ("execute_context_1(12)_generation_0(0)", P, 1, 12),
        ("execute_context_1(888_788544)_generation_0(0)", P, 1, 888),
        ("execute_context_2(10)_generation_2(2)", M, 4, 12),
        ("execute_context_0(0)_generation_0(0)", U, 0, 0),
        ("gpu_model_runner: execute_context_0(0)_generation_4(4)", D, 4, 4),
        ("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)", D, 32, 32),
        ("execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)", M, 46, 8192),
        ("execute_new_0_cached_8", D, 8, 8),
        ("execute_new_2_cached_0", P, 2, None),
        ("execute_new_2_cached_3", M, 5, None),
        ("step[DECODE bs=32]", D, 32, 32),
        ("step[EXTEND bs=1 toks=512]", P, 1, 512),
        ("step[MIXED bs=3 toks=100]", M, 3, 100),
        ("step[TARGET_VERIFY bs=8]", D, 8, 8),
        ("decode[bs=16]", D, 16, 16),
        ("prefill[bs=2 tokens=77]", P, 2, 77),
        ("[Executor] _forward_step 12: 1 ctx reqs, 3 gen reqs", M, 4, None),
        ("[Executor] _forward_step 13: 0 ctx reqs, 3 gen reqs", D, 3, 3),
        ("step_0_prefill", P, None, None),
        ("step_11_decode", D, None, None),
        ("decode_step_3", D, None, None),
        ("prefill", P, None, None),
        ("ProfilerStep#7", U, None, None),
        ("iteration 5", U, None, None),
    ],
)
def test_annotations_of_known_engines_are_read(name, phase, requests, tokens):
    found = parse(name)
    assert found is not None
    assert (found.phase, found.requests, found.tokens) == (phase, requests, tokens)


@pytest.mark.parametrize(
    "name",
    ["nccl:all_reduce", "## forward ##", "Optimizer.step#SGD.step", "gpu_model_runner: forward", "aten::mm",
     "## Call CompiledFxGraph abc ##", "DistributedDataParallel.forward", "prefill_cache_setup_hook", "decoder", ""],
)  # fmt: skip
def test_other_annotations_are_no_steps(name):
    assert parse(name) is None


def _trace(tmp_path, build: Build):
    return load(build.write(tmp_path / "t.json"))


def test_work_belongs_to_the_step_that_launched_it_wherever_it_runs(tmp_path):
    """The device runs behind the host: step 0's second kernel runs while the host is in step 1."""
    build = Build()
    for k in range(4):
        build.mark(f"step_{k}_decode", k * 50_000, 40_000)
        build.launch("a", k * 50_000 + 1_000, k * 100_000 + 10_000, 30_000, 2 * k + 1)
        build.launch("b", k * 50_000 + 10_000, k * 100_000 + 50_000, 40_000, 2 * k + 2)
    trace = _trace(tmp_path, build)
    found = steps(trace)
    for k, step in enumerate(found):
        kernels = step.rows[trace.events.kind[step.rows] == Kind.KERNEL]
        assert trace.events.correlation[kernels].tolist() == [2 * k + 1, 2 * k + 2]
    assert [s.wall_ns for s in found][1:3] == [100_000, 100_000], "the device's own period"
    for a, b in itertools.pairwise(found):
        assert a.end_ns == b.start_ns
    account = breakdown(trace, found[2])
    assert account.gpu_busy_ns == 70_000


def test_work_of_an_earlier_step_on_another_stream_does_not_swallow_a_step(tmp_path):
    build = Build()
    for k in range(4):
        at = k * 100_000
        build.mark(f"ProfilerStep#{k}", at, 90_000).launch("gemm", at + 2_000, at + 8_000, 80_000, 2 * k + 1)
        build.launch("ncclDevKernel_AllReduce", at + 3_000, at + 60_000, 130_000, 2 * k + 2, stream=20)
    trace = _trace(tmp_path, build)
    assert [s.wall_ns for s in steps(trace)][:3] == [108_000, 100_000, 100_000]
    for step in steps(trace)[:3]:
        assert breakdown(trace, step).parts["gpu.gemm"] == 80_000


def test_t47_the_device_side_annotation_does_not_bound_the_step(tmp_path):
    build = decode_steps(Build())
    for k in range(4):
        at = 1_000_000 + k * 100_000 + 15_000
        build.event("gpu_user_annotation", f"ProfilerStep#{k}", at, 12_500, pid=0, tid=7)
    trace = _trace(tmp_path, build)
    assert [breakdown(trace, s).gpu_busy_ns for s in steps(trace)] == [37_500] * 4
    assert [breakdown(trace, s).counts["kernels"] for s in steps(trace)] == [3.0] * 4


def test_t61_nested_annotations_of_two_grammars_are_one_step(tmp_path):
    build = Build()
    for k in range(5):
        at = k * 100_000
        build.mark("execute_32_context_0(sq0)_generation_32(sq32sk5)", at, 90_000)
        build.mark("step[DECODE bs=32]", at + 2_000, 80_000)
        build.launch("gemm", at + 5_000, at + 15_000, 50_000, k + 1)
    found = steps(_trace(tmp_path, build))
    assert len(found) == 5
    assert {(s.phase, s.requests, s.tokens) for s in found} == {(D, 32, 32)}


def test_t61_a_profiler_step_takes_the_phase_of_the_annotation_inside_it(tmp_path):
    """Only one annotation names the engine's step; ProfilerStep is the lesser one."""
    build = Build()
    for k in range(3):
        build.mark(f"ProfilerStep#{k}", k * 100_000, 99_000)
        build.mark("step[DECODE bs=4]", k * 100_000 + 5_000, 60_000)
        build.launch("gemm", k * 100_000 + 8_000, k * 100_000 + 20_000, 30_000, k + 1)
    found = steps(_trace(tmp_path, build))
    assert [(s.name, s.phase) for s in found] == [("step[DECODE bs=4]", D)] * 3


def test_t65_repeats_of_an_annotation_inside_itself_are_not_steps(tmp_path):
    build = Build()
    for k in range(3):
        build.mark("execute_context_0(0)_generation_1(1)", k * 100_000, 90_000)
        build.mark("execute_context_0(0)_generation_1(1)", k * 100_000 + 100, 89_000)
        build.mark("execute_context_0(0)_generation_1(1)", k * 100_000 + 200, 10_000)
    for k in range(30):
        build.mark("execute_context_0(0)_generation_1(1)", k * 10_000, 10, tid=999)
    build.mark("execute_context_0(0)_generation_1(1)", 50, 10, tid=5)
    assert len(steps(_trace(tmp_path, build))) == 3


def test_annotations_of_one_thread_only_are_steps(tmp_path):
    build = decode_steps(Build(), count=5)
    for k in range(3):
        build.mark(f"ProfilerStep#{k}", 1_000_000 + k * 100_000, 80_000, tid=77)
    assert len(steps(_trace(tmp_path, build))) == 5


def test_t23_a_host_read_that_crosses_a_step_by_microseconds_belongs_to_its_step(tmp_path):
    build = Build()
    for k in range(3):
        at = k * 100_000
        build.mark(f"ProfilerStep#{k}", at, 90_000)
        build.op("aten::item", at + 85_000, 7_000).op("aten::_local_scalar_dense", at + 86_000, 5_500)
        build.launch("gemm", at + 5_000, at + 15_000, 20_000, k + 1)
    trace = _trace(tmp_path, build)
    for step in steps(trace):
        assert breakdown(trace, step).counts["host_reads"] == 1.0
        names = [trace.name(int(i)) for i in step.rows]
        assert names.count("aten::_local_scalar_dense") == 1
    assert len(steps(trace)) == 3


def test_t21_steps_that_cross_python_frames_lose_neither(tmp_path):
    build = Build()
    build.python("outer.py(1): main", -5_000, 205_000).python("loop.py(3): run", 3_000, 96_000)
    for k in range(2):
        build.mark(f"ProfilerStep#{k}", k * 100_000, 100_000)
        build.launch("gemm", k * 100_000 + 5_000, k * 100_000 + 15_000, 20_000, k + 1)
    trace = _trace(tmp_path, build)
    found = steps(trace)
    assert len(found) == 2
    account = breakdown(trace, found[0])
    assert account.counts["python_calls"] == 1.0
    assert sum(account.cpu_self_ns.values()) == 100_000
    assert account.cpu_self_ns["python"] == 95_000


def test_t33_steps_without_device_work_are_flagged_and_left_out(tmp_path):
    build = Build()
    for k in range(32):
        at = k * 100_000
        build.mark(f"ProfilerStep#{k}", at, 90_000)
        build.call("cudaLaunchKernel", at + 5_000, 4_000, k + 1)
        if k in (10, 11):
            build.kernel("gemm", at + 15_000, 20_000, k + 1)
    trace = _trace(tmp_path, build)
    found = steps(trace)
    assert [s.complete for s in found] == [k in (10, 11) for k in range(32)]
    assert all("empty" in s.flags for s in found if not s.complete)
    assert mean_breakdown(trace, found).steps == 2
    shown = summary.show(gather([trace], "x"))["ranks"][0]["steps"]
    assert [s["counts"]["kernels"] for s in shown] == [float(k in (10, 11)) for k in range(32)]


def test_no_complete_step_is_an_error_and_not_a_number(tmp_path):
    build = Build()
    for k in range(4):
        build.mark("execute_context_0(0)_generation_0(0)", k * 1000, 500)
    trace = _trace(tmp_path, build)
    with pytest.raises(ValueError, match="no complete step"):
        mean_breakdown(trace, steps(trace))


def _replays(build: Build, counts: list[int]) -> Build:
    for k, kernels in enumerate(counts):
        at = k * 100_000
        build.mark("step[DECODE bs=1]", at, 20_000)
        build.call("cudaGraphLaunch", at + 2_000, 10_000, k + 1)
        for j in range(kernels):
            build.kernel(f"k{j}", at + 10_000 + j * 1_500, 1_400, k + 1)
    return build


def test_t31_replays_with_fewer_kernels_than_others_of_their_graph_are_flagged(tmp_path):
    trace = _trace(tmp_path, _replays(Build(), [50, 50, 31, 50, 2, 50]))
    found = steps(trace)
    assert [s.complete for s in found] == [True, True, False, True, False, True]
    assert found[2].flags == ("under_recorded",)
    assert mean_breakdown(trace, found).counts["kernels"] == 50.0


def _ahead(replays: list[int], prefill: bool = True) -> Build:
    """A prefill, then decode steps with so many graph launches each, all of the same graph."""
    build, n = Build(), 0
    for k, count in enumerate(([0] if prefill else []) + replays):
        at = k * 200_000
        build.mark("execute_context_1(12)_generation_0(0)" if prefill and k == 0 else "execute_context_0(0)_generation_1(1)", at, 90_000)
        for launch in range(max(count, 1)):
            n += 1
            build.call("cudaGraphLaunch", at + 2_000 + launch * 20_000, 10_000, n)
            for j in range(20):
                build.kernel(f"k{j}", at + 15_000 + launch * 40_000 + j * 1_500, 1_400, n)
    return build


@pytest.mark.parametrize(
    ("replays", "whole"),
    [
        ([2, 1, 1, 1], [False, True, True, True]),  # its own graph and, ahead, that of the next step
        ([2, 1], [True, True]),  # nothing to tell the usual step by
        ([2, 2, 2, 2], [True, True, True, True]),  # two graphs a step is how this engine works
        ([1, 1, 2, 1], [True, True, True, True]),  # in the middle of a run it is the step's own doing
        ([3, 1, 1, 1], [True, True, True, True]),  # more than two: no step launched ahead, something else
    ],
)
def test_a_first_decode_step_with_the_work_of_two_is_left_out_of_means(replays, whole, tmp_path):
    """Engines that launch ahead fill their pipeline in the first decode step; its mean would count every kernel too often."""
    found = [s for s in steps(_trace(tmp_path, _ahead(replays))) if s.phase is Phase.DECODE]
    assert [s.complete for s in found] == whole
    assert ("doubled" in found[0].flags) == (not whole[0])
    assert whole[0] or mean_breakdown(_trace(tmp_path, _ahead(replays)), found).counts["kernels"] == 20.0


def test_steps_without_a_device_are_never_doubled(tmp_path):
    build = Build()
    for k in range(4):
        build.mark("execute_context_0(0)_generation_1(1)", k * 100_000, 90_000).op("aten::mm", k * 100_000 + 5_000, 50_000)
    assert [(s.complete, s.flags) for s in steps(_trace(tmp_path, build))] == [(True, ())] * 4


def test_a_cut_keeps_the_step_that_a_run_was_launched_from(tmp_path):
    found = steps(_trace(tmp_path, _ahead([2, 1, 1, 1, 1])))
    assert [s.index for s in choose(found, 1, 3)] == [0, 1, 2, 3, 4]
    assert [s.index for s in choose(found, 0, 3)] == [1, 2, 3, 4]
    assert [s.index for s in choose(steps(_trace(tmp_path, _ahead([1, 1, 1, 1]))), 1, 3)] == [0, 1, 2, 3]


def test_a_step_whose_launches_have_no_kernels_in_the_file_is_under_recorded(tmp_path):
    build = Build()
    for k in range(4):
        build.mark("step[DECODE bs=1]", k * 100_000, 90_000)
        for j in range(10):
            build.call("cudaLaunchKernel", k * 100_000 + 2_000 + j * 5_000, 3_000, k * 10 + j + 1)
            if k != 3 or j < 4:
                build.kernel("gemm", k * 100_000 + 6_000 + j * 5_000, 3_000, k * 10 + j + 1)
    found = steps(_trace(tmp_path, build))
    assert [s.complete for s in found] == [True, True, True, False]
    assert "under_recorded" in found[3].flags


def test_a_last_step_that_the_profiler_cut_is_left_out(tmp_path):
    build = decode_steps(Build(), count=5, kernels=6, period=200_000)
    base = 1_000_000 + 5 * 200_000
    build.mark("ProfilerStep#5", base, 30_000).launch("gemm", base + 5_000, base + 12_000, 10_000, 99)
    found = steps(_trace(tmp_path, build))
    assert [s.complete for s in found] == [True] * 5 + [False]
    assert "last" in found[5].flags


def test_a_server_that_pauses_between_requests_does_not_lengthen_its_steps(tmp_path):
    build = Build()
    for k in range(4):
        at = k * 100_000 + (5_000_000 if k >= 2 else 0)
        build.mark("step[DECODE bs=1]", at, 80_000).launch("gemm", at + 5_000, at + 15_000, 60_000, k + 1)
    found = steps(_trace(tmp_path, build))
    assert [s.wall_ns for s in found] == [100_000, 80_000, 100_000, 80_000]


def test_what_the_host_does_between_steps_has_its_own_part(tmp_path):
    build = Build()
    for k in range(3):
        at = k * 100_000
        build.mark("step[DECODE bs=1]", at, 60_000).launch("gemm", at + 5_000, at + 10_000, 50_000, k + 1)
    trace = _trace(tmp_path, build)
    account = breakdown(trace, steps(trace)[0])
    assert account.parts["idle.between_steps"] == 40_000
    assert account.parts["gpu.gemm"] == 50_000


def test_t63_steps_of_a_trace_without_annotations_come_from_the_kernel_sequence(tmp_path):
    """Layers repeat inside steps; the step's period is the one that also repeats the sampler."""
    build, corr, at = Build(), 0, 0
    for _ in range(6):
        names = ["embed"] + ["qkv gemm", "attention", "norm"] * 8 + ["head gemm", "argmax"]
        for name in names:
            corr += 1
            build.op("aten::op", at, 9_000).launch(name, at + 1_000, at + 8_000, 5_000, corr)
            at += 10_000
        at += 40_000
    trace = _trace(tmp_path, build)
    found = steps(trace)
    assert len(found) == 6
    assert all("inferred" in s.flags for s in found)
    assert [breakdown(trace, s).counts["kernels"] for s in found] == [27.0] * 6


def test_t63_graph_launches_are_a_repetition_too(tmp_path):
    build, corr, at = Build(), 0, 0
    for _ in range(5):
        for name, call in (("h2d_copy_kernel", "cudaLaunchKernel"), ("graph", "cudaGraphLaunch"), ("argmax", "cudaLaunchKernel")):
            corr += 1
            build.call(call, at, 4_000, corr)
            for j in range(20 if name == "graph" else 1):
                build.kernel(f"{name}{j}", at + 5_000 + j * 1_000, 900, corr)
            at += 30_000
    trace = _trace(tmp_path, build)
    assert [breakdown(trace, s).counts["graph_launches"] for s in steps(trace)] == [1.0] * 5


def test_t63_a_cpu_only_trace_repeats_its_operators(tmp_path):
    build, at = Build(), 0
    for _ in range(5):
        for name in ["aten::embedding"] + ["aten::linear", "aten::silu", "aten::add"] * 4 + ["aten::argmax"]:
            build.op(name, at, 9_000)
            at += 10_000
        at += 20_000
    trace = _trace(tmp_path, build)
    found = steps(trace)
    assert len(found) == 5
    assert all("inferred" in s.flags for s in found)


def test_t63_equal_kernels_in_equal_bursts_are_steps(tmp_path):
    """Nothing but pauses tells the steps of 4 x 3 equal kernels apart."""
    build = decode_steps(Build())
    build.events = [e for e in build.events if "ProfilerStep" not in e]
    trace = _trace(tmp_path, build)
    found = steps(trace)
    assert [breakdown(trace, s).counts["kernels"] for s in found] == [3.0] * 4


def test_no_repetition_gives_no_steps(tmp_path):
    build = Build()
    for k in range(40):
        build.launch(f"kernel {k}", k * 10_000, k * 10_000 + 5_000, 4_000, k + 1)
    assert steps(_trace(tmp_path, build)) == []


@pytest.mark.parametrize(("sequence", "period"), [("abcabcabcabc", 3), ("xabbabbyabbabbyabbabby", 7), ("abcdefgh", None), ("", None)])
def test_find_period(sequence, period):
    assert find_period(np.array([ord(c) for c in sequence], np.int32)) == period


def test_t43_a_trace_of_one_kind_of_call_works(tmp_path):
    build = Build()
    for k in range(3):
        build.mark(f"ProfilerStep#{k}", k * 50_000, 45_000).launch("gemm", k * 50_000 + 1_000, k * 50_000 + 8_000, 20_000, k + 1)
    trace = _trace(tmp_path, build)
    account = mean_breakdown(trace, steps(trace))
    assert account.counts["memsets"] == 0.0
    assert account.gpu_busy_ns == 20_000


def _grouped(build: Build) -> list[str]:
    """Events as profilers write them: annotations and operators first, then each launch with its kernel."""
    host = [e for e in build.events if '"cpu_op"' in e or '"user_annotation"' in e]
    return host + [e for e in build.events if e not in host]


@pytest.mark.parametrize(("kept", "whole"), [(12, 0), (20, 1), (30, 2), (34, 3)])
def test_t05_a_file_that_ends_early_has_lost_some_of_every_later_step_and_says_which_are_whole(tmp_path, kept, whole):
    """4 steps of 3 launches: 16 host rows, then 12 launches with their kernels."""
    build = decode_steps(Build(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}]))
    build.events = _grouped(build)
    end = build.text().index(build.events[kept]) + 40
    path = tmp_path / "t.json"
    path.write_text(build.text()[:end])
    found = steps(load(path))
    assert [s.complete for s in found] == [k < whole for k in range(len(found))]


def test_a_file_that_ends_after_its_events_has_lost_no_step(tmp_path):
    build = decode_steps(Build())
    path = tmp_path / "t.json"
    path.write_text(build.text()[:-1] + ', "traceName": "/tmp/x')
    trace = load(path)
    assert trace.notes.truncated
    assert [s.complete for s in steps(trace)] == [True] * 4


def test_a_decode_step_with_half_the_device_rows_of_the_others_is_under_recorded(tmp_path):
    build = Build()
    for step in range(5):
        base = 1_000_000 + step * 100_000
        build.mark(f"execute_context_0(0)_generation_1(1) {step}", base, 90_000)
        for k in range(6):
            build.kernel("gemm", base + 5_000 + k * 10_000, 8_000) if step != 2 or k < 2 else None
    assert [s.complete for s in steps(load(build.write(tmp_path / "t.json")))] == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("name", "tokens", "context"),
    [
        ("execute_8192_context_0()_generation_37(sq37sk34489sqsq37sqsk34489)", 37, 932),
        ("step[DECODE bs=4 seq_lens_sum=8192]", 4, 2048),
        ("execute_context_0(0)_generation_1(1)", 1, None),
    ],
)
def test_annotations_that_state_cached_tokens_give_the_context_of_each_sequence(name, tokens, context):
    said = parse(name)
    assert said is not None
    assert (said.tokens, said.context) == (tokens, context)
