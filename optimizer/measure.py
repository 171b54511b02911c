"""Time one pair: a fresh launch of each arm on the same fresh secret prompts, by the parent's clock.

What an arm does is in `arms.py`. When both arms are closed, the very streams that were timed are
scored by the oracle. Nothing is profiled. An arm's failure is never a number: arm b's is `CandidateFailed`,
arm a's `InfrastructureError` or, where it merely died, a discarded pair. Not for: reading numbers out of streams
(`targets.py`), deciding (`accept.py`).
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import Any

from optimizer import environment, targets
from optimizer.arms import Arm, Bench, Job, Lost, Work, in_turn, together
from optimizer.gates.streams import text_fault, tokenizer_of
from optimizer.targets import PROTOCOLS, protocol_for
from optimizer.traffic import prompts as prompt_source
from optimizer.traffic.client import Request
from optimizer.traffic.loadgen import LoadError
from optimizer.truth.oracle import OracleError
from optimizer.types import Cell, LaunchSpec, Pair, Protocol, RejectReason, Stage, Stream

__all__ = ["PROTOCOLS", "Bench", "CandidateFailed", "InfrastructureError", "protocol_for", "run_pair"]

ALL_CELLS = frozenset((Stage.CALIBRATE, Stage.DECIDE, Stage.CONFIRM, Stage.HEADLINE))  # the others time the target only
WARM_TOKENS = 2  # per shape: one prefill, one decode step
# Seconds by which start-up may grow on top of its relative margin: capturing graphs or filling tables once is a
# fair price, tuning for minutes is not.
START_UP_ALLOWANCE_S = {"cpu": 1.0, "cuda": 20.0}
# Bytes a rank by which memory may, likewise: recorded graphs, and collectives inside them, take what they take whatever the
# size of the model. On two H200 the first graphs of an unfused Qwen3-8B took 434 MB a rank.
MEMORY_ALLOWANCE_BYTES = {"cpu": 0, "cuda": 512 << 20}
_KINDS = {"text": prompt_source.DEFAULT_KINDS, "repetitive": ("repetition",), "code": ("code",)}


class CandidateFailed(Exception):
    """Arm b failed while being timed: a rejection with its reason."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class InfrastructureError(Exception):
    """The incumbent or the machine failed: says nothing of the candidate."""


def run_pair(
    a: LaunchSpec,
    b: LaunchSpec,
    *,
    protocol: Protocol,
    stage: Stage,
    index: int,
    order: str,
    prompts: Any,
    oracle: Any,
    bench: Bench | None = None,
) -> Pair:
    """Launch, time and verify both arms in `order` ("ab" or "ba").

    prompts: a `prompts.PromptSource`; oracle: anything with `score(streams)`. Discarded pairs come back with
    `discarded` set and no times. Errors: CandidateFailed for arm b; InfrastructureError for an incumbent that
    does not start or whose tokens are wrong.
    """
    if order not in ("ab", "ba"):
        raise ValueError(f"order must be 'ab' or 'ba', not {order!r}")
    bench = bench or Bench()
    began = bench.clock()
    env = _nuisance()
    specs = {"a": replace(a, env=a.env + env), "b": replace(b, env=b.env + env)}
    drawn: list[Work] = []

    def work() -> Work:
        if not drawn:
            drawn.append(draw(protocol, stage, index, prompts))
        return drawn[0]

    try:
        arms = (together if a.device == "cuda" else in_turn)(specs, order, bench, work)
    except Lost as lost:
        why = _failed(lost.name, lost.started, lost.reason, lost.detail)
        facts = {"detail": lost.detail}
        return _discarded(stage, index, order, drawn[0] if drawn else None, why, bench.clock() - began, facts)
    except LoadError as error:
        raise InfrastructureError(str(error)) from error
    drift = verify(arms, oracle, tokenizer_of(a.model_dir))
    return _pair(arms, work(), protocol, stage, index, order, a, bench.clock() - began, drift)


def _failed(name: str, started: bool, reason: RejectReason, detail: str) -> str:
    """Arm b: rejected. Arm a: a reason to take the pair again if it had started, else the machine is at fault."""
    if name == "b":
        raise CandidateFailed(reason, detail)
    if not started:
        raise InfrastructureError(f"the incumbent does not start: {detail}")
    if reason in (RejectReason.CRASH, RejectReason.HANG):
        return f"incumbent_{reason}"
    raise InfrastructureError(f"the incumbent fails: {reason}: {detail}")


