"""Every CPU skill acts on this engine, within the envelope, once, in any order, and leaves its tokens alone."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_skills import ON_CPU

from optimizer.patching import apply_edits, changed_lines, edits_from
from optimizer.proposers.base import MAX_FILES, MAX_LINES


@pytest.mark.parametrize("name", ON_CPU)
def test_it_acts_within_the_envelope_and_its_edits_are_exact(name, engine_sources, answer) -> None:
    rewrites = answer(name, engine_sources)
    assert not isinstance(rewrites, str), rewrites
    before = engine_sources
    for step in rewrites:
        changed = {f: t for f, t in step.after.items() if before.get(f) != t}
        assert 0 < len(changed) <= MAX_FILES and 0 < changed_lines(before, changed) <= MAX_LINES
        for file, text in changed.items():
            compile(text, file, "exec", dont_inherit=True)
        assert apply_edits(before, edits_from(before, changed)) == step.after
        assert step.activation is not None and (step.activation["appear"] or step.activation["vanish"])
        before = step.after


@pytest.mark.parametrize("name", ON_CPU)
def test_a_second_time_it_declines_with_a_reason(name, engine_sources, answer, act) -> None:
    again = answer(name, act(engine_sources, name))
    assert isinstance(again, str) and len(again) > 10


def _within_the_envelope(before: dict[str, str], after: dict[str, str]) -> None:
    changed = {f: t for f, t in after.items() if before.get(f) != t}
    assert 0 < len(changed) <= MAX_FILES and 0 < changed_lines(before, changed) <= MAX_LINES
    for file, text in changed.items():
        compile(text, file, "exec", dont_inherit=True)


@pytest.mark.parametrize("seed", range(3))
def test_in_any_order_they_compose_or_decline_once_and_leave_the_tokens_alone(seed, engine_sources, answer, plain_tokens, repo, tmp_path) -> None:
    names = list(ON_CPU)
    random.Random(seed).shuffle(names)
    sources, acted = engine_sources, []
    for name in names:
        rewrites = answer(name, sources)
        if isinstance(rewrites, str):
            assert "failed" not in rewrites, f"{name} after {acted}: {rewrites}"
            continue
        for step in rewrites:
            _within_the_envelope(sources, step.after)
            sources = step.after
        acted.append(name)
    assert len(acted) >= len(ON_CPU) - 1, acted
    for name in acted:
        again = answer(name, sources)
        assert isinstance(again, str) and "failed" not in again, f"{name} acts twice after {acted}"
    assert _tokens(sources, repo / "engine/tiny_qwen3", tmp_path / "all") == plain_tokens, acted


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
sequences = [Sequence(i, [7 * n % 900 + 3 for n in range(9 + 11 * i)], SamplingParams(temperature=0.0)) for i in range(3)]
tables = [list(range(8 * i, 8 * i + 8)) for i in range(3)]
fields = StepPlan.__dataclass_fields__
greedy = {"greedy": True} if "greedy" in fields else {}
plan = StepPlan([ContextItem(s.id, s.prompt_ids, t) for s, t in zip(sequences, tables)], [], [], **greedy)
out = [runner.step(plan, sequences).tokens]
for step in range(40):
    items = [GenerationItem(s.id, len(s.prompt_ids) + step, t) for s, t in zip(sequences, tables)]
    out.append(runner.step(StepPlan([], items, [], **greedy), sequences).tokens)
print(out)
"""


def _tokens(sources: dict[str, str], model: Path, place: Path) -> str:
    for file, text in sources.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(place), str(model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def plain_tokens(engine_sources, repo, tmp_path_factory) -> str:
    return _tokens(engine_sources, repo / "engine/tiny_qwen3", tmp_path_factory.mktemp("plain") / "base")


def test_together_they_leave_the_tokens_of_a_mixed_batch_alone(engine_sources, act, plain_tokens, repo, tmp_path) -> None:
    model, base = repo / "engine/tiny_qwen3", plain_tokens
    order = [n for n in ON_CPU if n != "direct-kv-write"] + ["direct-kv-write"]
    order.insert(0, order.pop(order.index("remove-host-reads")))  # needs the lists that batch-host-copies joins
    assert _tokens(act(engine_sources, *order, "library-norm"), model, tmp_path / "all") == base
    assert len(set(itertools.chain.from_iterable(eval(base)))) > 20  # not one token for ever
