"""Collectives across ranks: waiting against transfer, clocks, missing peers, and who is late."""

from __future__ import annotations

import pytest
from build import Build

from trace_diff import summary
from trace_diff.attribute import breakdown, mean_breakdown
from trace_diff.collectives import match
from trace_diff.ingest import gather, load
from trace_diff.windows import steps

WAIT, TRANSFER, PERIOD = 30_000, 20_000, 1_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _rank(
    rank: int,
    *,
    world: int = 2,
    late: int = 1,
    count: int = 5,
    first: int = 0,
    clock: int = 0,
    base: int | None = None,
    seq: bool = True,
    name: str = NCCL,
    steps_named: bool = True,
    launch: str = "cudaLaunchKernel",
) -> Build:
    """`count` all-reduces, one a step; rank `late` comes 30 us after the others, then all take 20 us."""
    build = Build(rank, world, **({"baseTimeNanoseconds": base} if base is not None else {}))
    for k in range(first, count):
        at = k * PERIOD + clock + 1_000_000
        begin = at + 10_000 + (WAIT if rank == late else 0)
        end = at + 10_000 + WAIT + TRANSFER
        if steps_named:
            build.mark("step[DECODE bs=1]", at, 900_000)
        args = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": world} | ({"Seq": k} if seq else {})
        build.call(launch, begin - 6_000, 4_000, k + 1)
        build.kernel(name, begin, end - begin, k + 1, stream=20, **args)
    return build


def _set(tmp_path, *builds: Build):
    return gather([load(b.write(tmp_path / f"r{i}.json")) for i, b in enumerate(builds)], "run")


def _split(together) -> dict[int, tuple[float | None, float | None]]:
    return {r.rank: (r.wait_ns, r.transfer_ns) for r in together.rows}


WANT = {0: (WAIT, TRANSFER), 1: (0, TRANSFER)}


def test_waiting_and_transfer_are_told_apart_and_the_late_rank_is_named(tmp_path):
    together = match(_set(tmp_path, _rank(0), _rank(1)))
    assert _split(together) == WANT
    assert [r.per_step for r in together.rows] == [1.0, 1.0]
    assert together.late is not None
    assert (together.late.rank, together.late.share, together.late.wait_ns) == (1, 1.0, WAIT)


@pytest.mark.parametrize("seq", [True, False])
@pytest.mark.parametrize("missed", [1, 2])
def test_a_rank_that_missed_the_first_collectives_is_matched_right(tmp_path, seq, missed):
    together = match(_set(tmp_path, _rank(0, count=8, seq=seq), _rank(1, count=8, first=missed, seq=seq)))
    waits = [g for g in together.groups if len(g.calls) == 2]
    assert len(waits) == 8 - missed
    assert all(g.calls[1].start - g.calls[0].start == WAIT for g in waits)
    assert _split(together)[1] == (0, TRANSFER)


@pytest.mark.parametrize("clock", [400_000, -250_000, 77, 5_000_000_000])
def test_clocks_of_ranks_are_fitted_on_the_ends(tmp_path, clock):
    together = match(_set(tmp_path, _rank(0), _rank(1, clock=clock)))
    assert together.offsets == {0: 0, 1: clock}
    assert _split(together) == WANT
    assert together.late is not None
    assert together.late.rank == 1


def test_ranks_with_another_base_time_are_on_one_clock(tmp_path):
    base = 1_790_000_000_000_000_000
    together = match(_set(tmp_path, _rank(0, base=base), _rank(1, base=base + 200_000, clock=-200_000)))
    assert together.offsets == {0: 0, 1: 0}
    assert _split(together) == WANT


@pytest.mark.parametrize(
    "name",
    [
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>",
        "void quickreduce::allreduce_prototype_twoshot<x>",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel<x>",
    ],
)
def test_custom_all_reduces_are_split_like_nccls(tmp_path, name):
    together = match(_set(tmp_path, _rank(0, name=name, seq=False), _rank(1, name=name, seq=False)))
    assert _split(together) == WANT


