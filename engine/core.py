"""The step loop: takes requests in, runs steps on all ranks, hands outputs back. Rank 0's main thread.

Other threads talk to it through `inbox` only, and hear from it through `deliver`.
Not for: HTTP (`server.py`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.kv_cache import BlockManager
from engine.output import TextStream
from engine.profiling import ProfileOptions
from engine.ranks import Ranks
from engine.request import Output, Sequence
from engine.runner import StepResult
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from engine.worker import StartProfile, StopProfile, Worker


@dataclass(frozen=True, slots=True)
class Add:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Abort:
    seq_id: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Start (with options) or stop (None) profiling; `done` gets the traces' paths once they are written."""

    options: ProfileOptions | None
    done: Future[list[str]]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; with a reason when something failed."""

    failure: str | None = None


@dataclass(slots=True)
class Counters:
    """Running totals, for /metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class EngineCore:
    def __init__(self, worker: Worker, ranks: Ranks, tokenizer: Tokenizer | None) -> None:
        self.worker = worker
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(worker.limits, BlockManager(worker.num_blocks, worker.block_size))
        self.inbox: queue.SimpleQueue[Add | Abort | Profile | Stop] = queue.SimpleQueue()
        self.deliver: Callable[[list[Output]], None] = lambda outputs: None
        self.counters = Counters()
        self._sequences: dict[int, Sequence] = {}
        self._texts: dict[int, TextStream] = {}
        self.failure: str | None = None
        self._stopping = False

    def run(self) -> None:
        """Serve until a Stop arrives. Without work it sleeps in the inbox."""
        while not self._stopping:
            self._take_in()
            if self.scheduler.has_work and not self._stopping:
                self.step()
        self._abort_all()

    def step(self) -> None:
        plan, sequences = self.scheduler.schedule()
        self.ranks.send(plan)
        result = self.worker.step(plan, sequences)
        self.deliver(self._process(sequences, result))

    def _take_in(self) -> None:
        """Handle what is in the inbox; wait for something when there is no work."""
        while True:
            try:
                message = self.inbox.get(block=not self.scheduler.has_work)
            except queue.Empty:
                return
            self._handle(message)
            if self._stopping:
                return

    def _handle(self, message: Add | Abort | Profile | Stop) -> None:
        match message:
            case Add(sequence):
                self._sequences[sequence.id] = sequence
                params = sequence.params
                self._texts[sequence.id] = TextStream(self.tokenizer, params.stop, params.min_tokens)
                self.scheduler.add(sequence)
                self.counters.prompt_tokens += len(sequence.prompt_ids)
            case Abort(seq_id):
                if seq_id in self._sequences:
                    self._finish(self._sequences[seq_id], "abort")
            case Profile(options, done):
                done.set_result(self._profile(options))
            case Stop(failure):
                self.failure = failure
                self._stopping = True

    def _process(self, sequences: list[Sequence], result: StepResult) -> list[Output]:
        """Append the step's tokens, decide who has ended, and make the outputs."""
        outputs = []
        for sequence, token, logprobs in zip(sequences, result.tokens, result.logprobs, strict=True):
            sequence.output_ids.append(token)
            text, reason = self._advance_text(sequence, token)
            if reason is not None:
                self._finish(sequence, reason)
            outputs.append(
                Output(sequence.id, [token], text, reason, None if logprobs is None else [logprobs])
            )
        self.counters.steps += 1
        self.counters.generation_tokens += len(outputs)
        return outputs

    def _advance_text(self, sequence: Sequence, token: int) -> tuple[str, str | None]:
        """-> new text, and why the sequence ends here (None: it goes on)."""
        stream = self._texts[sequence.id]
        text, stopped = stream.add(token)
        if stopped:
            return text, "stop"
        params = sequence.params
        reason = None
        if not params.ignore_eos and token in self.worker.model_config.eos_token_ids:
            reason = "stop"
        elif len(sequence.output_ids) >= params.max_tokens:
            reason = "length"
        if reason is None:
            return text, None
        rest, stopped = stream.finish()
        return text + rest, "stop" if stopped else reason

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)
        del self._sequences[sequence.id], self._texts[sequence.id]
        self.counters.finished[reason] += 1

    def _abort_all(self) -> None:
        """End what is still open, so that no client waits for ever."""
        open_sequences = list(self._sequences.values())
        for sequence in open_sequences:
            self._finish(sequence, "abort")
        self.deliver([Output(sequence.id, [], "", "abort") for sequence in open_sequences])

    def _profile(self, options: ProfileOptions | None) -> list[str]:
        if options is not None:
            self.ranks.send(StartProfile(options))
            self.worker.profiler.start(options)
            return []
        self.ranks.send(StopProfile())
        own = self.worker.profiler.stop()
        return [own, *self.ranks.gather()]
