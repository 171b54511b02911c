"""The nouns of serving: sampling parameters, a sequence, the plan of a step and its outcome.

Not for: behaviour. A Sequence is changed by the scheduler and the output processor only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request wants its tokens. The server takes its defaults from here."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; -1: the whole vocabulary


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. Positions 0 .. num_cached-1 are in the KV cache."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    finish_reason: str | None = None
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.params.seed)  # None: from the operating system

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True, slots=True)
class ContextItem:
    """A prompt (after preemption: with the tokens generated so far) to prefill in one piece."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int]


@dataclass(frozen=True, slots=True)
class GenerationItem:
    """One more token for a sequence; its newest token is known to every rank from the last broadcast."""

    seq_id: int
    position: int  # of the newest token, whose key and value this step writes
    block_table: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every rank computes in one step: sent by rank 0, context items first."""

    context: list[ContextItem]
    generation: list[GenerationItem]
    finished: list[int]  # sequences that ended since the last plan

    @property
    def name(self) -> str:
        """vLLM's name of such a step in a trace."""
        tokens = sum(len(item.token_ids) for item in self.context)
        return (
            f"execute_context_{len(self.context)}({tokens})"
            f"_generation_{len(self.generation)}({len(self.generation)})"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities, of the unscaled logits, at one generated position."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Output:
    """What one step added to one request."""

    seq_id: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None