def test_rccl_is_named_as_such(tmp_path):
    together = match(_set(tmp_path, _rank(0, launch="hipLaunchKernel"), _rank(1, launch="hipLaunchKernel")))
    assert {r.backend for r in together.rows} == {"rccl"}
    assert _split(together) == WANT


def test_one_rank_alone_gets_none_and_not_zero(tmp_path):
    together = match(_set(tmp_path, _rank(0)))
    assert _split(together) == {0: (None, None)}
    assert together.rows[0].wall_ns == WAIT + TRANSFER
    assert together.late is None
    trace = load(_rank(0).write(tmp_path / "x.json"))
    account = breakdown(trace, steps(trace)[0], together)
    assert account.parts["comm.unsplit"] == WAIT + TRANSFER
    assert "comm.wait" not in account.parts


def test_a_missing_peer_of_many_leaves_waiting_unknown(tmp_path):
    together = match(_set(tmp_path, _rank(0, world=4), _rank(1, world=4), _rank(2, world=4)))
    assert all(r.wait_ns is None for r in together.rows)
    assert together.late is None
    assert any("missing" in n for n in together.notes)


def test_the_accounts_of_ranks_show_waiting_and_transfer(tmp_path):
    traces = _set(tmp_path, _rank(0), _rank(1))
    together = match(traces)
    for rank, trace in traces.traces.items():
        account = mean_breakdown(trace, steps(trace), together)
        assert account.parts.get("comm.wait", 0) == WANT[rank][0]
        assert account.parts["comm.transfer"] == TRANSFER
        assert sum(account.parts.values()) == account.wall_ns
        assert {r.rank for r in account.collectives} == {rank}


def test_t53_skewed_arrival_names_the_late_rank_and_its_cause(tmp_path):
    """159 custom all-reduces a step; rank 0's host paces them; rank 1 waits 150 us in each."""
    builds = []
    for rank in range(2):
        build = Build(rank, 2)
        for step in range(4):
            base = step * 40_000_000
            build.mark("execute_context_0(0)_generation_1(1)", base, 39_000_000)
            for k in range(159):
                corr = step * 1000 + k + 1
                at = base + 10_000 + k * 200_000
                ready = at + (150_000 if rank == 0 else 0)
                build.launch("gemm", ready, ready + 8_000, 10_000, 2 * corr)
                begin = ready + 25_000
                build.call("cudaLaunchKernel", begin - 6_000, 3_000, 2 * corr + 1)
                build.kernel("void vllm::cross_device_reduce_1stage<x>", begin, at + 180_000 - begin, 2 * corr + 1)
        builds.append(build)
    together = match(_set(tmp_path, *builds))
    split = _split(together)
    assert split[1] == (159 * 150_000, 159 * 5_000)
    assert split[0] == (0, 159 * 5_000)
    late = together.late
    assert late is not None
    assert late.rank == 0
    assert late.doing[0][0] == "idle.host_late"
    assert "host" in late.cause


def test_nobody_is_named_where_ranks_take_turns(tmp_path):
    builds = []
    for rank in range(2):
        build = Build(rank, 2)
        for k in range(10):
            at = k * PERIOD
            begin = at + (WAIT if k % 2 == rank else 0)
            build.mark("step[DECODE bs=1]", at, 900_000).call("cudaLaunchKernel", begin, 2_000, k + 1)
            build.kernel(NCCL, begin + 5_000, at + 5_000 + WAIT + TRANSFER - begin - 5_000, k + 1)
        builds.append(build)
    assert match(_set(tmp_path, *builds)).late is None


