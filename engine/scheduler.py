"""Decides which sequences take part in a step. Runs on rank 0 only; touches no tensor.

Continuous batching: every step holds all running sequences (one token each) and the waiting prompts that
fit, first come first served. A sequence that needs a page when none is free preempts the youngest running
one, which later recomputes its cache from prompt and output; its text does not change.

Not for: what comes out of a step (`core.py`).
"""

from __future__ import annotations

from collections import deque

from engine.config import Limits
from engine.kv_cache import BlockManager
from engine.request import ContextItem, GenerationItem, Sequence, StepPlan


class RequestTooLarge(ValueError):
    """The request could not be served even if it were alone; the message says what it needs."""


class Scheduler:
    def __init__(self, limits: Limits, blocks: BlockManager) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self._finished: list[int] = []

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise RequestTooLarge unless prompt and output fit the model length and the whole page pool."""
        total = prompt_tokens + max_tokens
        if total > self.limits.max_model_len:
            raise RequestTooLarge(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together {total}; "
                f"this model's maximum length is {self.limits.max_model_len} tokens"
            )
        needed = self.blocks.blocks_for(total - 1)  # the last token's key and value are never needed
        if needed > self.blocks.num_blocks:
            raise RequestTooLarge(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, which needs {needed} "
                f"KV cache blocks; the whole cache has {self.blocks.num_blocks}"
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """-> the plan and its sequences in the plan's order. At least one, when there is work."""
        generating = self._grow_running()
        admitted = self._admit(self.limits.max_num_batched_tokens - len(generating))
        self.running.extend(admitted)
        plan = StepPlan(
            context=[ContextItem(s.id, s.token_ids(), list(s.block_table)) for s in admitted],
            generation=[GenerationItem(s.id, s.num_cached, list(s.block_table)) for s in generating],
            finished=self._finished,
        )
        self._finished = []
        sequences = admitted + generating
        for sequence in sequences:
            sequence.num_cached = len(sequence)
        return plan, sequences

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a running or waiting sequence and give its pages back."""
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.release(sequence.block_table)
        self._finished.append(sequence.id)

    def _grow_running(self) -> list[Sequence]:
        """Give every running sequence room for one more position, preempting the youngest where needed."""
        kept: list[Sequence] = []
        candidates = deque(self.running)
        while candidates:
            sequence = candidates.popleft()
            while not self.blocks.can_grow(sequence.block_table, len(sequence)):
                victim = candidates.pop() if candidates else sequence
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                self.blocks.grow(sequence.block_table, len(sequence))
                kept.append(sequence)
        self.running = list(kept)
        return kept

    def _preempt(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.num_cached = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, budget: int) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) + len(admitted) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            tokens = len(sequence)
            if tokens > budget or not self.blocks.can_grow(sequence.block_table, tokens):
                break
            self.blocks.grow(sequence.block_table, tokens)
            admitted.append(self.waiting.popleft())
            budget -= tokens
        return admitted
