"""Seeds, probabilities, top-k and top-p, minimum lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from engine import sampler
from engine.request import SamplingParams, Sequence

SEEDED = {"temperature": 1.0, "seed": 1234, "max_tokens": 16}


def test_a_seed_gives_the_same_tokens_at_every_tp_and_batch_size(server, local, random_prompts):
    prompts = random_prompts([12, 30, 7, 20], seed=20)
    (alone,) = local.generate(prompts[:1], **SEEDED)
    crowd = local.generate(prompts, **SEEDED)
    assert crowd[0].tokens == alone.tokens
    assert alone.tokens != local.generate(prompts[:1], **SEEDED | {"seed": 99})[0].tokens
    for tp in (1, 2, 4):
        answer = server(tp).complete(prompt=prompts[0], **SEEDED)
        assert answer["choices"][0]["token_ids"] == alone.tokens, tp


def test_without_a_seed_draws_differ(local, random_prompts):
    (prompt,) = random_prompts([12])
    results = local.generate([prompt] * 3, temperature=2.0, max_tokens=12)
    assert len({tuple(r.tokens) for r in results}) > 1


def test_frequencies_at_temperature_1_follow_the_model(reference, random_prompts):
    (prompt,) = random_prompts([25], seed=2)
    logits = reference.logits(prompt, [0])
    expected = logits[0].double().softmax(-1).numpy()
    tokens = _draw_many(logits, 20_000, temperature=1.0)
    order = np.argsort(-expected)
    frequent = order[: int((expected * len(tokens) >= 5).sum())]
    observed = np.array([(tokens == t).sum() for t in frequent])
    wanted = expected[frequent] * len(tokens)
    rest_observed, rest_wanted = len(tokens) - observed.sum(), len(tokens) - wanted.sum()
    assert len(frequent) > 20
    p = stats.chisquare([*observed, rest_observed], [*wanted, rest_wanted]).pvalue
    assert p > 1e-3


def test_temperature_sharpens(reference, random_prompts):
    (prompt,) = random_prompts([25], seed=2)
    logits = reference.logits(prompt, [0])
    expected = (logits[0].double() / 0.5).softmax(-1)
    tokens = _draw_many(logits, 4_000, temperature=0.5)
    top = int(expected.argmax())
    p = float(expected[top])
    share = float((tokens == top).mean())
    assert abs(share - p) < 5 * (p * (1 - p) / len(tokens)) ** 0.5


@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.5}, {"top_k": 1}, {"top_p": 1e-9}]
)
def test_no_token_outside_top_k_and_top_p(settings, reference, random_prompts):
    (prompt,) = random_prompts([25], seed=2)
    logits = reference.logits(prompt, [0])
    tokens = _draw_many(logits, 3_000, temperature=1.0, **settings)
    probs = logits[0].double().softmax(-1).numpy()
    order = np.argsort(-probs)[: settings.get("top_k", len(probs))]
    mass = probs[order] / probs[order].sum()
    allowed = order[(np.cumsum(mass) - mass) < settings.get("top_p", 1.0)]
    assert set(tokens.tolist()) <= set(allowed.tolist())
    if len(allowed) <= 5:  # few enough that each must show up
        assert set(tokens.tolist()) == set(allowed.tolist())


def test_every_request_of_a_batch_keeps_its_own_settings(reference, random_prompts):
    (prompt,) = random_prompts([25], seed=2)
    logits = reference.logits(prompt, [0]).expand(3, -1)
    top2 = set(logits[0].topk(2).indices.tolist())
    seen = []
    for seed in range(60):
        rows = [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=5.0, seed=seed),
            SamplingParams(temperature=5.0, top_k=2, seed=seed),
        ]
        seen.append(sampler.sample(logits, [Sequence(i, prompt, p) for i, p in enumerate(rows)], ()).tolist())
    greedy, free, narrow = (set(column) for column in zip(*seen, strict=True))
    assert greedy == {int(logits[0].argmax())}
    assert narrow == top2
    assert len(free) > 30


def test_a_temperature_close_to_zero_is_greedy(reference, random_prompts):
    logits = reference.logits(random_prompts([25], seed=2)[0], [0]).expand(2, -1)
    rows = [SamplingParams(temperature=1e-38, seed=1), SamplingParams(temperature=1e-4, seed=1)]
    tokens = sampler.sample(logits, [Sequence(i, [0], p) for i, p in enumerate(rows)], ()).tolist()
    assert tokens == [int(logits[0].argmax())] * 2


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-30])
def test_extreme_draws_stay_inside_the_kept_tokens(uniform):
    probs = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    token = sampler.draw(probs, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([uniform]))
    assert token.item() in {2, 3}


def test_end_of_text_is_withheld_until_min_tokens():
    logits = torch.zeros(2, 6)
    logits[:, 4] = 5.0  # would win
    logits[:, 1] = 1.0
    early = Sequence(0, [1], SamplingParams(temperature=0.0, min_tokens=1))
    late = Sequence(1, [1], SamplingParams(temperature=0.0))
    assert sampler.sample(logits, [early, late], (4,)).tolist() == [1, 4]
    early.output_ids.append(1)
    assert sampler.sample(logits, [early, late], (4,)).tolist() == [4, 4]


def _draw_many(logits: torch.Tensor, count: int, **settings: float) -> np.ndarray:
    """One draw each for `count` requests with seeds 0, 1, 2, ... and the same logits [1, vocab]."""
    tokens = []
    for first in range(0, count, 1000):
        sequences = [
            Sequence(seed, [0], SamplingParams(seed=seed, **settings))  # type: ignore[arg-type]
            for seed in range(first, first + 1000)
        ]
        tokens += sampler.sample(logits.expand(1000, -1), sequences, ()).tolist()
    return np.array(tokens)