def test_t51_annotations_without_kernels_are_said_to_be_none(tmp_path):
    build = Build(0, 2)
    for k in range(3):
        build.mark(f"ProfilerStep#{k}", k * 100_000, 90_000).mark("nccl:all_reduce", k * 100_000 + 5_000, 10_000)
        build.launch("gemm", k * 100_000 + 20_000, k * 100_000 + 30_000, 10_000, k + 1)
    trace = load(build.write(tmp_path / "t.json"))
    assert match(gather([trace], "x"), None).rows[0].wait_ns is None
    quiet = Build(0, 1).mark("ProfilerStep#0", 0, 100_000).launch("gemm", 1_000, 9_000, 5_000, 1)
    together = match(gather([load(quiet.write(tmp_path / "q.json"))], "x"))
    assert together.rows == ()
    assert together.notes[0].startswith("no communication kernels in the trace")
    shown = summary.show(gather([load(quiet.write(tmp_path / "q.json"))], "x"))
    assert shown["late"] is None


def test_t59_collectives_use_device_times_and_not_launch_times(tmp_path):
    """Both launches overlap; the kernels do not."""
    builds = []
    for rank in range(2):
        build = Build(rank, 2).mark("step[DECODE bs=1]", 0, 900_000)
        for k in range(2):
            build.call("cudaLaunchKernel", 1_000 + k, 50_000, k + 1)
            build.kernel(NCCL, 100_000 + k * 100_000, 30_000, k + 1, stream=20)
        builds.append(build)
    together = match(_set(tmp_path, *builds))
    assert all(r.wall_ns == 60_000 and r.wait_ns == 0 for r in together.rows)


def test_collectives_of_cpu_engines_are_split_on_the_host(tmp_path):
    builds = []
    for rank in range(2):
        build = Build(rank, 2)
        for k in range(4):
            at = k * 1_000_000
            begin = at + 100_000 + (300_000 if rank == 1 else 0)
            build.mark("execute_context_0(0)_generation_4(4)", at, 900_000).op("aten::linear", at, begin - at)
            build.op("_C::shm_allreduce", begin, at + 450_000 - begin)
        builds.append(build)
    traces = _set(tmp_path, *builds)
    together = match(traces)
    assert _split(together) == {0: (300_000, 50_000), 1: (0, 50_000)}
    assert together.late is not None
    assert together.late.rank == 1
    assert together.late.doing[0][0] == "cpu.gemm"
    account = mean_breakdown(traces.traces[0], steps(traces.traces[0]), together)
    assert (account.parts["comm.wait"], account.parts["comm.transfer"]) == (300_000, 50_000)


def test_public_two_rank_set_with_known_truth(shared):
    folder = shared / "traces" / "synthetic"
    together = match(gather([load(folder / f"nccl2_a{r}.json") for r in range(2)], "a"))
    assert _split(together) == {0: (5 * WAIT, 5 * TRANSFER), 1: (0, 5 * TRANSFER)}
    together = match(gather([load(folder / "nccl2_a0.json"), load(folder / "nccl2_b1.json")], "b"))
    assert all(g.calls[1].start - g.calls[0].start == WAIT for g in together.groups if len(g.calls) == 2)
    assert sum(len(g.calls) == 2 for g in together.groups) == 4


def test_eight_gloo_ranks_name_the_true_straggler(shared):
    from trace_diff.ingest import load_many

    together = match(load_many(shared / "traces" / "gloo8_torch213"))
    assert together.late is not None
    assert together.late.rank == 3
    assert any("sleep" in site for site in together.late.sites)


def test_h200_custom_all_reduce_names_rank_0_and_does_not_call_waiting_transfer(shared):
    from trace_diff.ingest import load_many

    folder = shared / "baselines" / "h200_tp2"
    together = match(load_many([folder / f"vllm_tp2_eager_custom_rank{r}.json.gz" for r in range(2)]))
    custom = {r.rank: r for r in together.rows if r.backend == "custom"}
    assert custom[0].per_step == custom[1].per_step == 73.0
    assert custom[1].wait_ns is not None
    assert custom[1].wait_ns > 0.98 * custom[1].wall_ns
    assert abs((custom[0].transfer_ns or 0) - (custom[1].transfer_ns or 0)) < 0.01 * custom[0].wall_ns
    late = together.late
    assert late is not None
    assert (late.rank, late.doing[0][0]) == (0, "idle.host_late")
    assert late.share > 0.99
    assert abs(together.offsets[1]) < 1_000
