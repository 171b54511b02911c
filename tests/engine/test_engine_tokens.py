"""Greedy tokens and logits equal transformers' Qwen3 in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_client import RunningServer
from engine_local import LocalEngine
from engine_reference import Reference

BOUNDARIES = [15, 16, 17, 31, 32, 33, 1, 48]  # pages hold 16 tokens


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_random_prompts_at_page_boundaries_decode_greedily_as_transformers_does(
    tp, server, reference, random_prompts
):
    prompts = random_prompts(BOUNDARIES)
    outputs = server(tp).tokens_of(prompts, 20)
    assert [len(output) for output in outputs] == [20] * len(prompts)
    assert all(reference.accepts(p, o) for p, o in zip(prompts, outputs, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_log_probabilities_through_the_cache_are_within_a_thousandth(tp, server, reference, random_prompts):
    (prompt,) = random_prompts([30], seed=1)
    answer = server(tp).complete(
        prompt=prompt, max_tokens=6, logprobs=-1, return_tokens_as_token_ids=True
    )
    choice = answer["choices"][0]
    expected = reference.logits(prompt, choice["token_ids"]).log_softmax(-1)
    for row, table in zip(expected, choice["logprobs"]["top_logprobs"], strict=True):
        found = torch.tensor([table[f"token_id:{i}"] for i in range(len(row))])
        assert (found - row).abs().max() < 1e-3


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_batches_of_mixed_lengths(batch, local: LocalEngine, reference, random_prompts):
    prompts = random_prompts([7, 40, 3, 90, 16, 1, 65, 33][:batch], seed=batch)
    results = local.generate(prompts, max_tokens=18)
    assert all(reference.accepts(p, r.tokens) for p, r in zip(prompts, results, strict=True))


def test_more_than_256_tokens_of_prompt_and_of_output(local: LocalEngine, reference, random_prompts):
    prompts = random_prompts([300, 20], seed=3)
    results = local.generate(prompts, max_tokens=270)
    assert all(reference.accepts(p, r.tokens) for p, r in zip(prompts, results, strict=True))


def test_prompts_joining_a_running_batch_change_nothing(local: LocalEngine, reference, random_prompts):
    prompts = random_prompts([10, 33, 5, 64], seed=4)
    ids = []
    for prompt in prompts:  # each is prefilled in a step in which the earlier ones decode
        ids.append(local.add(prompt, max_tokens=25))
        for _ in range(3):
            local.step()
    local.run()
    assert all(
        reference.accepts(p, local.results[i].tokens) for p, i in zip(prompts, ids, strict=True)
    )


def test_fluent_text_from_a_chat(server, reference):
    status, answer = server(1).request(
        "POST",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Explain lambda in Python."}],
            "temperature": 0,
            "max_completion_tokens": 24,
            "return_token_ids": True,
        },
    )
    assert status == 200
    choice = answer["choices"][0]
    assert choice["message"]["content"].startswith("\nLambdas\n*******\n")
    assert reference.accepts(answer["prompt_token_ids"], choice["token_ids"])


def test_shared_kv_heads_padded_vocabulary_and_several_files(odd_model, tmp_path, random_prompts):
    reference = Reference(odd_model)
    prompts = random_prompts([5, 16, 20], vocab=301)
    ours = LocalEngine(odd_model, num_kv_blocks=64)
    single = [result.tokens for result in ours.generate(prompts, max_tokens=12)]
    assert all(reference.accepts(p, o) for p, o in zip(prompts, single, strict=True))
    server = RunningServer(odd_model, 4, tmp_path).wait_ready()
    try:
        assert server.tokens_of(prompts, 12) == single
        assert server.request("POST", "/v1/completions", {"prompt": "text"})[1]["error"]["param"] == "prompt"
    finally:
        server.stop()


def test_memory_does_not_grow_with_the_steps(local: LocalEngine, random_prompts):
    local.add(random_prompts([10])[0], max_tokens=200)
    for _ in range(40):
        local.step()
    early = _resident_bytes()
    local.run()
    assert _resident_bytes() - early < 2 << 20  # one step's graph holds some 0.1 MB
    assert all(cache.k.grad_fn is None for cache in local.core.worker.runner.caches)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_prompt_of_4096_tokens(odd_model, random_prompts):
    engine = LocalEngine(odd_model, num_kv_blocks=260, max_model_len=4160)
    (prompt,) = random_prompts([4096], vocab=301)
    (result,) = engine.generate([prompt], max_tokens=4)
    assert Reference(odd_model).accepts(prompt, result.tokens)


def _sharpen_one_layer(layers):
    layers[1].self_attn.q_norm.weight *= 1.1


def _skip_one_norm(layers):
    layers[2].self_attn.k_norm.weight.fill_(1.0)


def _lose_a_partial_sum(layers):
    layers[3].self_attn.o_proj.weight[:, -64:] = 0.0


def _swap_two_kv_heads(layers):
    rows = layers[0].self_attn.k_proj.weight
    rows[:64] = rows[:64].roll(32, 0)


@pytest.mark.parametrize(
    "fault", [_sharpen_one_layer, _skip_one_norm, _lose_a_partial_sum, _swap_two_kv_heads]
)
def test_the_reference_notices_a_fault(fault, tiny, reference, random_prompts):
    engine = LocalEngine(tiny, num_kv_blocks=64)
    with torch.no_grad():
        fault(engine.core.worker.runner.model.model.layers)
    prompts = random_prompts([15, 33, 48, 7, 60, 20])
    results = engine.generate(prompts, max_tokens=24)
    assert not all(reference.accepts(p, r.tokens) for p, r in zip(prompts, results, strict=True))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_in_bfloat16_tokens_differ_from_transformers_only_at_near_ties(device, tiny, random_prompts):
    options = {} if device == "cpu" else {"gpu_memory_utilization": 0.2}
    engine = LocalEngine(tiny, device=device, dtype="bfloat16", **options)
    reference = Reference(tiny, torch.bfloat16, device)
    prompts = random_prompts(BOUNDARIES)
    gaps = []
    for prompt, result in zip(prompts, engine.generate(prompts, max_tokens=20), strict=True):
        logits = reference.logits(prompt, result.tokens).float().cpu()
        chosen = logits.gather(1, torch.tensor(result.tokens).unsqueeze(1)).squeeze(1)
        gaps += (logits.max(-1).values - chosen).tolist()
    assert max(gaps) < 0.5  # bfloat16 moves these logits by up to 0.45, the mildest fault by 1.1
    assert sum(gap == 0 for gap in gaps) > 0.9 * len(gaps)


@pytest.mark.gpu
@needs_gpu
def test_cuda_in_float32_decodes_as_transformers_does(tiny, reference, random_prompts):
    engine = LocalEngine(tiny, device="cuda", dtype="float32", gpu_memory_utilization=0.2)
    prompts = random_prompts(BOUNDARIES)
    results = engine.generate(prompts, max_tokens=20)
    assert all(reference.accepts(p, r.tokens) for p, r in zip(prompts, results, strict=True))
