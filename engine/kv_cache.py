"""The paged KV cache: the pages' memory on each rank, and rank 0's book of who holds which page.

Page n of every layer on every rank belongs to the same sequence, so one book serves all.
Not for: deciding who may have pages (`scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages on this rank: k and v are [blocks, block_size, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at `slots` [T] (block * block_size + offset)."""
        # Detached: the cache outlives the step and must not keep the step's graph alive.
        self.k.view(-1, *self.k.shape[2:])[slots] = k.detach()
        self.v.view(-1, *self.v.shape[2:])[slots] = v.detach()


def kv_heads_per_rank(config: ModelConfig, tp_size: int) -> int:
    """KV heads on one rank; at least one, replicated when there are more ranks than heads."""
    return max(1, config.num_key_value_heads // tp_size)


def block_bytes(config: ModelConfig, tp_size: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers on one rank."""
    per_token = 2 * kv_heads_per_rank(config, tp_size) * config.head_dim * dtype.itemsize
    return per_token * block_size * config.num_hidden_layers


def allocate_caches(
    config: ModelConfig, tp: TensorParallel, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[LayerCache]:
    """One LayerCache per layer. Zeroed: attention multiplies unwritten slots by a weight of 0, and 0 * NaN is NaN."""
    shape = (num_blocks, block_size, kv_heads_per_rank(config, tp.size), config.head_dim)
    return [
        LayerCache(
            torch.zeros(shape, dtype=dtype, device=tp.device),
            torch.zeros(shape, dtype=dtype, device=tp.device),
        )
        for _ in range(config.num_hidden_layers)
    ]


class BlockManager:
    """Hands out pages and takes them back. A sequence's table lists its pages in order of position."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Pages that `tokens` positions fill."""
        return -(-tokens // self.block_size)

    def can_grow(self, table: list[int], tokens: int) -> bool:
        """Whether `table` can be made to hold `tokens` positions."""
        return self.blocks_for(tokens) - len(table) <= len(self._free)

    def grow(self, table: list[int], tokens: int) -> None:
        """Append pages until `table` holds `tokens` positions. Raises IndexError when the pool is empty."""
        while len(table) < self.blocks_for(tokens):
            table.append(self._free.popleft())

    def release(self, table: list[int]) -> None:
        """Give all pages of `table` back and empty it."""
        self._free.extend(table)
        table.clear()