def _nuisance() -> tuple[tuple[str, str], ...]:
    """Layout that should not matter, drawn anew for each pair and the same in both arms (Mytkowicz et al. 2009)."""
    rng = random.SystemRandom()
    return (("PYTHONHASHSEED", str(rng.randrange(1, 2**32))), ("HOTLOOP_PAD", "x" * rng.randrange(4096)))


# --- what is sent --------------------------------------------------------------------------------------


def cells_of(protocol: Protocol, stage: Stage) -> tuple[Cell, ...]:
    """The target cell, then the guard cells where this stage times them."""
    return (protocol.cell, *protocol.guard_cells) if stage in ALL_CELLS else (protocol.cell,)


def draw(protocol: Protocol, stage: Stage, index: int, prompts: Any) -> Work:
    """Fresh prompts for every cell of the stage. Called when the first arm is up: nothing could foresee them."""
    name = f"pair/{stage}/{index}/{secrets.token_hex(16)}"
    cells = cells_of(protocol, stage)
    timed = tuple(_job(cell, f"{name}/{cell.name}", prompts) for cell in cells)
    shapes = tuple(_job(_short(cell), f"{name}/warm/{cell.name}", prompts) for cell in cells)
    steps = replace(protocol.cell, name="steps", new_tokens=protocol.warmup_steps + 1, concurrency=1, requests=1, arrivals_per_s=None)  # fmt: skip
    warm = (*shapes, _job(steps, f"{name}/steps", prompts))
    sent = [r.prompt_ids for job in (*warm, *timed) for each in job.rounds for r in each]
    return Work(warm, timed, prompts.sha(sent))


def _short(cell: Cell) -> Cell:
    """Its shape, once: one round, few tokens."""
    return replace(cell, new_tokens=WARM_TOKENS, requests=max(1, cell.concurrency), arrivals_per_s=None)


def _job(cell: Cell, evaluation: str, prompts: Any) -> Job:
    lengths = [cell.prompt_tokens] * cell.requests
    if cell.name == "mixed":
        shares = targets.MIXED_SHARES
        lengths = [max(1, int(cell.prompt_tokens * shares[i % len(shares)])) for i in range(cell.requests)]
    drawn = prompts.draw(evaluation, cell.requests, lengths, kinds=_KINDS[cell.kind])
    if cell.arrivals_per_s is not None:
        delays = _arrivals(prompts, evaluation, cell)
        requests = tuple(Request(p, cell.new_tokens, delay_s=d) for p, d in zip(drawn, delays, strict=True))
        return Job(cell, (requests,), cell.requests * cell.new_tokens + int(delays[-1]))
    c = max(1, cell.concurrency)
    made = [Request(p, cell.new_tokens) for p in drawn]
    rounds = tuple(tuple(made[i : i + c]) for i in range(0, len(made), c))
    return Job(cell, rounds, len(rounds) * cell.new_tokens)


def _arrivals(prompts: Any, evaluation: str, cell: Cell) -> list[float]:
    """Start times of an open loop: exponential gaps, seeded by the secret key."""
    rng = random.Random(prompts.integers(evaluation, 1, 2**62)[0])
    at, times = 0.0, []
    for _ in range(cell.requests):
        times.append(at)
        at += rng.expovariate(cell.arrivals_per_s or 1.0)
    return times


# --- after the clock has stopped -----------------------------------------------------------------------


