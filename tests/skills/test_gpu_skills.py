"""The skills for GPUs on this engine: they act within the envelope, in playbook order, once, and leave a CPU's tokens alone.

Graphs themselves need a GPU (docs/gpu.md); here their book-keeping runs with a replay that computes. Kernels: test_kernels_interpreted.py.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.confine.launch import launch
from optimizer.gates import policy, scope
from optimizer.patching import changed_lines
from optimizer.proposers import Budget, ProposeContext, get, skillbook
from optimizer.proposers.base import MAX_FILES, MAX_LINES
from optimizer.proposers.playbook import Playbook
from optimizer.target import load_target
from optimizer.traffic.client import Request
from optimizer.types import LaunchSpec, Series
from trace_diff.types import Finding, Status

ORDER = ("merge-projections", "cuda-graph-capture", "fused-kernels", "fused-kernels", "fused-kernels", "skinny-gemm", "overlap-scheduling", "inference-mode")
MADE_FOR_GPUS = ("cuda-graph-capture", "paged-attention-backend", "fused-kernels", "skinny-gemm")


def test_in_playbook_order_each_is_a_small_patch_that_the_source_check_passes(engine_sources, answer) -> None:
    sources = engine_sources
    for name in ORDER:
        rewrites = answer(name, sources)
        assert not isinstance(rewrites, str), f"{name}: {rewrites}"
        for step in rewrites:
            changed = {f: t for f, t in step.after.items() if sources.get(f) != t}
            assert 0 < len(changed) <= MAX_FILES and 0 < changed_lines(sources, changed) <= MAX_LINES, step.title
            before = {f: sources[f] for f in changed if f in sources}
            assert policy.new_findings(before, changed) == []
            assert not [why for f, text in changed.items() if (why := scope.unreadable(before.get(f, "").encode(), text.encode()))]
            sources = step.after


# Numbers of each kernel that differ from step to step; the others follow from the model, or are whole rows of it.
CHANGING = {
    "paged_attention_parts": {"table_row"}, "skinny_gemm": {"rows"}, "skinny_gemv": set(), "skinny_gated_gemv": set(), "fused_add_rms_norm": set(),
    "fused_qk_norm_rope": set(), "_turn": set(), "silu_and_mul": set(), "one_shot_all_reduce": set(),
    "qk_norm_rope_attention": {"width"}, "normed_rotated": set(),
    "exchanged": set(), "first": set(), "second": set(), "packed": set(),  # called by kernels
}  # fmt: skip


def test_no_step_waits_for_a_compiler_because_a_number_changed(engine_sources, act) -> None:
    """Triton compiles anew for a number that is 1 or divides by 16: batches of prompts stalled for 1 to 3 seconds."""
    found = {}
    for text in act(engine_sources, *ORDER, "custom-all-reduce", device="cuda").values():
        for node in ast.walk(ast.parse(text)) if "@triton.jit" in text else ():
            made = " ".join(map(ast.unparse, node.decorator_list)) if isinstance(node, ast.FunctionDef) else ""
            if "triton.jit" in made:
                found[node.name] = {a.arg for a in node.args.args if f"'{a.arg}'" in made}
    assert found == CHANGING


@pytest.mark.parametrize("name", MADE_FOR_GPUS)
def test_once_there_is_nothing_left_they_decline_with_a_reason(name, engine_sources, act, answer) -> None:
    why = answer(name, act(engine_sources, *ORDER))
    assert isinstance(why, str) and "failed" not in why and len(why) > 10


@pytest.mark.parametrize("name", MADE_FOR_GPUS)
def test_code_of_another_form_is_declined_and_not_harmed(name, qwen3_file, answer) -> None:
    rewrites = answer(name, qwen3_file)
    assert isinstance(rewrites, str) and "failed" not in rewrites


def test_graph_capture_brings_the_attention_it_needs_as_a_patch_of_its_own(engine_sources, answer, act) -> None:
    alone = answer("cuda-graph-capture", engine_sources)
    assert not isinstance(alone, str)
    assert [step.title.split()[:2] for step in alone] == [["Read", "the"], ["Replay", "decode"], ["Replay", "steps"]]
    assert alone[-1].activation["appear"][0]["row"] == "cudaGraphLaunch"
    after = answer("cuda-graph-capture", act(engine_sources, "paged-attention-backend"))
    assert [step.title.split()[1] for step in after] == ["decode", "steps"]


def test_each_fused_part_answers_the_finding_that_names_it(engine_sources, skills) -> None:
    from optimizer.proposers import skillbook

    rows = {}
    for finding in ("unfused-chains:residual-add-and-rmsnorm", "unfused-chains:rotary-embedding", "unfused-chains:swiglu"):
        rewrites = skillbook.run(skills["fused-kernels"], engine_sources, {"id": finding, "bound_us": 1.0})
        assert not isinstance(rewrites, str) and rewrites[0].activation is not None
        rows[finding] = rewrites[0].activation["appear"][0]["row"]
    assert list(rows.values()) == ["fused_add_rms_norm", "*qk_norm_rope*", "silu_and_mul"]


def test_with_the_kernel_of_the_heads_comes_that_of_one_sequence(engine_sources, answer, act) -> None:
    titles = [step.title for step in answer("fused-kernels", act(engine_sources, "cuda-graph-capture", "fused-kernels"))]
    assert titles == ["One kernel for norm, rotation and cache write of heads", "One kernel for heads and attention of one sequence"]
    model = act(engine_sources, "fused-kernels", "fused-kernels")["engine/model.py"]  # a step that it declines goes the old way
    assert "        if out is None:\n            q, k = fused_heads.norm_rotate_write(" in model and "            out = self.backend.attend(q, k, v, cache, metadata)\n" in model


def test_attention_that_is_not_right_behind_the_heads_is_left_alone(engine_sources, answer, act) -> None:
    call = "        out = self.backend.attend("
    apart = {f: t.replace(call, f"        q = q * 1.0\n{call}") for f, t in act(engine_sources, "fused-kernels").items()}
    assert [step.title for step in answer("fused-kernels", apart)] == ["One kernel for norm, rotation and cache write of heads"]


def test_gate_and_up_of_one_product_get_silu_in_the_series_of_the_products_or_later(engine_sources, answer, act) -> None:
    titles = {before: [step.title.split()[0] for step in answer("skinny-gemm", act(engine_sources, *before))] for before in [(), ("merge-projections",)]}
    assert titles == {(): ["Products"], ("merge-projections",): ["Products", "silu(gate)"]}
    merged = act(engine_sources, "merge-projections")
    orders = ("skinny-gemm", "fused-kernels", "fused-kernels", "fused-kernels"), ("fused-kernels", "fused-kernels", "fused-kernels", "skinny-gemm")
    ends = [act(merged, *order)["engine/model.py"] for order in orders]  # either way of several sequences, too, one kernel
    assert all(end.count("skinny.gated(x, stacked, fused_activation.silu_mul)") == 1 for end in ends)


def _names(**options) -> list[str]:
    playbook = get("playbook", **options)
    assert isinstance(playbook, Playbook)
    return list(playbook.skills)


def test_a_cpu_run_is_offered_none_of_them() -> None:
    assert not set(_names(device="cpu")) & set(MADE_FOR_GPUS)
    assert set(MADE_FOR_GPUS) <= set(_names(device="cuda"))


def test_a_playbook_held_to_some_skills_has_no_others_and_knows_their_names() -> None:
    assert _names(only=["skinny-gemm"]) == ["skinny-gemm"]
    with pytest.raises(ValueError, match="unknown skills no-such"):
        _names(only=["no-such"])


SIZES = (32, 24, 16, 8, 4, 2, 1)
GENERATE = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from engine import serve
from engine.request import ContextItem, GenerationItem, SamplingParams, Sequence, StepPlan
from engine.worker import Worker
options = serve.parse_options(["--model", sys.argv[2], "--tp", "1", "--device", "cpu", "--uds", "unused"])
runner = Worker(options, 0, pathlib.Path("unused")).runner
captured = []
if sys.argv[3] == "graphs":
    from engine import decode_graphs

    if sys.argv[4:] == ["narrow"]:
        decode_graphs.LEAST_PAGES = 2

    class Computing(decode_graphs.DecodeGraphs):
        def capture(self, step, plan):  # what a graph replays is computed instead
            captured.append(("prompts", step.size) if step.prompts else (step.size, step.tables.shape[1]))
            outer, metadata = self, self.metadata(step, plan)
            class Replay:
                def replay(self):
                    step.logits = outer.forward(step, metadata)
                    step.tokens = step.logits.float().argmax(dim=-1)
            step.graph = Replay()

    runner.graphs = Computing(runner)
    if sys.argv[4:] == ["warm"]:
        runner.graphs.warm()
        captured.append("requests")
if sys.argv[4:] == ["ahead"]:
    class Ahead(decode_graphs.RunAhead):
        class Event:  # a CPU has computed when it returns
            def record(self): pass
            def synchronize(self): pass

        def launch(self, plan, after):
            captured.append("ahead" if after is not None else "now")
            return super().launch(plan, after)

    runner.ahead = Ahead(runner)
out = []
for count in (1, 5, 3):
    ids = [100 * count + i for i in range(count)]
    sequences = [Sequence(i, [7 * n % 900 + 3 for n in range(9 + 11 * k)], SamplingParams(temperature=0.0)) for k, i in enumerate(ids)]
    tables = [list(range(9 * k, 9 * k + 9)) for k in range(count)]
    out.append(runner.step(StepPlan([ContextItem(s.id, s.prompt_ids, t) for s, t in zip(sequences, tables)], [], []), sequences).tokens)
    for step in range(14):
        reach = lambda s: (len(s.prompt_ids) + step + 1) // 16 + 1  # pages of a scheduler that gives the next one a step early
        items = [GenerationItem(s.id, len(s.prompt_ids) + step, t[: reach(s)]) for s, t in zip(sequences, tables)]
        out.append(runner.step(StepPlan([], items, []), sequences).tokens)
generating = []  # prompts join what runs: several at once, one that is too long for a graph, none
for number, lengths in enumerate([(5,), (4, 30), (), (700,), (), (20,)]):
    joining = [(Sequence(1000 + length, [n % 900 + 3 for n in range(length)], SamplingParams(temperature=0.0)), list(range(60 * number + 50 * k, 60 * number + 50 * k + 50))) for k, length in enumerate(lengths)]
    plan = StepPlan([ContextItem(s.id, s.prompt_ids, t) for s, t in joining], [GenerationItem(s.id, len(s.prompt_ids) + done, t) for s, t, done in generating], [])
    out.append(runner.step(plan, [s for s, *_ in (*joining, *generating)]).tokens)
    generating = [(s, t, 0) for s, t in joining] + [(s, t, done + 1) for s, t, done in generating]
print(out, file=sys.stdout)
print(captured, file=sys.stderr)
"""


