"""The account of a step: every nanosecond once, named by what the device or the host did."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from build import Build, decode_steps

from trace_diff import summary
from trace_diff.attribute import breakdown, mean, mean_breakdown
from trace_diff.backlog import queue
from trace_diff.ingest import gather, load
from trace_diff.intervals import Spans, cover, first_come, gaps, intersect, minus, union
from trace_diff.links import links
from trace_diff.nesting import nesting
from trace_diff.sequence import extract
from trace_diff.types import Kind
from trace_diff.windows import steps


def _trace(tmp_path, build: Build):
    return load(build.write(tmp_path / "t.json"))


def _account(tmp_path, build: Build, index: int = 0):
    trace = _trace(tmp_path, build)
    account = breakdown(trace, steps(trace)[index])
    assert sum(account.parts.values()) == account.wall_ns
    assert all(ns > 0 for ns in account.parts.values())
    return account


@pytest.mark.parametrize("seed", range(25))
def test_parts_of_random_traces_sum_to_the_wall_exactly(tmp_path, seed):
    rng = random.Random(seed)
    build, corr = Build(), 0
    for step in range(4):
        base = step * 100_000
        build.mark(f"ProfilerStep#{step}", base, 90_000)
        for _ in range(rng.randrange(25)):
            corr += 1
            at = base + rng.randrange(90_000)
            call = rng.choice(["cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernelEx"])
            build.op("aten::mm", at, rng.randrange(1, 9_000), corr)
            build.call(call, at + rng.randrange(-2_000, 2_000), rng.randrange(5_000), corr)
            for _ in range(rng.randrange(3)):
                name = rng.choice(["gemm", "ncclDevKernel_AllReduce_Sum", "rms_norm", "mystery"])
                start = at + rng.randrange(-3_000, 60_000)
                build.kernel(name, start, rng.randrange(9_000), corr if rng.random() < 0.9 else 10_000 + corr, rng.randrange(3))
        if rng.random() < 0.5:
            build.call("cudaStreamSynchronize", base + 80_000, rng.randrange(20_000))
        if rng.random() < 0.3:
            build.kernel("bogus", base + 40_000, 10**10, 7)
    trace = _trace(tmp_path, build)
    for step in steps(trace):
        account = breakdown(trace, step)
        assert sum(account.parts.values()) == account.wall_ns == step.end_ns - step.start_ns
        assert all(ns > 0 for ns in account.parts.values())
        assert (account.gpu_busy_ns or 0) + (account.gpu_idle_ns or 0) == account.wall_ns
        assert all(ns >= 0 for ns in account.cpu_self_ns.values())
    if any(s.complete for s in steps(trace)):
        account = mean_breakdown(trace, steps(trace))
        assert sum(account.parts.values()) == account.wall_ns


def test_busy_is_a_union_and_computation_hides_communication(tmp_path):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    build.launch("gemm", 1_000, 10_000, 30_000, 1).launch("ncclDevKernel_AllReduce", 7_000, 20_000, 40_000, 2, stream=20)
    account = _account(tmp_path, build)
    assert account.gpu_busy_ns == 50_000
    assert account.parts["gpu.gemm"] == 30_000
    assert account.parts["comm.unsplit"] == 20_000, "only what is exposed"
    assert account.gpu_ns == {"communication": 40_000, "gemm": 30_000}


def test_pdl_overlap_counts_once_in_parts_and_in_full_in_kernel_time(tmp_path):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    build.launch("gemm", 1_000, 10_000, 20_000, 1).launch("rms_norm", 7_000, 29_000, 10_000, 2)
    account = _account(tmp_path, build)
    assert account.gpu_busy_ns == 29_000
    assert account.parts["gpu.gemm"] + account.parts["gpu.norm"] == 29_000
    assert account.gpu_ns == {"gemm": 20_000, "norm": 10_000}


@pytest.mark.parametrize(("stream", "comm", "norm"), [(7, 40_000, 15_000), (9, 5_000, 50_000)])
def test_a_kernel_launched_early_behind_a_collective_waits_for_it_and_another_streams_hides_it(tmp_path, stream, comm, norm):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    build.launch("one_shot_all_reduce", 0, 10_000, 40_000, 1)
    build.launch("fused_add_rms_norm", 6_000, 15_000, 50_000, 2, stream=stream)
    build.launch("silu_and_mul", 12_000, 66_000, 4_000, 3)
    account = _account(tmp_path, build)
    parts = account.parts
    assert (parts["comm.unsplit"], parts["gpu.norm"], parts["gpu.activation"]) == (comm, norm, 4_000)
    assert account.gpu_ns == {"communication": 40_000, "norm": 50_000, "activation": 4_000}


def test_work_of_the_typical_step_is_timed_without_its_wait_for_what_is_in_front(tmp_path):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    build.launch("gemm", 1_000, 10_000, 20_000, 1).launch("rms_norm", 7_000, 15_000, 20_000, 2).launch("silu", 13_000, 36_000, 4_000, 3)
    trace = _trace(tmp_path, build)
    found = extract(trace, steps(trace))
    assert found is not None and found.dur_ns.tolist() == [20_000, 5_000, 4_000] and found.share == 1.0


def test_idle_is_split_by_its_cause(tmp_path):
    """One gap of each kind, with the length that it was built with."""
    build = Build().mark("ProfilerStep#0", 0, 400_000)
    build.call("cudaLaunchKernel", 0, 2_000, 1).kernel("gemm", 5_000, 20_000, 1)
    # the device waits from 25 us; the host launches at 60 us; the kernel starts at 68 us
    build.call("cudaLaunchKernel", 60_000, 3_000, 2).kernel("gemm", 68_000, 10_000, 2)
    # idle from 78 us; the host is blocked until 90 us, launches at 95 us
    build.call("cudaStreamSynchronize", 70_000, 20_000).call("cudaLaunchKernel", 95_000, 3_000, 3)
    build.kernel("gemm", 100_000, 10_000, 3)
    # launched at 101 us, before the gap; runs only at 250 us: waits for an event
    build.call("cudaLaunchKernel", 101_000, 3_000, 4).kernel("gemm", 250_000, 150_000, 4)
    account = _account(tmp_path, build)
    assert account.parts == {
        "gpu.gemm": 190_000,
        "idle.host_late": 35_000 + 5_000,
        "idle.host_sync": 12_000,
        "idle.launch_latency": 5_000 + 8_000 + 5_000 + 30_000,
        "idle.dependency": 110_000,
    }


def test_t29_kernels_of_a_graph_belong_to_its_launch_and_are_classified_by_name(tmp_path):
    build, at = Build(), 0
    for step in range(40):
        at = step * 2_000_000
        build.mark("step[DECODE bs=1]", at, 100_000).call("hipGraphLaunch", at + 10_000, 50_000, step + 1)
        for j in range(300):
            name = ["Cijk_Ailk_gemm", "rms_norm_kernel", "paged_attention_v2", "never heard of"][j % 4]
            build.kernel(name, at + 70_000 + j * 5_000, 4_999, step + 1)
    trace = _trace(tmp_path, build)
    account = mean_breakdown(trace, steps(trace))
    assert account.counts["graph_launches"] == 1.0
    assert account.counts["kernels"] == 300.0
    assert {k: v for k, v in account.parts.items() if k.startswith("gpu.")} == {
        "gpu.gemm": 75 * 4_999, "gpu.norm": 75 * 4_999, "gpu.attention": 75 * 4_999, "gpu.unknown": 75 * 4_999,
    }  # fmt: skip
    assert account.parts["idle.graph_gap"] == 299
    assert summary.rank(trace)["graph_rows"] == 12_000


def _while_graph(build: Build, replays: int, hole_in: set[int]) -> Build:
    for k in range(replays):
        at = k * 1_000_000
        build.mark("step[DECODE bs=1]", at, 50_000).call("cudaGraphLaunch", at + 1_000, 9_000, k + 1)
        for j in range(20):
            shift = 400_000 if j >= 10 and k in hole_in else 0
            build.kernel(f"gemm{j}", at + 20_000 + j * 2_000 + shift, 1_900, k + 1)
    return build


def test_t35_a_hole_inside_every_replay_of_a_graph_is_not_recorded_work_and_not_idle(tmp_path):
    account = _account(tmp_path, _while_graph(Build(), 4, {0, 1, 2, 3}), 1)
    assert account.parts["idle.not_recorded"] == 400_100
    account = _account(tmp_path, _while_graph(Build(), 1, {0}))
    assert account.parts["idle.not_recorded"] == 400_100


def test_a_hole_in_one_replay_of_many_is_a_stall(tmp_path):
    account = _account(tmp_path, _while_graph(Build(), 5, {2}), 2)
    assert "idle.not_recorded" not in account.parts
    assert account.parts["idle.dependency"] >= 400_100


def test_t37_kernels_before_each_replay_are_counted_per_step(tmp_path):
    build = Build()
    for k in range(4):
        at = k * 100_000
        build.mark("step[DECODE bs=1]", at, 90_000)
        build.launch("FillFunctor<int> fill_kernel", at + 1_000, at + 8_000, 2_000, 10 * k + 1)
        build.launch("FillFunctor<int> fill_kernel", at + 7_000, at + 14_000, 2_000, 10 * k + 2)
        build.call("cudaGraphLaunch", at + 15_000, 9_000, 10 * k + 3)
        for j in range(10):
            build.kernel("gemm", at + 30_000 + j * 3_000, 2_900, 10 * k + 3)
    trace = _trace(tmp_path, build)
    account = mean_breakdown(trace, steps(trace))
    assert account.counts["kernel_launches"] == 2.0
    assert account.parts["gpu.fill"] == 4_000


def test_t39_a_kernel_that_starts_before_its_launch_is_clock_skew_and_not_host_bound(tmp_path):
    build = decode_steps(Build())
    text = build.text().replace('"ts": 1115.000, "dur": 12.500', '"ts": 1100.000, "dur": 12.500')
    path = tmp_path / "t.json"
    path.write_text(text)
    trace = load(path)
    assert links(trace).negative == 1
    shown = summary.show(gather([trace], "x"))["ranks"][0]
    assert shown["negative_latency_rows"] == 1
    assert shown["unlinked_rows"] == 0
    for step in shown["steps"]:
        assert sum(step["parts"].values()) == step["wall_ns"]
        assert step["gpu_busy_ns"] == 37_500
    assert shown["steps"][1]["parts"].get("idle.clock_skew", 0) + shown["steps"][0]["parts"].get("idle.clock_skew", 0) > 0


def test_t41_kernels_launched_before_the_recording_count_and_are_named_unlinked(tmp_path):
    build = Build()
    for k in range(5):
        build.kernel("gemm", 1_000_000 + k * 4_000, 3_000, 900 + k)
    decode = decode_steps(build)
    trace = _trace(tmp_path, decode)
    shown = summary.rank(trace)
    assert shown["unlinked_rows"] == 5
    assert shown["gpu_busy_ns"] == 12 * 12_500 + 4 * 3_000, "the fifth runs beside a linked one"
    first = breakdown(trace, steps(trace)[0])
    assert first.parts["unlinked"] == 12_000, "what of them no linked kernel covers"
    assert sum(first.parts.values()) == first.wall_ns


def test_t45_sync_rows_and_annotations_on_the_device_are_no_work(tmp_path):
    build = decode_steps(Build())
    for k in range(4):
        at = 1_000_000 + k * 100_000
        build.event("cuda_sync", "Stream Wait Event", at + 28_000, 6_000, 0, 7, {"stream": 7, "device": 0, "correlation": 999})
        build.event("cuda_sync", "Context Sync", at, 99_000, 0, -1, {"stream": 4294967295, "device": 0})
        build.event("gpu_user_annotation", "ProfilerStep#0", at, 99_000, 0, 7)
    trace = _trace(tmp_path, build)
    shown = summary.rank(trace)
    assert shown["gpu_busy_ns"] == 150_000
    assert shown["gpu_span_ns"] == 352_500
    assert len(trace.rows(Kind.SYNC)) == 8


def test_t49_operators_that_a_dispatch_mode_records_twice_count_once(tmp_path):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    for k in range(5):
        at = k * 10_000
        build.op("aten::empty", at, 8_000, ext=k + 1).op("aten::empty", at, 8_000, ext=50 + k)
        build.op("aten::clone", at + 8_500, 1_000, ext=100 + k).op("aten::clone", at + 8_600, 800, ext=100 + k)
    account = _account(tmp_path, build)
    assert account.counts["allocations"] == 5.0
    assert account.counts["clones"] == 5.0
    assert account.cpu_self_ns["allocation"] == 40_000


def test_nested_operators_are_never_counted_twice_in_time(tmp_path):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    build.python("m.py(1): f", 0, 90_000).op("aten::linear", 10_000, 50_000).op("aten::addmm", 15_000, 40_000)
    build.launch("gemm", 20_000, 70_000, 10_000, 1, call_dur=5_000)
    account = _account(tmp_path, build)
    assert account.cpu_self_ns == {"python": 40_000, "gemm": 45_000, "runtime.launch": 5_000, "untraced": 10_000}


def test_t57_time_that_another_stream_fills_is_that_streams_and_no_launch_delay(tmp_path):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    build.launch("gemm", 1_000, 10_000, 10_000, 1)
    build.launch("ncclDevKernel_AllReduce", 2_000, 20_000, 50_000, 2, stream=20)
    build.launch("gemm", 3_000, 70_000, 20_000, 3)
    account = _account(tmp_path, build)
    assert account.parts["comm.unsplit"] == 50_000
    assert account.parts["idle.launch_latency"] == 9_000
    assert "idle.dependency" not in account.parts


def test_t59_overlapping_collectives_are_unioned(tmp_path):
    build = Build().mark("ProfilerStep#0", 0, 100_000)
    for k in range(3):
        build.launch("ncclDevKernel_AllGather", 1_000 + k, 10_000 + k * 10_000, 30_000, k + 1, stream=20 + k)
    account = _account(tmp_path, build)
    assert account.parts["comm.unsplit"] == 50_000
    assert account.gpu_ns["communication"] == 90_000


def test_t77_rocm_gives_the_same_numbers_as_cuda(tmp_path):
    cuda = decode_steps(Build())
    text = cuda.text().replace("cudaLaunchKernel", "hipLaunchKernel").replace('"tid": 7', '"tid": 0').replace('"stream": 7', '"stream": 0')
    path = tmp_path / "hip.json"
    path.write_text(text)
    a, b = _trace(tmp_path, cuda), load(path)
    assert set(b.events.stream[b.rows(Kind.KERNEL)].tolist()) == {0}
    for x, y in zip(steps(a), steps(b), strict=True):
        one, other = breakdown(a, x), breakdown(b, y)
        assert one.parts == other.parts
        assert one.counts == other.counts


def test_t79_every_device_microsecond_is_in_some_part(tmp_path):
    build = Build()
    for k in range(3):
        at = k * 100_000
        build.mark("step[EXTEND bs=1 toks=8]", at, 90_000)
        for j, name in enumerate(["xyzzy", "gemm", "strange_kernel_42", "Memcpy DtoD (Device -> Device)"]):
            cat = "gpu_memcpy" if "Memcpy" in name else "kernel"
            build.call("cudaLaunchKernel", at + j * 10_000, 4_000, 10 * k + j + 1)
            build.kernel(name, at + j * 10_000 + 6_000, 7_000, 10 * k + j + 1, cat=cat)
    trace = _trace(tmp_path, build)
    account = mean_breakdown(trace, steps(trace))
    busy = sum(ns for part, ns in account.parts.items() if part.startswith(("gpu.", "comm.", "unlinked")))
    assert busy == account.gpu_busy_ns == 28_000
    assert account.parts["gpu.unknown"] == 14_000
    assert account.parts["gpu.d2d"] == 7_000


def test_a_trace_without_device_work_gets_the_same_kind_of_account(tmp_path):
    build = Build()
    for k in range(3):
        at = k * 100_000
        build.mark("execute_context_0(0)_generation_4(4)", at, 95_000).python("engine.py(9): step", at, 95_000)
        build.op("aten::linear", at + 10_000, 30_000).op("_C::shm_allreduce", at + 50_000, 20_000)
    account = _account(tmp_path, build, 1)
    assert account.gpu_busy_ns is None
    assert account.gpu_idle_ns is None
    assert account.parts == {"cpu.python": 45_000, "cpu.gemm": 30_000, "comm.unsplit": 20_000, "unattributed": 5_000}
    assert account.counts["collectives"] == 1.0


def test_kernels_without_any_launch_in_the_file_are_classified_all_the_same(tmp_path):
    """A device-only profile has no launches at all; then none is missing."""
    build = Build()
    for k in range(3):
        build.event("gpu_user_annotation", "step[DECODE bs=1]", k * 100_000, 90_000, pid=0, tid=7)
        build.kernel("gemm", k * 100_000 + 10_000, 60_000)
    account = _account(tmp_path, build, 1)
    assert account.parts["gpu.gemm"] == 60_000


def test_means_are_whole_and_still_sum(tmp_path):
    build = Build()
    for k, length in enumerate((10_001, 10_002, 10_002)):
        build.mark("step[DECODE bs=1]", k * 50_000, 45_000).launch("gemm", k * 50_000, k * 50_000 + 7_777 + k, length, k + 1)
    trace = _trace(tmp_path, build)
    account = mean([breakdown(trace, s) for s in steps(trace)])
    assert sum(account.parts.values()) == account.wall_ns
    assert all(type(ns) is int for ns in account.parts.values())


# -- the tools below it ---------------------------------------------------------------------------------


def _spans(rng: random.Random, n: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([rng.randrange(200) for _ in range(n)], np.int64)
    return starts, starts + np.array([rng.randrange(20) for _ in range(n)], np.int64)


def _set(starts, ends) -> set[int]:
    return {t for a, b in zip(starts.tolist(), ends.tolist(), strict=True) for t in range(a, b)}


@pytest.mark.parametrize("seed", range(40))
def test_intervals_are_sets_of_instants(seed):
    rng = random.Random(seed)
    a, b = _spans(rng, rng.randrange(12)), _spans(rng, rng.randrange(12))
    ua, ub = union(*a), union(*b)
    assert _set(*ua) == _set(*a)
    assert ua.total == len(_set(*a))
    assert _set(*intersect(ua, ub)) == _set(*a) & _set(*b)
    assert _set(*minus(ua, ub)) == _set(*a) - _set(*b)
    assert _set(*gaps(ua, 30, 150)) == set(range(30, 150)) - _set(*a)
    assert cover(ua, *b).tolist() == [len(_set(*a) & set(range(x, y))) for x, y in zip(*b, strict=True)]
    order = np.argsort(a[0], kind="stable")
    pieces = first_come(a[0][order], a[1][order])
    assert int((pieces[1] - pieces[0]).sum()) == ua.total
    assert isinstance(ua, Spans)


@pytest.mark.parametrize("seed", range(30))
def test_self_times_of_nested_and_crossing_rows_are_the_innermost_ones(tmp_path, seed):
    """Against a direct walk over every instant."""
    rng = random.Random(seed)
    build, rows = Build(), []

    def nest(start: int, end: int, depth: int) -> None:
        at = start
        while at < end and rng.random() < 0.8 and depth < 5:
            a = at + rng.randrange(3)
            b = min(end, a + rng.randrange(12))
            if b >= a:
                rows.append((a, b - a))
                nest(a, b, depth + 1)
            at = b + rng.randrange(2)

    nest(0, 120, 0)
    for i, (start, dur) in enumerate(rows):
        build.op(f"op{i}", start, dur)
    if not rows:
        return
    trace = _trace(tmp_path, build)
    tree = nesting(trace)
    total = sum(tree.self_ns.tolist())
    assert total == len({t for a, d in rows for t in range(a, a + d)})
    assert (tree.self_ns >= 0).all()
    for i, up in enumerate(tree.parent.tolist()):
        if up >= 0:
            assert trace.events.ts_ns[up] <= trace.events.ts_ns[i]
            assert tree.end_ns[i] <= tree.end_ns[up]


def test_t41_the_queue_is_launches_not_finished_and_never_negative(tmp_path):
    build = Build().mark("step_0_decode", 0, 500_000)
    build.kernel("k", 0, 1_000, 77)  # launched before the recording
    for k in range(4):  # all launched by 40 us, each runs 50 us: none is done before the last is launched
        build.launch("k", 5_000 + k * 10_000, 20_000 + k * 50_000, 50_000, k + 1)
    build.launch("k", 400_000, 403_000, 1_000, 9)  # skewed: done before its launch call ends
    trace = load(build.write(tmp_path / "t.json"))
    assert queue(trace, steps(trace)[0]) == (4, (1 + 2 + 3 + 4 + 0) / 5)
    assert queue(trace, replace(steps(trace)[0], rows=np.zeros(0, np.int64))) is None


def test_the_queue_orders_a_trace_once_not_once_a_step(tmp_path, monkeypatch):
    trace = _trace(tmp_path, decode_steps(Build(), 4))
    first = queue(trace, steps(trace)[0])

    def again(*_: object) -> None:
        raise AssertionError("sorted again")

    monkeypatch.setattr(np, "sort", again)
    monkeypatch.setattr(np, "unique", again)
    assert next(queue(trace, step) for step in steps(trace)) == first
