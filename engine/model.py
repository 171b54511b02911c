"""Qwen3, dense, as one rank of a tensor-parallel group computes it.

Parameter names are those of the Hugging Face checkpoint, so loading needs no table of names. How each
parameter is cut over the ranks stands beside it as a `Shard`. Activations of a step are flat: T tokens of
all its sequences, one after the other.

Not for: choosing what runs in a step (`scheduler.py`), building its tensors (`runner.py`), attention
kernels (`attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention import AttentionBackend, AttentionMetadata
from engine.config import ModelConfig
from engine.kv_cache import LayerCache
from engine.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class Shard:
    """How a parameter is cut: dimension `dim` of the full tensor, `full` long, holds `count` parts."""

    dim: int
    full: int
    count: int
    index: int


class Linear(nn.Module):
    """y = x W^T with W [out, in]: this rank's rows (`shard.dim` 0) or columns (`shard.dim` 1)."""

    def __init__(self, out_features: int, in_features: int, shard: Shard) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.shard = shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def column_parallel(out_features: int, in_features: int, parts: int, index: int) -> Linear:
    """Output features are split: each rank computes its own."""
    return Linear(out_features // parts, in_features, Shard(0, out_features, parts, index))


def row_parallel(out_features: int, in_features: int, parts: int, index: int) -> Linear:
    """Input features are split: the ranks' outputs must be summed."""
    return Linear(out_features, in_features // parts, Shard(1, in_features, parts, index))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the mean square in float32 (as transformers does it)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        variance = x32.pow(2).mean(-1, keepdim=True)
        return self.weight * (x32 * torch.rsqrt(variance + self.eps)).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary positions by rotating the two halves of each head (Su et al., arXiv 2104.09864)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def build(self, positions: int, device: torch.device) -> None:
        """Fill the tables [positions, head_dim] in float32; called once. On the CPU, for the same bits everywhere."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / self.theta**exponents)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim], positions [T] -> same shape."""
        cos = self.cos[positions].unsqueeze(1).to(x.dtype)
        sin = self.sin[positions].unsqueeze(1).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return x * cos + rotated * sin


class Attention(nn.Module):
    """Grouped-query attention with a norm on each query and key head; this rank's heads only."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, backend: AttentionBackend, rotary: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.tp = tp
        self.backend = backend
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // tp.size
        # With more ranks than KV heads, neighbouring ranks hold the same one.
        kv_parts = min(tp.size, config.num_key_value_heads)
        kv_index = tp.rank * kv_parts // tp.size
        self.num_kv_heads = config.num_key_value_heads // kv_parts
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = column_parallel(q_size, config.hidden_size, tp.size, tp.rank)
        self.k_proj = column_parallel(kv_size, config.hidden_size, kv_parts, kv_index)
        self.v_proj = column_parallel(kv_size, config.hidden_size, kv_parts, kv_index)
        self.o_proj = row_parallel(config.hidden_size, q_size, tp.size, tp.rank)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotary = rotary

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        q = self.q_proj(hidden).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(hidden).view(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(hidden).view(-1, self.num_kv_heads, self.head_dim)
        q = self.rotary(self.q_norm(q), positions)
        k = self.rotary(self.k_norm(k), positions)
        cache.write(k, v, metadata.slot_mapping)
        out = self.backend.attend(q, k, v, cache, metadata)
        out = self.o_proj(out.reshape(-1, self.num_heads * self.head_dim))
        return self.tp.all_reduce(out)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the intermediate features split over the ranks."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = column_parallel(inner, hidden, tp.size, tp.rank)
        self.up_proj = column_parallel(inner, hidden, tp.size, tp.rank)
        self.down_proj = row_parallel(hidden, inner, tp.size, tp.rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self.gate_proj(x))
        up = self.up_proj(x)
        out = self.down_proj(gate * up)
        return self.tp.all_reduce(out)


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on the normed stream and added to it."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, backend: AttentionBackend, rotary: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, tp, backend, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, tp)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, cache, metadata)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class VocabParallel(nn.Module):
    """A table [vocab, hidden] whose rows are split over the ranks; the last rank's is padded with zeros."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.rows = -(-config.vocab_size // tp.size)
        self.first = tp.rank * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, config.hidden_size))
        self.shard = Shard(0, config.vocab_size, tp.size, tp.rank)


class VocabParallelEmbedding(VocabParallel):
    """Look up the rows this rank holds; zeros for the rest, then sum over the ranks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first
        outside = (local < 0) | (local >= self.rows)
        out = F.embedding(local.masked_fill(outside, 0), self.weight)
        out = out.masked_fill(outside.unsqueeze(-1), 0.0)
        return self.tp.all_reduce(out)


class VocabParallelHead(VocabParallel):
    """Logits of the rows this rank holds."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)


class Qwen3Model(nn.Module):
    """Token ids to normed hidden states."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, backend: AttentionBackend) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config, tp)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(
            DecoderLayer(config, tp, backend, self.rotary) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[LayerCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, positions, cache, metadata)
        return self.norm(hidden)


class Qwen3ForCausalLM(nn.Module):
    """The model with its head; tied embeddings share one parameter."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.model = Qwen3Model(config, tp, backend)
        self.lm_head = VocabParallelHead(config, tp)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[LayerCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """input_ids, positions [T] -> hidden states [T, hidden]; writes the KV cache."""
        return self.model(input_ids, positions, caches, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] -> logits [N, vocab], on every rank."""
        logits = self.tp.all_gather(self.lm_head(hidden))
        return logits[:, : self.config.vocab_size]
