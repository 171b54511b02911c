"""Traces of real engines on one machine, with counts per decode step that were taken by hand."""

from __future__ import annotations

import json

import pytest

from trace_diff.attribute import mean_breakdown
from trace_diff.ingest import load
from trace_diff.types import Phase
from trace_diff.windows import steps

FILES = {
    "meta0": "metainfer_meta0_eager",
    "generated": "metainfer_generated_eager",
    "optimized": "metainfer_optimized_eager",
    "vllm_eager": "vllm_eager_bs1_12tok",
    "vllm_graph": "vllm_graph_bs1_12tok",
}


@pytest.mark.parametrize("engine", FILES)
def test_counts_per_decode_step_are_those_of_the_engine(shared, engine):
    folder = shared / "baselines" / "h200_tp1"
    table = json.loads((folder / "figures.json").read_text())["per_decode_step_counts"]
    want = {k: v[table["columns"].index(engine)] for k, v in table.items() if k != "columns"}
    trace = load(folder / f"{FILES[engine]}.json.gz")
    account = mean_breakdown(trace, [s for s in steps(trace) if s.phase is Phase.DECODE])
    launches = account.counts["kernel_launches"]
    if isinstance(want["kernel_launches"], str):  # "19 + 1 graph"
        kernels, graphs = (int(w) for w in want["kernel_launches"].split() if w.isdigit())
    else:
        kernels, graphs = want["kernel_launches"], 0
    assert account.steps == 11
    assert round(launches) == kernels
    assert account.counts["graph_launches"] == graphs
    assert round(account.counts["stream_syncs"]) == want["stream_synchronize"]
    assert round(account.counts["d2h"]) == want["d2h"]
    assert round(account.counts["host_reads"]) == want["aten_item"]
    assert round(account.counts["allocations"]) == want["empty_family"]
    assert round(account.counts["clones"]) == want["clone"]
    assert account.counts["autograd_nodes"] == want["autograd_function_nodes"]
    assert round((account.gpu_busy_ns or 0) / 1e6, 2) == pytest.approx(want["gpu_busy_ms"], abs=0.011)
    assert account.parts.get("gpu.unknown", 0) == 0
    assert account.parts.get("unattributed", 0) < 0.001 * account.wall_ns
    assert sum(account.parts.values()) == account.wall_ns


def test_steps_of_a_generate_loop_without_annotations_are_its_tokens(shared):
    """Hugging Face generate: 12 tokens, no annotation at all."""
    trace = load(shared / "baselines" / "h200_tp1" / "hf_eager_bs1_12tok.json.gz")
    found = steps(trace)
    assert [s.phase for s in found] == [Phase.PREFILL] + [Phase.DECODE] * 11
    assert all("inferred" in s.flags for s in found)
    account = mean_breakdown(trace, found[1:])
    assert account.counts["kernels"] == 2254.0


def test_the_sync_of_a_host_bound_engine_names_its_line_and_little_cost(shared):
    trace = load(shared / "baselines" / "h200_tp1" / "metainfer_generated_stack.json.gz")
    account = mean_breakdown(trace, [s for s in steps(trace) if s.phase is Phase.DECODE])
    assert account.syncs[0].op == "aten::item"
    assert account.syncs[0].site == "llm_engine.py(84): run"
    assert sum(p.starves_ns for p in account.syncs) < 500_000


@pytest.mark.parametrize("name", ["eager_tp1_rank0", "eager_tp2_rank1", "compile_tp1_rank0"])
def test_cpu_engines_get_an_account_of_their_thread(shared, name):
    trace = load(shared / "baselines" / "cpu_vllm" / f"{name}.pt.trace.json.gz")
    found = [s for s in steps(trace) if s.phase is Phase.DECODE and s.complete]
    account = mean_breakdown(trace, found)
    assert account.gpu_busy_ns is None
    assert account.parts["cpu.gemm"] > 0
    assert sum(account.parts.values()) == account.wall_ns
    assert steps(trace)[-1].flags == ("empty",)
