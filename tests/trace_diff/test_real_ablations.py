"""Findings and comparisons on recorded H200 traces, against what removing the cause really gained."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from optimizer.proposers import Budget, ProposeContext, get
from optimizer.types import Series
from trace_diff import api, stackmap
from trace_diff.types import Status

MEASURED_AUTOGRAD_US = 8_700.0  # 297 - 192 ms over 12 steps: inference_mode alone, without a profiler


@cache
def analysis(folder: Path, name: str) -> api.Analysis:
    return api.analyse(api.load(folder / f"{name}.json.gz", name))


@pytest.fixture(scope="module")
def tp1(shared: Path) -> Path:
    return shared / "baselines" / "h200_tp1"


@pytest.fixture(scope="module")
def tp2(shared: Path) -> Path:
    return shared / "baselines" / "h200_tp2"


def by_rule(findings: list[api.Finding]) -> dict[str, api.Finding]:
    return {f.rule: f for f in reversed(findings)}


def test_autograd_ranks_first_from_the_trace_alone_and_host_reads_are_nearly_worthless(tp1: Path):
    findings = api.find(analysis(tp1, "metainfer_generated_eager"))
    first = findings[0]
    assert first.rule == "autograd-recording" and "inference-mode" in first.skills
    assert first.bound_us is not None
    assert 0.5 * MEASURED_AUTOGRAD_US <= first.bound_us <= 1.5 * MEASURED_AUTOGRAD_US
    reads = by_rule(findings)["host-reads"]
    assert (reads.bound_us or 0.0) <= 500.0
    assert reads.evidence[0]["us"] <= 500.0  # as traced, whatever the profiler added


def test_with_a_control_savings_are_scaled_to_it_and_stay_within_the_wall(tp1: Path):
    control = 297_000.0 / 12
    findings = api.find(analysis(tp1, "metainfer_generated_eager"), control_step_us=control)
    bounds = [f.bound_us for f in findings if f.bound_us is not None]
    assert sum(bounds) <= control
    named = by_rule(findings)
    assert named["autograd-recording"].bound_us == pytest.approx(MEASURED_AUTOGRAD_US, rel=0.5)
    assert 0.0 < (named["host-reads"].bound_us or 0.0) <= 500.0
    assert any("scaled" in n for n in named["launch-bound-decode"].notes)


def test_without_a_control_host_time_savings_are_withheld_and_say_so(tp1: Path):
    named = by_rule(api.find(analysis(tp1, "metainfer_generated_eager")))
    withheld = named["launch-bound-decode"]
    assert withheld.status is Status.FOUND and withheld.bound_us is None
    assert any("no control" in n for n in withheld.notes)


@pytest.mark.parametrize("name", ["metainfer_generated_inference_only", "metainfer_optimized_eager", "vllm_eager_bs1_12tok"])
def test_autograd_is_not_found_where_it_is_off(tp1: Path, name: str):
    assert by_rule(api.find(analysis(tp1, name)))["autograd-recording"].status is Status.NOT_FOUND


def test_host_reads_name_their_python_line(tp1: Path):
    reads = by_rule(api.find(analysis(tp1, "metainfer_generated_stack")))["host-reads"]
    sites = {e.get("site") for e in reads.evidence}
    assert "llm_engine.py(84): run" in sites and "engine/sampler.py(16): sample_next_tokens" in sites


def test_six_engines_compare_with_all_device_time_covered(tp1: Path):
    names = ["metainfer_generated_eager", "vllm_eager_bs1_12tok", "vllm_graph_bs1_12tok"]
    names += ["metainfer_meta0_eager", "metainfer_optimized_eager", "hf_eager_bs1_12tok"]
    diff = api.compare([analysis(tp1, n) for n in names])
    assert not diff.context
    assert all(c == pytest.approx(1.0, abs=1e-6) for c in diff.coverage.values()) and len(diff.coverage) == 6
    rows = {r.label: r for r in diff.layers if r.where == "layer" and r.anchor}
    assert [round(c.per_layer) for c in rows["attention"].cells] == [2, 1, 2, 2, 2, 1]
    gate_up = next(r for label, r in rows.items() if label.startswith("gate and up"))
    assert round(gate_up.cells[5].per_layer) == 3 and round(gate_up.cells[2].per_layer) == 1  # gate, silu, up
    wall = [r for r in diff.rows if r.kind == "wall"]
    for i, engine in enumerate(diff.engines):
        assert sum(r.us[i] or 0.0 for r in wall) == pytest.approx(engine.wall_us)


def test_a_group_reads_as_a_sentence(tp1: Path):
    diff = api.compare([analysis(tp1, "metainfer_generated_eager"), analysis(tp1, "vllm_graph_bs1_12tok")])
    row = next(r for r in diff.layers if "RoPE" in r.label)
    assert row.sentence() == (
        f"{row.label}: 7 kernels, {row.cells[0].us / 36:.1f} us here; "
        f"3 kernels, {row.cells[1].us / 36:.1f} us in vllm_graph_bs1_12tok"
    )


def test_other_batch_and_context_are_context_without_times(tp1: Path):
    base = analysis(tp1, "vllm_eager_bs1_12tok")
    others = [analysis(tp1, n) for n in ("vllm_eager_bs32_6tok", "metainfer_generated_eager")]
    diff = api.compare([base, *others])
    assert [c.label for c in diff.context] == ["vllm_eager_bs32_6tok"]
    assert diff.context[0].reasons == ("batch: 1 here, 32 there",)
    assert len(diff.engines) == 2 and all(len(r.us) == 2 for r in diff.rows)


def test_graph_kernels_get_python_lines_from_an_eager_stack_trace(tp1: Path):
    target, source = analysis(tp1, "vllm_graph_bs1_12tok"), analysis(tp1, "vllm_eager_bs1_6tok_stack")
    mapped = stackmap.build(target, source)
    assert mapped.coverage >= 0.95
    lines = {m.name: m.sites[0] for m in mapped.rows if m.sites}
    assert "reshape_and_cache_flash" in next(s for n, s in lines.items() if "reshape_and_cache" in n)
    qkv = next(m for m in mapped.rows if m.by == "product" and "nvjet" in m.name)
    assert "vllm/model_executor/layers/linear.py" in qkv.sites[0]


def test_a_map_without_stacks_is_refused_by_name(tp1: Path):
    target = analysis(tp1, "vllm_graph_bs1_12tok")
    with pytest.raises(stackmap.NoStacks, match="vllm_eager_bs1_12tok"):
        stackmap.build(target, analysis(tp1, "vllm_eager_bs1_12tok"))


def test_late_rank_is_named_with_its_cause_and_waiting_is_not_transfer(tp2: Path):
    files = [tp2 / f"vllm_tp2_eager_custom_rank{r}.json.gz" for r in (0, 1)]
    named = by_rule(api.find(api.analyse(api.load(files, "vllm tp2")), control_step_us=26_234.5))
    wait = named["comm-wait"]
    assert wait.status is Status.FOUND and "rank 0 is late" in wait.title and "host late" in wait.title
    rows = {e["what"]: e for e in wait.evidence}
    assert rows["rank 1"]["wait_us"] > 100 * rows["rank 1"]["transfer_us"] > 0
    assert named["slow-transfer"].status is Status.NOT_FOUND
    assert named["straggler-rank"].bound_us is None  # the same time, counted once


def test_a_librarys_collectives_in_a_graph_bound_what_replacing_them_brought(repo: Path):
    """Two engines that differ in their all-reduce alone; the library's kernels cannot be launched early."""
    traces = repo / "reports/gallery/h200-tp2/traces"
    library, own = (api.analyse(api.load([traces / name / f"rank{r}.json.gz" for r in (0, 1)], name)) for name in ("5", "6"))
    brought = (library.breakdown.wall_ns - own.breakdown.wall_ns) / 1000
    found = by_rule(api.find(library))["slow-transfer"]
    assert found.bound_us is not None and 0.8 * found.bound_us <= brought <= found.bound_us
    assert by_rule(api.find(own))["slow-transfer"].status is Status.NOT_FOUND


