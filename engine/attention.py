"""Attention over the paged cache, behind one function, and the choice of what computes it.

A step's tokens are ordered: first the prompts of the context sequences, then one token of each generating
sequence. The choice is made once, at start, by importing the compiled extension (a package of the right
name may lack it), and is reported in /v1/models.

Not for: projections, norms and rotary positions (`model.py`).
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.config import ConfigError
from engine.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the step's tokens belong. C context sequences, G generating ones, T tokens in all."""

    slot_mapping: torch.Tensor  # [T] slot of each token in the paged cache
    context_starts: torch.Tensor  # [C + 1] int32, cumulative: first token of each prompt
    num_context_tokens: int
    block_tables: torch.Tensor  # [G, max_blocks] int32, padded with page 0
    seq_lens: torch.Tensor  # [G] int32, positions in the cache, this step's token included


class AttentionBackend(Protocol):
    """Computes causal attention; the step's keys and values are already in the cache."""

    name: str
    copies_pages: bool  # a step needs memory for a copy of the pages of its generating sequences

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        ...


class SdpaAttention:
    """PyTorch's scaled_dot_product_attention: prompts one by one, generating sequences in one padded batch."""

    name = "sdpa"
    copies_pages = True

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        split = metadata.num_context_tokens
        outputs = []
        if split > 0:
            outputs.append(self._context(q[:split], k[:split], v[:split], metadata))
        if split < q.shape[0]:
            outputs.append(self._generation(q[split:], cache, metadata))
        return torch.cat(outputs)

    def _context(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        starts = metadata.context_starts.tolist()
        outputs = []
        for first, last in itertools.pairwise(starts):
            out = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1).unsqueeze(0),
                k[first:last].transpose(0, 1).unsqueeze(0),
                v[first:last].transpose(0, 1).unsqueeze(0),
                is_causal=True,
                enable_gqa=True,
            )
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)

    def _generation(self, q: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata) -> torch.Tensor:
        longest = int(metadata.seq_lens.max().item())
        k = cache.k[metadata.block_tables].flatten(1, 2)[:, :longest]  # [G, longest, kv_heads, head_dim]
        v = cache.v[metadata.block_tables].flatten(1, 2)[:, :longest]
        mask = torch.arange(longest, device=q.device) < metadata.seq_lens.unsqueeze(1)
        # The query heads that share a KV head are rows of one query: no copies of keys and values for them.
        out = F.scaled_dot_product_attention(
            q.unflatten(1, (k.shape[2], -1)),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask[:, None, None, :],
        )
        return out.flatten(1, 2)


class FlashAttention:
    """flash-attn, or vLLM's build of it (which takes small pages)."""

    copies_pages = False

    def __init__(self, name: str, varlen: Callable[..., Any], with_kvcache: Callable[..., Any]) -> None:
        self.name = name
        self._varlen = varlen
        self._with_kvcache = with_kvcache

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        split = metadata.num_context_tokens
        outputs = []
        if split > 0:
            starts = metadata.context_starts
            longest = int((starts[1:] - starts[:-1]).max().item())
            outputs.append(
                self._varlen(
                    q[:split],
                    k[:split],
                    v[:split],
                    cu_seqlens_q=starts,
                    cu_seqlens_k=starts,
                    max_seqlen_q=longest,
                    max_seqlen_k=longest,
                    causal=True,
                )
            )
        if split < q.shape[0]:
            out = self._with_kvcache(
                q[split:].unsqueeze(1),
                cache.k,
                cache.v,
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.block_tables,
                causal=True,
            )
            outputs.append(out.squeeze(1))
        return torch.cat(outputs)


# (name, compiled extension, module with the functions, smallest page its paged kernel takes)
_FLASH_BUILDS = (
    ("vllm_flash_attn", "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn.flash_attn_interface", 16),
    ("flash_attn", "flash_attn_2_cuda", "flash_attn", 256),
)


def choose_backend(
    wanted: str, device: str, block_size: int | None
) -> tuple[AttentionBackend, int, dict[str, str]]:
    """-> backend, block size, and why each build that was not taken was not.

    `auto` takes the first flash build that loads on CUDA, else SDPA. Raises ConfigError when `flash` is
    wanted and cannot be had, or when the page size does not suit it.
    """
    refused: dict[str, str] = {}
    if wanted == "sdpa":
        return SdpaAttention(), block_size or 16, refused
    for name, extension, module, page in _FLASH_BUILDS:
        if device != "cuda":
            refused[name] = "no CUDA device in use"
        elif block_size is not None and block_size % page:
            refused[name] = f"block size {block_size} is not a multiple of {page}"
        else:
            functions, why = _load_flash(extension, module)
            if functions is not None:
                return FlashAttention(name, *functions), block_size or page, refused
            refused[name] = why
    if wanted == "flash":
        raise ConfigError(f"--attention-backend flash: {refused}; valid here: auto, sdpa")
    return SdpaAttention(), block_size or 16, refused


def _load_flash(extension: str, module: str) -> tuple[tuple[Any, Any] | None, str]:
    try:
        importlib.import_module(extension)
        functions = importlib.import_module(module)
        return (functions.flash_attn_varlen_func, functions.flash_attn_with_kvcache), ""
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # OSError: built for another torch
        return None, f"{type(error).__name__}: {error}"
