"""The engine inside the test's own process, on one rank: steps run when the test says so."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core import Abort, Add, EngineCore
from engine.ranks import Ranks
from engine.request import Output, SamplingParams, Sequence
from engine.tokenizer import Tokenizer
from engine.worker import Worker


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)


class LocalEngine:
    def __init__(self, model: Path, **options: Any) -> None:
        torch.set_num_threads(1)
        config = EngineConfig(model=model, **options)
        rendezvous = Path("/nonexistent")  # one rank meets nobody
        has_tokenizer = (model / "tokenizer.json").exists()
        tokenizer = Tokenizer(model) if has_tokenizer else None
        self.core = EngineCore(Worker(config, 0, rendezvous), Ranks(config, rendezvous), tokenizer)
        self.core.deliver = self._take
        self.results: dict[int, Result] = {}
        self._ids = itertools.count()

    def add(self, prompt: list[int], **params: Any) -> int:
        """Submit a request, greedy and without end unless `params` says otherwise -> its id."""
        settings = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 16} | params)
        self.core.scheduler.check(len(prompt), settings.max_tokens)
        sequence = Sequence(next(self._ids), prompt, settings)
        self.results[sequence.id] = Result()
        self.core.inbox.put(Add(sequence))
        return sequence.id

    def abort(self, seq_id: int) -> None:
        self.core.inbox.put(Abort(seq_id))

    def step(self) -> None:
        while not self.core.inbox.empty():
            self.core._handle(self.core.inbox.get())
        if self.core.scheduler.has_work:
            self.core.step()

    def run(self) -> None:
        """Step until nothing is left to do."""
        self.step()
        while self.core.scheduler.has_work:
            self.step()

    def generate(self, prompts: list[list[int]], **params: Any) -> list[Result]:
        """All prompts in one batch, to their end."""
        ids = [self.add(prompt, **params) for prompt in prompts]
        self.run()
        return [self.results[i] for i in ids]

    @property
    def free_blocks(self) -> int:
        return self.core.scheduler.blocks.num_free

    @property
    def num_blocks(self) -> int:
        return self.core.scheduler.blocks.num_blocks

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            result = self.results[output.seq_id]
            result.tokens += output.token_ids
            result.text += output.text
            result.finish_reason = output.finish_reason
            result.logprobs += output.logprobs or []
