"""One rank's computation of a step: plan -> tensors -> forward -> logits -> tokens.

Every rank runs the same plan; rank 0 samples and the tokens are broadcast, so that each rank can feed them
into the next step. Not for: deciding what runs (`scheduler.py`) or what becomes of the tokens (`core.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine import sampler
from engine.attention import AttentionMetadata
from engine.kv_cache import LayerCache
from engine.model import Qwen3ForCausalLM
from engine.parallel import TensorParallel
from engine.request import Sequence, StepPlan, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepInput:
    """A plan as tensors. T tokens of N sequences."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    last_tokens: torch.Tensor  # [N] index of each sequence's last token: its logits are wanted
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: list[int]  # one per sequence, in the plan's order
    logprobs: list[TokenLogprobs | None]


class ModelRunner:
    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tp: TensorParallel,
        caches: list[LayerCache],
        block_size: int,
    ) -> None:
        self.model = model
        self.tp = tp
        self.caches = caches
        self.block_size = block_size
        self.newest: dict[int, int] = {}  # sequence id -> its newest token

    def step(self, plan: StepPlan, sequences: list[Sequence]) -> StepResult:
        """Run `plan`. `sequences`, needed for sampling, are known on rank 0 only (elsewhere: empty)."""
        inputs = self.prepare(plan)
        hidden = self.model(inputs.input_ids, inputs.positions, self.caches, inputs.attention)
        logits = self.model.compute_logits(hidden[inputs.last_tokens])
        tokens = self.sample(logits, sequences)
        self.remember(plan, tokens)
        logprobs = sampler.logprobs_of(logits, tokens, sequences) if sequences else []
        return StepResult(tokens, logprobs)

    def prepare(self, plan: StepPlan) -> StepInput:
        """Build the step's tensors from the plan's lists."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        context_starts = [0]
        for item in plan.context:
            length = len(item.token_ids)
            input_ids.extend(item.token_ids)
            positions.extend(range(length))
            slots.extend(self._slot(item.block_table, position) for position in range(length))
            context_starts.append(len(input_ids))
        for item in plan.generation:
            input_ids.append(self.newest[item.seq_id])
            positions.append(item.position)
            slots.append(self._slot(item.block_table, item.position))
        generated = range(context_starts[-1], len(input_ids))
        return StepInput(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            last_tokens=self._tensor([start - 1 for start in context_starts[1:]] + list(generated)),
            attention=AttentionMetadata(
                slot_mapping=self._tensor(slots),
                context_starts=self._tensor(context_starts, torch.int32),
                num_context_tokens=context_starts[-1],
                block_tables=self._block_tables([item.block_table for item in plan.generation]),
                seq_lens=self._tensor([item.position + 1 for item in plan.generation], torch.int32),
            ),
        )

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Sample on rank 0 and tell the other ranks. logits [N, vocab] -> N token ids."""
        if self.tp.rank == 0:
            tokens = sampler.sample(logits, sequences, self.model.config.eos_token_ids)
        else:
            tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        return self.tp.broadcast(tokens).tolist()

    def remember(self, plan: StepPlan, tokens: list[int]) -> None:
        """Keep each sequence's newest token for the next step; forget those that ended."""
        for seq_id in plan.finished:
            self.newest.pop(seq_id, None)
        items = [*plan.context, *plan.generation]
        for item, token in zip(items, tokens, strict=True):
            self.newest[item.seq_id] = token

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.tp.device)

    def _block_tables(self, tables: list[list[int]]) -> torch.Tensor:
        longest = max((len(table) for table in tables), default=0)
        padded = [table + [0] * (longest - len(table)) for table in tables]
        return torch.tensor(padded, dtype=torch.int32, device=self.tp.device)
