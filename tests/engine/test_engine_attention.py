"""Both attention backends against attention written out, and the choice between them."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from engine import attention
from engine.attention import AttentionMetadata, FlashAttention, SdpaAttention, choose_backend
from engine.config import ConfigError
from engine.kv_cache import LayerCache

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention; the queries are the last of the keys' positions. q [m, heads, d], k, v [n, kv_heads, d]."""
    k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
    v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) / DIM**0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hmn,nhd->mhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def fake_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """flash_attn_varlen_func as its documentation says it works."""
    assert causal and cu_seqlens_q.dtype == torch.int32
    bounds = list(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False))
    assert max_seqlen_q == max_seqlen_k == max(b - a for a, b in bounds)
    return torch.cat([written_out(q[a:b], k[a:b], v[a:b]) for a, b in bounds])


def fake_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
    """flash_attn_with_kvcache likewise. q [G, 1, heads, d]."""
    assert causal and cache_seqlens.dtype == block_table.dtype == torch.int32
    rows = []
    for i, length in enumerate(cache_seqlens.tolist()):
        k = k_cache[block_table[i].long()].flatten(0, 1)[:length]
        v = v_cache[block_table[i].long()].flatten(0, 1)[:length]
        rows.append(written_out(q[i], k, v))
    return torch.stack(rows)


BACKENDS = [SdpaAttention(), FlashAttention("fake", fake_varlen, fake_with_kvcache)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize(
    ("context", "generation"), [([5, 1, 8], []), ([], [4, 5, 1, 13]), ([3], [9, 2]), ([1], [1])]
)
def test_a_step_of_prompts_and_generating_sequences(backend, context, generation):
    torch.manual_seed(len(context) + 10 * len(generation))
    cache = LayerCache(torch.randn(40, BLOCK, KV_HEADS, DIM), torch.randn(40, BLOCK, KV_HEADS, DIM))
    free = torch.randperm(40).tolist()  # other sequences' data lies everywhere
    q, k, v, slots, expected, tables = [], [], [], [], [], []
    for length in context:
        keys, values = torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, DIM)
        query = torch.randn(length, HEADS, DIM)
        table = [free.pop() for _ in range(-(-length // BLOCK))]
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]
        q, k, v = [*q, query], [*k, keys], [*v, values]
        expected.append(written_out(query, keys, values))
    for length in generation:
        keys, values = torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, DIM)
        query = torch.randn(1, HEADS, DIM)
        table = [free.pop() for _ in range(-(-length // BLOCK))]
        where = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])
        cache.write(keys[:-1], values[:-1], where[:-1])
        slots.append(int(where[-1]))
        q, k, v = [*q, query], [*k, keys[-1:]], [*v, values[-1:]]
        tables.append(table)
        expected.append(written_out(query, keys, values))
    longest = max((len(t) for t in tables), default=0)
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor(slots),
        context_starts=torch.tensor([0, *context]).cumsum(0).int(),
        num_context_tokens=sum(context),
        block_tables=torch.tensor([t + [0] * (longest - len(t)) for t in tables], dtype=torch.int32),
        seq_lens=torch.tensor(generation, dtype=torch.int32),
    )
    cache.write(torch.cat(k), torch.cat(v), metadata.slot_mapping)
    found = backend.attend(torch.cat(q), torch.cat(k), torch.cat(v), cache, metadata)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_on_a_cpu_sdpa_is_taken_and_the_others_reasons_are_kept():
    backend, block_size, refused = choose_backend("auto", "cpu", None)
    assert (backend.name, block_size) == ("sdpa", 16)
    assert set(refused) == {"vllm_flash_attn", "flash_attn"}
    with pytest.raises(ConfigError, match="no CUDA device in use"):
        choose_backend("flash", "cpu", None)


def test_a_package_without_its_compiled_extension_is_passed_over(monkeypatch):
    names = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    package = types.SimpleNamespace(**dict.fromkeys(names, fake_varlen))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    backend, _, refused = choose_backend("auto", "cuda", None)
    assert backend.name == "sdpa"
    assert "flash_attn_2_cuda" in refused["flash_attn"]
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", types.ModuleType("flash_attn_2_cuda"))
    backend, block_size, _ = choose_backend("auto", "cuda", None)
    assert (backend.name, block_size) == ("flash_attn", 256)
    backend, block_size, refused = choose_backend("auto", "cuda", 16)
    assert (backend.name, block_size) == ("sdpa", 16)
    assert "not a multiple of 256" in refused["flash_attn"]
    assert attention._FLASH_BUILDS[0][0] in refused