def _generate(sources: dict[str, str], model: Path, place: Path, *how: str) -> tuple[str, str]:
    for file, text in sources.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text)
    command = [sys.executable, "-c", GENERATE, str(place), str(model), *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr.strip().splitlines()[-1]


def test_tokens_stay_eagerly_and_through_the_buffers_of_the_graphs(engine_sources, act, repo, tmp_path) -> None:
    """Buckets larger than the batch, prompts that join; then contexts that outgrow the tables."""
    model = repo / "engine/tiny_qwen3"
    plain, _ = _generate(engine_sources, model, tmp_path / "plain", "eager")
    patched = act(engine_sources, *ORDER)
    assert _generate(patched, model, tmp_path / "patched", "eager")[0] == plain
    tokens, captured = _generate(patched, model, tmp_path / "patched", "graphs")
    assert tokens == plain
    prompts = [("prompts", size) for size in (512, 256, 128, 64, 16)]
    assert ast.literal_eval(captured) == [*prompts, *((size, 64) for size in SIZES)]
    tokens, captured = _generate(patched, model, tmp_path / "patched", "graphs", "warm")
    assert tokens == plain
    assert ast.literal_eval(captured) == [*prompts, *((size, 64) for size in SIZES), "requests"], "nobody waits for a recording"
    assert "self.runner.graphs.warm()" in patched["engine/worker.py"]
    tokens, captured = _generate(patched, model, tmp_path / "patched", "graphs", "narrow")
    assert tokens == plain
    assert ast.literal_eval(captured) == [(size, pages) for pages in (2, 4, 8, 64) for size in SIZES], "these prompts are too long for a graph"


def test_steps_launched_ahead_give_the_same_tokens_and_are_forgotten_only_when_the_batch_changes(engine_sources, act, repo, tmp_path) -> None:
    model = repo / "engine/tiny_qwen3"
    plain, _ = _generate(engine_sources, model, tmp_path / "plain", "eager")
    tokens, launched = _generate(act(engine_sources, *ORDER), model, tmp_path / "patched", "graphs", "ahead")
    assert tokens == plain
    kinds = [kind for kind in ast.literal_eval(launched) if isinstance(kind, str)]
    assert (kinds.count("now"), kinds.count("ahead")) == (12, 44)  # seven steps with prompts, and whenever a batch begins; a new page is no reason


def test_only_an_engine_with_graphs_is_run_ahead(engine_sources, answer) -> None:
    assert "cuda-graph-capture goes first" in str(answer("overlap-scheduling", engine_sources))


SCHEDULE = """
import sys
sys.path.insert(0, sys.argv[1])
from engine.config import Limits
from engine.kv_cache import BlockManager
from engine.request import SamplingParams, Sequence
from engine.scheduler import Scheduler
scheduler = Scheduler(Limits(**LIMITS), BlockManager(int(sys.argv[2]), 4))
waiting = [Sequence(i, [1] * n, SamplingParams(max_tokens=20)) for i, n in enumerate((3, 8, 5))]
for sequence in waiting:
    scheduler.add(sequence)
ahead = steps = 0
while scheduler.has_work:
    plan, sequences = scheduler.schedule()
    steps += 1
    ahead += sum(item.position + 1 < 4 * len(item.block_table) for item in plan.generation)
    for sequence in sequences:
        sequence.output_ids.append(7)
        if len(sequence.output_ids) == 20:
            scheduler.finish(sequence, "length")
print(steps, ahead, scheduler.preemptions, scheduler.blocks.num_free, [len(s.output_ids) for s in waiting])
"""


@pytest.mark.parametrize("pages,preempts", [(60, False), (12, True)])
def test_a_page_given_early_takes_none_from_who_needs_it(engine_sources, act, tmp_path, pages, preempts) -> None:
    limits = "dict(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)"
    seen = {}
    for name, sources in (("plain", engine_sources), ("ahead", act(engine_sources, "cuda-graph-capture", "overlap-scheduling"))):
        for file, text in sources.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        command = [sys.executable, "-c", SCHEDULE.replace("LIMITS", limits), str(tmp_path / name), str(pages)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        seen[name] = ast.literal_eval(f"({', '.join(done.stdout.split(maxsplit=4))})")
    plain, ahead = seen["plain"], seen["ahead"]
    assert plain[2:] == ahead[2:] and ahead[3] == pages and ahead[4] == [20, 20, 20]
    assert (plain[2] > 0) is preempts and plain[0] == ahead[0]
    assert ahead[1] > plain[1]


COMPUTED = '''

def _capture(self, step, plan):  # on a CPU: what a graph replays is computed instead
    metadata = self.metadata(step, plan)

    class Replay:
        def replay(replay) -> None:
            step.logits = self.forward(step, metadata)
            step.tokens = step.logits.float().argmax(dim=-1)

    step.graph = Replay()


class _Event:
    def record(self): pass
    def synchronize(self): pass


def _launch(self, plan, after, plainly=RunAhead.launch):
    import sys
    print("ahead" if after is not None else "now", len(plan.generation), file=sys.stderr, flush=True)
    return plainly(self, plan, after)


DecodeGraphs.capture, RunAhead.Event, RunAhead.launch = _capture, _Event, _launch
'''


def test_with_several_ranks_both_patches_come_as_one_series(engine_sources, act) -> None:
    graphs = act(engine_sources, "cuda-graph-capture")
    codemod = skillbook.load_all()["overlap-scheduling"]
    one, two = (skillbook.run(codemod, graphs, {"bound_us": 9.0, "tp": tp}) for tp in (1, 2))
    assert [r.title for r in one] == ["Launch the next greedy step before the tokens of this one are read"]
    assert [(r.title.split()[0], r.predicted_us) for r in two] == [("Launch", 0.0), ("Several", 9.0)]
    assert "already" in str(skillbook.run(codemod, one[-1].after, {"bound_us": 9.0, "tp": 1}))


def test_several_ranks_launch_ahead_alike(engine_sources, act, repo, tmp_path) -> None:
    """Over HTTP at TP=2: greedy streams of several lengths, one longer than one GPU's graphs hold, one that samples, one given up."""
    patched = act(engine_sources, "cuda-graph-capture", "overlap-scheduling", "overlap-scheduling")
    patched["engine/decode_graphs.py"] += COMPUTED
    patched["engine/runner.py"] = patched["engine/runner.py"].replace(' if self.tp.device.type == "cuda" else None', "")
    prompts = [[(7 * n + length) % 900 + 3 for n in range(length)] for length in (5, 30, 17, 40, 600)]
    work = [Request(p, new, ignore_eos=True) for p, new in zip(prompts, (40, 12, 30, 20, 8), strict=True)]
    found, logs = {}, {}
    for name, sources in (("plain", engine_sources), ("ahead", patched)):
        shutil.copytree(repo / "engine", tmp_path / name / "engine")
        for file, text in sources.items():
            (tmp_path / name / file).write_text(text, "utf-8")
        target = load_target(tmp_path / name / "engine")
        spec = LaunchSpec(tree=tmp_path / name, target=target, python=Path(sys.executable), model_dir=repo / "engine/tiny_qwen3", tp=2, label=name)
        with launch(spec) as server:
            found[name] = [s.token_ids for s in server.client.complete(work, 60.0)]
            warm = [replace(request, temperature=1.0, seed=5) for request in work[:2]]
            given_up = replace(work[0], max_tokens=60, abort_after=4)
            mixed = server.client.complete([*warm, *work[2:], given_up], 60.0)
            assert [s.error for s in mixed[:4]] == [None] * 4
            found[name] += [s.token_ids for s in mixed[2:4]] + [s.token_ids for s in server.client.complete(work[:1], 60.0)]
            logs[name] = server.log_path.read_text("utf-8", "replace").split("\n")
    assert found["ahead"] == found["plain"]
    assert sum(line.startswith("ahead") for line in logs["ahead"]) > 2 * 60, "two ranks, each ahead in most steps"


def test_what_a_patch_answers_in_passing_adds_to_what_it_may_save(engine_sources) -> None:
    """One graph launch takes the host time of every operator with it, whatever rule counted it."""
    found = [
        Finding(name, name.partition(":")[0], status, name, bound_us=us, per=per)
        for name, status, us, per in (
            ("launch-bound-decode", Status.FOUND, 17_000.0, "token"),
            ("autograd-recording", Status.FOUND, 12_000.0, "token"),
            ("unfused-chains:rmsnorm", Status.FOUND, 2_000.0, "token"),
            ("roofline-gap", Status.FOUND, 1_000.0, "token"),  # products take what they took
            ("split-products", Status.FOUND, 800.0, "request"),
            ("redundant-copies", Status.NOT_FOUND, None, "token"),
            ("allocations", Status.FOUND, None, "token"),
        )
    ]
    playbook = Playbook(only=["cuda-graph-capture"], device="cuda", tp=1)
    series = playbook.propose(ProposeContext(engine_sources, found, budget=Budget(token_us=60_000.0, margin=0.02)))
    assert isinstance(series, Series)
    assert [p.predicted_us for p in series.patches] == [0.0, 31_000.0, 0.0]
    assert series.patches[1].finding_ids == ("launch-bound-decode", "autograd-recording", "unfused-chains:rmsnorm")
    assert series.patches[2].finding_ids == ("launch-bound-decode",)


def test_the_series_that_answers_most_comes_first_not_the_dearest_single_finding(engine_sources, act) -> None:
    bounds = {"roofline-gap": 1_050.0, "redundant-copies": 690.0, "unfused-chains:rmsnorm": 420.0, "unfused-chains:rotary-embedding-with-cache-lookup": 220.0}
    found = [Finding(name, name.partition(":")[0], Status.FOUND, name, bound_us=us, skills=("skinny-gemm" if "roof" in name else "fused-kernels",)) for name, us in bounds.items()]
    playbook = Playbook(only=["fused-kernels", "skinny-gemm", "merge-projections"], device="cuda", tp=1)
    sources, titles = act(act(engine_sources, "cuda-graph-capture"), "fused-kernels"), []
    for _ in range(2):
        series = playbook.propose(ProposeContext(sources, found, budget=Budget(token_us=8_000.0, margin=0.02)))
        assert isinstance(series, Series)
        titles.append(max(((p.title, p.predicted_us) for p in series.patches), key=lambda pair: pair[1] or 0.0))
        sources = act(sources, "fused-kernels", id="unfused-chains:rotary")
    assert titles == [("One kernel for norm, rotation and cache write of heads", 1_330.0), ("Products of few rows at the memory bandwidth", 1_050.0)]