def verify(arms: dict[str, Arm], oracle: Any, tokenizer: Any = None) -> dict[str, float]:
    """Score every timed stream of both arms. Equal streams are scored once; the text must be what the tokens say.

    Returns how many streams that only arm b gave lie in the bands between equal and wrong: `reorder` (counts as
    equal) and `tolerance` (a person decides: `accept.judge` parks), and `largest`, how far the farthest of its tokens lies
    below the oracle's best, in logits. Errors: CandidateFailed (WRONG_TOKENS) for arm
    b, InfrastructureError for arm a.
    """
    _texts(arms, tokenizer)
    owners: dict[tuple[tuple[int, ...], tuple[int, ...]], set[str]] = {}
    sample: dict[tuple[tuple[int, ...], tuple[int, ...]], Stream] = {}
    for name, arm in arms.items():
        for timed in arm.timed:
            for s in timed.streams:
                key = (s.prompt_ids, s.token_ids)
                owners.setdefault(key, set()).add(name)
                sample[key] = s
    try:
        scores = oracle.score(list(sample.values()))
    except OracleError as error:
        raise InfrastructureError(f"the oracle failed: {error}") from error
    judged = [(owners[key], score) for key, score in zip(sample, scores, strict=True)]
    for who, score in sorted(judged, key=lambda j: "a" not in j[0]):
        if score.band != "wrong":
            continue
        detail = f"token {score.first_bad} of a timed stream, gap {score.max_gap:.3g}"
        if "a" in who:
            raise InfrastructureError(f"the incumbent's tokens are wrong: {detail}")
        raise CandidateFailed(RejectReason.WRONG_TOKENS, detail)
    only_b = [score for who, score in judged if who == {"b"}]
    counts = {band: sum(score.band == band for score in only_b) for band in ("reorder", "tolerance")}
    return {**counts, "largest": max((score.max_gap for score in only_b), default=0.0)}


def _texts(arms: dict[str, Arm], tokenizer: Any) -> None:
    """Text costs time: who leaves it out where it is timed would be faster. Errors: as `verify`."""
    for name in sorted(arms):
        for stream in (s for timed in arms[name].timed for s in timed.streams):
            if wrong := text_fault(stream, tokenizer):
                if name == "a":
                    raise InfrastructureError(f"the incumbent's text is wrong: {wrong}")
                raise CandidateFailed(RejectReason.TOKEN_ACCOUNTING, f"a timed stream's {wrong}")


def _pair(
    arms: dict[str, Arm], work: Work, protocol: Protocol, stage: Stage, index: int, order: str, spec: LaunchSpec,
    seconds: float, drift: dict[str, float],
) -> Pair:  # fmt: skip
    a, b = arms["a"], arms["b"]
    facts: dict[str, Any] = {
        "drift": drift,
        "windows": {name: arm.window.to_json() for name, arm in arms.items()},
        "start_s": {name: arm.start_s for name, arm in arms.items()},
        "warm_up_s": {name: arm.warm_s for name, arm in arms.items()},
        "memory_bytes": {name: arm.memory_bytes for name, arm in arms.items()},
        "client_us_per_token": {name: arm.client_us_per_token for name, arm in arms.items()},
    }
    reason = environment.disagreement(a.window, b.window)
    if reason is not None:
        return _discarded(stage, index, order, work, reason, seconds, facts)
    values = [targets.value(protocol.metric, arm.timed[0], arm.memory_bytes) for arm in (a, b)]
    return Pair(
        stage, index, order, work.sha, values[0], values[1], _guards(a, b, protocol, spec), None, seconds, facts
    )  # fmt: skip


def _guards(a: Arm, b: Arm, protocol: Protocol, spec: LaunchSpec) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for at, (x, y) in enumerate(zip(a.timed, b.timed, strict=True)):
        slo = targets.slo_us(x)
        left = targets.guard_values(x, slo, target=at == 0)
        right = targets.guard_values(y, slo, target=at == 0)
        found |= {name: (left[name], right[name]) for name in left}
    if protocol.metric != "memory":
        found["peak_memory_bytes"] = _allowed(a.memory_bytes, b.memory_bytes, MEMORY_ALLOWANCE_BYTES[spec.device] * spec.tp)
    # Warm-up belongs to start-up: what a candidate puts off to its first requests is still paid before the first user.
    found["start_up_s"] = _allowed(a.start_s + a.warm_s, b.start_s + b.warm_s, START_UP_ALLOWANCE_S[spec.device])
    return found


def _allowed(a: float, b: float, allowance: float) -> tuple[float, float]:
    """Both values, b's less what it may have on top of a's; no less than without it."""
    return a, max(b - allowance, min(a, b))


def _discarded(
    stage: Stage, index: int, order: str, work: Work | None, reason: str, seconds: float, facts: dict[str, Any]
) -> Pair:
    return Pair(stage, index, order, work.sha if work else "", None, None, {}, reason, seconds, facts)