def test_a_chain_inside_a_graph_takes_no_launch_with_it(repo: Path):
    """A replay has one launch. 73 chains of 452 us in all were said to save 1,418, the graph launch with them."""
    traces = repo / "baseline_traces/h200_tp2"
    vllm = api.find(api.analyse(api.load([traces / f"h200-tp2-decode-vllm-graph-rank{r}.json.gz" for r in (0, 1)], "vllm")))
    ours = repo / "reports/gallery/h200-tp2/traces/6"
    own = api.find(api.analyse(api.load([ours / f"rank{r}.json.gz" for r in (0, 1)], "all skills")))
    hidden, found = (next(f for f in of if f.title.startswith("all-reduce + residual add + RMSNorm: 73 chains")) for of in (vllm, own))
    assert hidden.status is Status.NOT_FOUND and "hidden" in hidden.title, "the host sets the pace there"
    row = next(e for e in found.evidence if e.get("count") == 73)
    assert found.bound_us is not None and 100 < found.bound_us < row["us"]


def test_two_eager_ranks_need_graphs_before_a_faster_sum(repo: Path):
    """A loop began with the faster sum here, predicted to save 28 of 87 ms; it saved nothing."""
    traces = repo / "reports/gallery/h200-tp2/traces/baseline"
    found = api.find(api.analyse(api.load([traces / f"rank{r}.json.gz" for r in (0, 1)], "plain")), control_step_us=110_122.0)
    assert by_rule(found)["comm-wait"].skills[0] == "cuda-graph-capture"
    sources = {p.relative_to(repo).as_posix(): p.read_text("utf-8") for p in (repo / "engine").glob("**/*.py")}
    question = ProposeContext(sources, found, budget=Budget(token_us=110_122.0, margin=0.03))
    first = get("playbook", device="cuda", tp=2, only=["custom-all-reduce", "fused-kernels", "cuda-graph-capture", "overlap-scheduling"]).propose(question)
    assert isinstance(first, Series) and {patch.mechanism for patch in first.patches} == {"cuda-graph-capture"}
    assert 0.5 * 110_122 < sum(patch.predicted_us for patch in first.patches) < 110_122 - 2_000, "not more than the step without its kernels"


