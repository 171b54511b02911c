"""Sync points: the operator and line that waited, how long, and what the wait cost."""

from __future__ import annotations

import pytest
from build import Build

from trace_diff.attribute import mean_breakdown
from trace_diff.ingest import load
from trace_diff.syncs import sync_points, waits
from trace_diff.windows import steps


def _item(build: Build, at: int, dur: int, sync: int) -> None:
    """aten::item with its copy and its synchronisation, as the framework records it."""
    build.op("aten::item", at, dur).op("aten::_local_scalar_dense", at + 500, dur - 1_000)
    build.call("cudaMemcpyAsync", at + 1_000, 2_000, 900_000 + at)
    build.kernel("Memcpy DtoH (Device -> Pinned)", at + dur - 4_000, 1_000, 900_000 + at, cat="gpu_memcpy")
    build.call("cudaStreamSynchronize", at + 3_500, sync)


def _starved(count: int = 5) -> Build:
    """The device runs dry at every read: the host launches one kernel, reads, and only then launches the next."""
    build = Build()
    for k in range(count):
        at = k * 100_000
        build.mark("step[DECODE bs=1]", at, 99_000).python("engine.py(50): step", at, 99_000)
        build.launch("gemm", at + 1_000, at + 8_000, 20_000, k + 1)
        build.python("sampler.py(16): sample", at + 10_000, 30_000).python("torch/_tensor.py(9): item", at + 10_500, 25_000)
        _item(build, at + 11_000, 24_000, 19_000)
    return build


def test_t73_a_host_read_is_named_with_its_operator_line_and_price(tmp_path):
    trace = load(_starved().write(tmp_path / "t.json"))
    (point,) = sync_points(trace, steps(trace))
    assert (point.op, point.site, point.per_step) == ("aten::item", "sampler.py(16): sample", 1.0)
    assert point.blocked_ns == 19_000
    assert 0 < point.starves_ns <= point.blocked_ns
    account = mean_breakdown(trace, steps(trace))
    assert account.syncs == (point,)
    assert account.counts["host_reads"] == 1.0
    assert account.counts["stream_syncs"] == 1.0


def test_t75_a_read_on_a_saturated_device_is_listed_and_worth_nothing(tmp_path):
    """The host launches far ahead; while it waits, and after, the device has work."""
    build, corr, end = Build(), 0, 20_000
    for k in range(5):
        at = k * 200_000
        build.mark("step[DECODE bs=1]", at, 199_000)
        for j in range(20):
            corr += 1
            build.call("cudaLaunchKernel", at + j * 2_000, 1_500, corr).kernel("gemm", end, 10_000, corr)
            end += 10_000
        build.op("aten::item", at + 50_000, 100_000).call("cudaStreamSynchronize", at + 50_000, 100_000)
    trace = load(build.write(tmp_path / "t.json"))
    (point,) = sync_points(trace, steps(trace))
    assert point.blocked_ns == 100_000
    assert point.starves_ns == 0


def test_prices_never_exceed_idle_time_or_blocked_time(tmp_path):
    build, corr = Build(), 0
    for k in range(4):
        at = k * 200_000
        build.mark("step[DECODE bs=1]", at, 190_000)
        for j in range(6):
            corr += 1
            build.launch("gemm", at + j * 30_000, at + j * 30_000 + 7_000, 9_000, corr)
            build.call("cudaStreamSynchronize", at + j * 30_000 + 6_000, 20_000)
    trace = load(build.write(tmp_path / "t.json"))
    found = waits(trace)
    account = mean_breakdown(trace, steps(trace))
    assert (found.starves_ns <= found.blocked_ns).all()
    assert sum(p.starves_ns for p in account.syncs) <= (account.gpu_idle_ns or 0)


def test_a_wait_on_a_thread_that_launches_nothing_costs_nothing(tmp_path):
    build = _starved()
    build.call("cudaEventSynchronize", 1_000, 400_000, tid=777)
    trace = load(build.write(tmp_path / "t.json"))
    other = [p for p in sync_points(trace, steps(trace)) if p.op == "cudaEventSynchronize"]
    assert other[0].starves_ns == 0


def test_a_copy_to_pageable_memory_waits_whatever_its_call_is_named(tmp_path):
    build = Build()
    for k in range(3):
        at = k * 100_000
        build.mark("step[DECODE bs=1]", at, 90_000).op("aten::to", at + 10_000, 40_000).op("aten::_to_copy", at + 10_500, 39_000)
        build.op("aten::copy_", at + 11_000, 38_000).call("cudaMemcpyAsync", at + 12_000, 30_000, k + 1)
        build.kernel("Memcpy DtoH (Device -> Pageable)", at + 38_000, 2_000, k + 1, cat="gpu_memcpy")
    trace = load(build.write(tmp_path / "t.json"))
    (point,) = sync_points(trace, steps(trace))
    assert (point.op, point.blocked_ns, point.site) == ("aten::to", 30_000, None)


@pytest.mark.parametrize("call", ["cudaDeviceSynchronize", "hipStreamSynchronize", "cudaEventSynchronize", "hipMemcpyWithStream"])
def test_a_bare_call_is_its_own_operator(tmp_path, call):
    build = Build()
    for k in range(2):
        build.mark(f"ProfilerStep#{k}", k * 100_000, 90_000).launch("gemm", k * 100_000, k * 100_000 + 9_000, 5_000, k + 1)
        build.call(call, k * 100_000 + 20_000, 10_000)
    trace = load(build.write(tmp_path / "t.json"))
    assert [p.op for p in sync_points(trace, steps(trace))] == [call]


def test_stream_wait_events_do_not_block_the_host(tmp_path):
    build = _starved()
    build.call("cudaStreamWaitEvent", 2_000, 5_000)
    trace = load(build.write(tmp_path / "t.json"))
    assert [p.op for p in sync_points(trace, steps(trace))] == ["aten::item"]
