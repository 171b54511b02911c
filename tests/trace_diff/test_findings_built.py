"""Findings on built traces: the planted bench's quick part, and public fault cases with their right answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from build import Build

from benchmarks.planted import programs
from benchmarks.planted.bench import score, summary
from benchmarks.planted.machine import Machine, run, step_ns
from benchmarks.planted.programs import K, Plant
from benchmarks.planted.variants import CONTROLS, QUICK, VARIANTS
from trace_diff import api, groups
from trace_diff.findings import RULES
from trace_diff.types import Status


def built(folder: Path, program, plant: Plant, world: int = 1, control: bool = True) -> api.Analysis:
    machines = [Machine(rank=r, world=world, device=None if program is programs.cpu else "NVIDIA H200") for r in range(world)]
    run(lambda m, _: program(m, plant), machines, 8)
    wall = max(step_ns(m) for m in machines) / 1000
    folder.mkdir(exist_ok=True)
    for m in machines:
        (folder / f"rank{m.rank}.json").write_text(json.dumps(m.trace(wall if control else None)))
    return api.analyse(api.load(folder, folder.name))


@pytest.mark.parametrize("variant", [v for v in (*VARIANTS, *CONTROLS) if v.name in QUICK], ids=lambda v: v.name)
def test_planted_cause_ranks_first_within_a_quarter_and_controls_are_silent(variant):
    outcome = score(variant)
    assert outcome.hit, f"ranked first: {outcome.first}"
    assert outcome.error is None or outcome.error < 0.25
    assert outcome.sum_us <= outcome.wall_us


def test_bench_summary_counts_what_it_says():
    rows = [score(v) for v in (*VARIANTS, *CONTROLS) if v.name in QUICK[:1] + QUICK[-1:]]
    total = summary(rows)
    assert (total["planted"], total["ranked_first"], total["controls"], total["silent_controls"]) == (1, 1, 1, 1)


def test_every_rule_answers_with_its_docstring_formula_and_skills(tmp_path: Path):
    findings = api.find(built(tmp_path / "a", programs.eager, Plant()))
    assert {f.rule for f in findings} == {r.RULE for r in RULES}
    for rule in RULES:
        assert "Signature" in (rule.__doc__ or "") and rule.SKILLS and rule.FORMULA
    for f in findings:
        assert f.status is not Status.COULD_NOT_LOOK or f.missing


def test_arrival_skew_is_waiting_and_the_late_rank_is_named(tmp_path: Path):
    """A decode step with many all-reduces whose entry is skewed looks like communication (vLLM 52777)."""
    plant = Plant(late_rank_ns=150 * K)
    findings = {f.rule: f for f in api.find(built(tmp_path / "skew", programs.eager, plant, world=2))}
    wait = findings["comm-wait"]
    assert wait.status is Status.FOUND and "rank 1 is late" in wait.title and "host late" in wait.title
    assert findings["slow-transfer"].status is Status.NOT_FOUND


def test_what_answers_waiting_depends_on_what_makes_the_ranks_drift_apart(tmp_path: Path):
    """A custom all-reduce in front of ranks that launch kernel by kernel was predicted to save 28 ms and saved nothing."""
    late = Plant(late_rank_ns=300 * K)
    eager, cpu = ({f.rule: f for f in api.find(built(tmp_path / name, program, late, world=2))} for name, program in (("eager", programs.eager), ("cpu", programs.cpu)))
    assert eager["comm-wait"].skills[0] == "cuda-graph-capture" and "custom-all-reduce" not in eager["comm-wait"].skills
    assert cpu["comm-wait"].skills[0] == "custom-all-reduce"


@pytest.mark.parametrize("share", [1.0, 0.55, 0.2])
def test_bounds_add_up_to_no_more_than_the_step_without_its_kernels(tmp_path: Path, share: float):
    """A late rank's host and its peer's waiting were both promised, and costs by count unscaled beside scaled ones: 132 of 110 ms."""
    plant = Plant(late_rank_ns=300 * K, autograd=(1_500, 3_000), duty=0.2)
    ranks = built(tmp_path / "late", programs.eager, plant, world=2, control=False)
    control = share * ranks.breakdown.wall_ns / 1000
    kernels = sum(ns for part, ns in ranks.breakdown.parts.items() if part.startswith("gpu.")) / 1000
    bounds = [f.bound_us for f in api.find(ranks, control_step_us=control) if f.bound_us]
    assert bounds and sum(bounds) <= max(control - kernels, 0) + 1e-3


def test_products_of_one_size_are_one_row_however_their_times_differ(tmp_path: Path):
    """On a busy CPU a product took three times as long in one of two engines, and was taken for two merged ones."""
    arms = {"here": (("o", 7.4), ("gate_up", 0.2), ("down", 0.6)), "there": ()}
    here, there = (built(tmp_path / name, programs.eager, Plant(slow=times)) for name, times in arms.items())
    assert here.cell.products and here.cell.products == there.cell.products
    rows = [row for row in groups.aligned([here, there])[0] if row.where == "layer"]
    assert len([row for row in rows if row.anchor]) == 1 + len(here.cell.products)  # attention and every product
    assert [row.cells[0].count for row in rows] == [row.cells[1].count for row in rows]


def standing_still(folder: Path, pause_ns: int, at: int) -> Path:
    """Four decode steps of six Triton launches each; in the third the thread pauses before launch `at`."""
    trace, now, correlation = Build(), 0, 1
    for step in range(4):
        begin = now
        for launch in range(6):
            now += 20_000
            trace.op("aten::empty", now, 3_000)
            now += 30_000 if (step, launch) != (2, at) else pause_ns
            kernel = ("decode_attention", "skinny_gemv")[launch % 2]
            trace.launch(kernel, now, now + 8_000, 9_000, correlation, call="cuLaunchKernelEx")
            now, correlation = now + 6_000, correlation + 1
        trace.mark(f"execute_context_0(0)_generation_{step + 1}({step + 1})", begin, now + 20_000 - begin)
        now += 40_000
    (folder / "rank0.json").write_text(trace.text())
    return folder / "rank0.json"


@pytest.mark.parametrize(("pause_ns", "at", "found"), [(800_000_000, 0, True), (800_000_000, 4, False), (30_000_000, 0, False)])
def test_a_step_that_waits_for_a_compiler_is_named_although_nothing_of_it_is_traced(pause_ns: int, at: int, found: bool, tmp_path: Path):
    """Triton compiled anew in a step with prompts: 1 s of nothing before a launch. A pause elsewhere, or a short one, is not that."""
    analysis = api.analyse(api.load(standing_still(tmp_path, pause_ns, at), "standing still"))
    said = next(f for f in api.find(analysis) if f.rule == "recompilation")
    assert (said.status is Status.FOUND) is found
    if found:
        assert "A step stands still for 800 ms before its first decode_attention" in said.title and "generation_3(3)" in said.title
        assert said.bound_us is None and said.inferred and said.evidence[0]["us"] == pytest.approx(800_000, rel=1e-4)
        assert any("one-time: in 1 of 4 steps" in note for note in said.notes)


def test_savings_never_sum_to_more_than_the_wall(tmp_path: Path):
    """Exposed communication and collective variability once claimed the same time twice (nsys-ai 246)."""
    plant = Plant(late_rank_ns=100 * K, transfer_ns=60 * K, autograd=(1900, 2100), split_norm=True, device_copies=3)
    here = built(tmp_path / "many", programs.eager, plant, world=2)
    findings = api.find(here)
    bounds = [f.bound_us for f in findings if f.bound_us]
    assert len(bounds) >= 4
    assert sum(bounds) <= here.breakdown.wall_ns / 1000


def test_host_bound_step_ranks_readback_first_and_kernels_at_nothing(tmp_path: Path):
    """GPU busy 41 % behind a CPU chain: kernel speed-ups gave nothing (sglang-omni 1608)."""
    slow = (("gate_up", 2.0), ("down", 2.0))
    here = built(tmp_path / "here", programs.eager, Plant(duty=0.15, reads_per_step=12, host_op_ns=5 * K, slow=slow))
    there = built(tmp_path / "there", programs.eager, Plant(duty=0.15, reads_per_step=12, host_op_ns=5 * K))
    findings = {f.rule: f for f in api.find(here, [there])}
    assert findings["launch-bound-decode"].status is Status.FOUND
    slower = findings["slower-kernels"]
    real = sum(e["us"] - e["reference_us"] for e in slower.evidence if "reference_us" in e)
    assert real > 50.0 and (slower.bound_us or 0.0) < 0.5 * real
    ranked = [r for r, f in findings.items() if f.status is Status.FOUND]
    assert set(ranked[:2]) == {"launch-bound-decode", "host-reads"}


def test_differences_are_ranked_in_microseconds_per_step(tmp_path: Path):
    here = built(tmp_path / "here", programs.graphed, Plant(slow=(("attention", 3.0),)))
    there = built(tmp_path / "there", programs.graphed, Plant())
    diff = api.compare([here, there])
    gpu = [r for r in diff.rows if r.kind == "gpu"]
    assert gpu[0].category == "attention"
    assert gpu[0].difference_us[1] == pytest.approx(-12 * 18.0, rel=0.01)
    assert gpu[0].per_token_us == gpu[0].us  # one token a step


def test_many_roots_all_compare(tmp_path: Path):
    """Trees with many roots once collapsed to nothing in a diff (TraceLens 569)."""
    here, there = (built(tmp_path / n, programs.cpu, Plant()) for n in ("a", "b"))
    diff = api.compare([here, there])
    assert diff.coverage == {"a": pytest.approx(1.0), "b": pytest.approx(1.0)}
    assert sum(c.count for r in diff.layers for c in r.cells[:1]) == len(here.sequence)


def test_eager_and_graph_differ_in_launches_gaps_and_not_in_kernels(tmp_path: Path):
    eager = built(tmp_path / "eager", programs.eager, Plant(host_op_ns=20 * K))
    graph = built(tmp_path / "graph", programs.graphed, Plant())
    diff = api.compare([eager, graph])
    a, b = diff.engines
    assert a.counts["kernel_launches"] > 100 > b.counts["kernel_launches"] and b.counts["graph_launches"] == 1
    for row in diff.layers:
        if row.where == "layer":
            assert row.cells[0].us == pytest.approx(row.cells[1].us, rel=0.01)
    assert sum(r.cells[0].gap_us for r in diff.layers) > 5 * sum(r.cells[1].gap_us for r in diff.layers)


def test_every_device_microsecond_is_in_some_row(tmp_path: Path):
    here = built(tmp_path / "here", programs.graphed, Plant(split_norm=True))
    there = built(tmp_path / "there", programs.graphed, Plant())
    diff = api.compare([here, there])
    for i, a in enumerate((here, there)):
        assert sum(r.cells[i].us for r in diff.layers) == pytest.approx(float(a.sequence.dur_ns.sum()) / 1000)


def test_a_one_time_cost_gets_no_bound_per_step(tmp_path: Path):
    folder = tmp_path / "once"
    folder.mkdir()
    machine = Machine()
    run(lambda m, k: programs.graphed(m, Plant(compile_ns=4000 * K if k == 4 else 0)), [machine], 10)
    (folder / "rank0.json").write_text(json.dumps(machine.trace(step_ns(machine) / 1000)))
    found = {f.rule: f for f in api.find(api.analyse(api.load(folder, "once")))}
    once = found["recompilation"]
    assert once.status is Status.FOUND and once.bound_us is None
    assert any("one-time: in 1 of" in n for n in once.notes)


def test_a_perturbed_trace_says_so_and_scales_host_savings(tmp_path: Path):
    here = built(tmp_path / "here", programs.cpu, Plant(split_norm=True), control=False)
    traced = here.observer.traced_us
    bare = {f.rule: f for f in api.find(here)}["unfused-chains"]
    assert bare.bound_us is None and any("no control" in n for n in bare.notes)
    good = {f.rule: f for f in api.find(here, control_step_us=traced / 1.05)}["unfused-chains"]
    scaled = {f.rule: f for f in api.find(here, control_step_us=traced / 2)}["unfused-chains"]
    assert not any("perturbed" in n for n in good.notes)
    assert scaled.bound_us == pytest.approx(good.bound_us * 1.05 / 2) and any("2.00 x" in n for n in scaled.notes)


def test_references_of_another_cell_are_not_used(tmp_path: Path):
    here = built(tmp_path / "here", programs.graphed, Plant(slow=(("down", 2.0),)))
    other = api.analyse(api.load(tmp_path / "here", "other"), device="NVIDIA H100")
    finding = {f.rule: f for f in api.find(here, [other])}["slower-kernels"]
    assert finding.status is Status.COULD_NOT_LOOK and "other: another cell" in finding.notes


def test_work_already_hidden_is_on_the_do_not_chase_list(tmp_path: Path):
    folder = tmp_path / "hidden"
    folder.mkdir()
    machine = Machine()

    def program(m, _):
        with m.annotate(programs.STEP):
            m.python(10 * K)
            m.kernel("nvjet_sm90_tst_TNT", 400 * K)
            m.kernel("Memcpy HtoD (Pinned -> Device)", 200 * K, 13, "gpu_memcpy")
            m.read_later()
            m.wait_for_read(back=2)
        return
        yield

    run(program, [machine], 8)
    (folder / "rank0.json").write_text(json.dumps(machine.trace(step_ns(machine) / 1000)))
    overlap = {f.rule: f for f in api.find(api.analyse(api.load(folder, "hidden")))}["overlap"]
    quiet = next(e for e in overlap.evidence if "do not chase" in str(e["what"]))
    assert "h2d" in quiet["names"]


def test_results_are_plain_json(tmp_path: Path):
    here = built(tmp_path / "here", programs.graphed, Plant())
    diff = api.compare([here, here])
    from dataclasses import asdict

    for value in (here.to_json(), diff.to_json(), [asdict(f) for f in api.find(here)]):
        json.dumps(value)
    assert list(diff.frame().columns) == ["kind", "category", "here", "here #2"]
    assert set(api.findings_frame(api.find(here)).columns) >= {"id", "status", "bound_us"}


def test_no_step_of_the_phase_is_an_error_that_says_what_there_is(tmp_path: Path):
    built(tmp_path / "here", programs.graphed, Plant())
    with pytest.raises(api.NoSteps, match="8 decode"):
        api.analyse(api.load(tmp_path / "here", "here"), phase="prefill")


def _write(folder: Path, machine: Machine) -> Path:
    folder.mkdir()
    path = folder / "rank0.json"
    path.write_text(json.dumps(machine.trace(None)))
    return path


def _prefill_step(m: Machine, head_rows: int, last_rows: int = 1) -> None:
    with m.annotate("execute_context_1(16)_generation_0(0)"):
        m.python(10 * K)
        for layer in range(4):
            for name, ns, k, n in (("qkv", 60, 256, 512), ("o", 40, 256, 256), ("up", 90, 256, 1536), ("down", 80, 768, 256)):
                rows = last_rows if layer == 3 and name in ("up", "down") else 16
                with m.op("aten::mm", 2 * K, **{"Input Dims": [[rows, k], [k, n]], "Input type": ["float", "float"]}):
                    m.kernel(f"nvjet_{name}", ns * K)
                if name == "qkv":
                    m.kernel(programs.FLASH, 30 * K)
        dims = [[head_rows, 256], [256, 2048]]
        with m.op("aten::mm", 2 * K, **{"Input Dims": dims, "Input type": ["float", "float"]}):
            m.kernel("nvjet_head", 400 * K)
        m.read_later()
        m.wait_for_read(back=1)


@pytest.mark.parametrize(("head", "last", "saved_us", "skill"), [
    (16, 1, 400, "prefill-path"), (16, 16, 400, "prefill-path"), (1, 16, 90 + 80, "last-layer-rows"), (1, 1, None, None),
])  # fmt: skip
def test_prefill_that_computes_rows_that_nobody_reads_is_found_per_request(tmp_path: Path, head: int, last: int, saved_us: int | None, skill: str | None):
    m = Machine()
    for _ in range(6):
        _prefill_step(m, head, last)
    here = api.analyse(api.load(_write(tmp_path / "p", m), "p"), phase="prefill")
    finding = {f.rule: f for f in api.find(here)}["prefill-path"]
    assert finding.status is (Status.NOT_FOUND if saved_us is None else Status.FOUND)
    if saved_us is not None:
        assert finding.per == "request" and finding.skills == (skill,)
        assert finding.evidence[0]["us"] == pytest.approx(saved_us * 15 / 16, rel=0.02)


def test_prefill_between_decode_steps_is_named_but_not_charged_to_them(tmp_path: Path):
    m = Machine()
    for k in range(9):
        if k == 4:
            _prefill_step(m, 1)
        run(lambda x, _: programs.graphed(x, Plant()), [m], 1)
    finding = {f.rule: f for f in api.find(api.analyse(api.load(_write(tmp_path / "s", m), "s")))}["prefill-stall"]
    assert finding.status is Status.FOUND and finding.bound_us is None
    assert "scheduler-and-chunked-prefill" in finding.skills


def test_a_trace_with_mostly_empty_steps_gets_no_verdict(tmp_path: Path):
    """32 steps of which only two hold device work once gave a confident "idle 0.04 %" (TraceLens 972)."""
    m = Machine()
    for k in range(16):
        if k in (7, 8):
            run(lambda x, _: programs.graphed(x, Plant()), [m], 1)
        else:
            with m.annotate(programs.STEP):
                m.python(200 * K)
    findings = api.find(api.analyse(api.load(_write(tmp_path / "e", m), "e")))
    assert {f.status for f in findings} == {Status.COULD_NOT_LOOK}
    assert "empty or not whole" in findings[0].missing[0]


def test_few_odd_rows_do_not_change_the_order_of_findings(tmp_path: Path):
    """Seven kernels with absurd durations once made up 62 % of all device time (TraceLens 669)."""
    m = Machine()
    run(lambda x, _: programs.graphed(x, Plant(device_copies=3)), [m], 10)
    clean = api.find(api.analyse(api.load(_write(tmp_path / "c", m), "c")), control_step_us=2000.0)
    kernels = [e for e in m.events if e["cat"] == "kernel"]
    for e in kernels[50::400]:
        e["dur"] += 16_000_000_000
    odd = api.find(api.analyse(api.load(_write(tmp_path / "o", m), "o")), control_step_us=2000.0)
    assert [f.id for f in odd][:1] == [f.id for f in clean][:1] == ["redundant-copies"]