def test_one_rank_of_two_cannot_be_split_into_waiting_and_transfer(tp2: Path):
    single = api.analyse(api.load(tp2 / "vllm_tp2_eager_custom_rank0.json.gz", "half"))
    wait = by_rule(api.find(single))["comm-wait"]
    assert wait.status is Status.COULD_NOT_LOOK and "all ranks" in wait.missing[0]


def test_faster_kernels_are_worth_nothing_in_a_host_bound_step(tp1: Path):
    here, there = analysis(tp1, "metainfer_generated_eager"), analysis(tp1, "vllm_graph_bs1_12tok")
    slower = by_rule(api.find(here, [there], control_step_us=24_750.0))["slower-kernels"]
    assert slower.status is Status.NOT_FOUND and "hidden" in slower.title


def test_another_device_is_context(shared: Path, tp1: Path):
    traces = shared / "traces"
    h100 = api.analyse(api.load(traces / "h100_qwen05b_prefill_eager.json.gz", "h100"), phase="prefill")
    mi300 = api.analyse(api.load(traces / "mi300x_qwen05b_prefill_eager.json.gz", "mi300x"), phase="prefill")
    diff = api.compare([h100, mi300])
    assert [c.label for c in diff.context] == ["mi300x"]
    assert any(r.startswith("device class") for r in diff.context[0].reasons)
