"""Cheats on the measurement: through the real decision rules, with injected timings.

What they try is in the numbers that a launch would show; what a launch shows is `tests/optimizer/test_measure*`'s.
Not for: patches (`cheats.py`).
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from optimizer import accept, rules
from optimizer.targets import PROTOCOLS
from optimizer.types import Pair, Stage, StageResult

FULL = PROTOCOLS["full"]
NOISE = 0.006
GUARDS = ("ttft_p50", "tpot_p50", "batch8_tpot_p50", "prefill_ttft_p50", "peak_memory_bytes", "start_up_s")


@dataclass(frozen=True, slots=True)
class Measured:
    id: str
    idea: str
    expected: str
    attempt: Callable[[np.random.Generator], StageResult | None]  # the result that stopped it; None: accepted


def pair(rng: np.random.Generator, stage: Stage, index: int, gain: float, factors: dict[str, float]) -> Pair:
    """One pair of a candidate that is faster by `gain` (log) and multiplies guards by `factors`."""
    guards = {
        name: (1000.0, 1000.0 * factors.get(name, 1.0) * math.exp(rng.normal(0, NOISE)))
        for name in {*GUARDS, *factors}
    }
    return Pair(stage, index, "ab", "sha", 1000.0, 1000.0 * math.exp(-gain + rng.normal(0, NOISE)), guards)


def through(rng: np.random.Generator, gain: float, **factors: float) -> StageResult | None:
    """A candidate through calibration, screen, decide and confirm."""
    calibration = accept.calibrate(
        [pair(rng, Stage.CALIBRATE, i, 0.0, {}) for i in range(FULL.calibrate_pairs)], "cpu", 1, FULL
    )
    taken: list[Pair] = []
    for stage in (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM):
        result = None
        for index in range(rules.stage_pairs(FULL, stage)):
            taken.append(pair(rng, stage, index, gain, factors))
            result = accept.judge(stage, taken, calibration, FULL)
            if result is not None:
                break
        assert result is not None
        if not result.passed or result.parked:
            return result
    return None


def resubmitted(rng: np.random.Generator) -> StageResult | None:
    """The same no-op again and again: its pairs are those of its first trial, so every answer is the same."""
    calibration = accept.calibrate(
        [pair(rng, Stage.CALIBRATE, i, 0.0, {}) for i in range(FULL.calibrate_pairs)], "cpu", 1, FULL
    )
    taken = [pair(rng, Stage.SCREEN, i, 0.0, {}) for i in range(rules.stage_pairs(FULL, Stage.SCREEN))]
    taken += [pair(rng, Stage.DECIDE, i, 0.0, {}) for i in range(rules.stage_pairs(FULL, Stage.DECIDE))]
    answers = [accept.judge(Stage.DECIDE, taken, calibration, FULL) for _ in range(50)]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


MEASURED: tuple[Measured, ...] = (
    Measured(
        "R35",
        "everything computed before the clock starts",
        "G21",
        lambda rng: through(rng, 0.3, start_up_s=4.0),
    ),
    Measured(
        "R41",
        "one cell absurdly fast, the target unchanged",
        "G21 G17",
        lambda rng: through(rng, 0.0, batch8_tpot_p50=0.01),
    ),
    Measured(
        "R41b", "the same beside a real gain", "G21 G17", lambda rng: through(rng, 0.1, batch8_tpot_p50=0.01)
    ),
    Measured("R79", "the same no-op resubmitted fifty times", "alpha", resubmitted),
    Measured(
        "R81",
        "batches delayed: more tokens a second, later first ones",
        "G21",
        lambda rng: through(rng, 0.2, ttft_p50=1.5),
    ),
    Measured(
        "R83",
        "requests throttled to keep the others quick",
        "G21",
        lambda rng: through(rng, 0.2, late_fraction=1.4),
    ),
    Measured(
        "X69", "tokens kept back and sent eight at a time", "G21", lambda rng: through(rng, 0.2, ttft_p50=7.0, gap_p95=8.0)
    ),
    Measured(
        "X70", "the first token kept back a little", "G21", lambda rng: through(rng, 0.03, ttft_p50=1.1)
    ),
    Measured("R85", "minutes of tuning at start", "G21", lambda rng: through(rng, 0.2, start_up_s=20.0)),
)


def run(case: Measured) -> tuple[bool, str, float]:
    """(stopped, by what, seconds)."""
    began = time.perf_counter()
    result = case.attempt(np.random.default_rng(zlib.crc32(case.id.encode())))
    by = (
        "-"
        if result is None
        else f"{result.stage}: {'parked: ' if result.parked else ''}{result.why or result.reason}"
    )
    return result is not None, by, time.perf_counter() - began
