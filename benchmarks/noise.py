"""Noise of paired launches: three models and what was recorded on a real machine. Only draws numbers.

A launch's log time = drift (AR(1)) + launch offset + block noise + now and then a slow outlier (exponential).
`device_bound` is a GPU that never waits for its host; `quiet`, `typical` and `noisy` use the spreads that the literature on the loop's rules was simulated with;
`oversubscribed` is a CPU with more ranks than cores. A pair is two launches in random order; a gain is
ln(a / b). Not for: rules (`decision_rules.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).with_name("recorded_noise.json")
_DRIFT_PHI = 0.9


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations are of log times; an outlier slows a launch by a mean of `outlier_mean`."""

    launch: float
    block: float
    drift: float
    outlier_p: float
    outlier_mean: float

    def gains(self, trials: int, pairs: int, rng: np.random.Generator) -> np.ndarray:
        """[trials, pairs] log gains of identical arms."""
        n = 2 * pairs
        steps = rng.normal(0, self.drift, (trials, n))
        drift = np.zeros((trials, n))
        for i in range(1, n):
            drift[:, i] = _DRIFT_PHI * drift[:, i - 1] + steps[:, i]
        t = drift + rng.normal(0, self.launch, (trials, n)) + rng.normal(0, self.block, (trials, n))
        t += (rng.random((trials, n)) < self.outlier_p) * rng.exponential(self.outlier_mean, (trials, n))
        t = t.reshape(trials, pairs, 2)
        sign = np.where(rng.random((trials, pairs)) < 0.5, 1.0, -1.0)
        return sign * (t[..., 0] - t[..., 1])


MODELS = {
    "device_bound": Noise(0.001, 0.001, 0.0005, 0.02, 0.03),  # steps launched ahead on a GPU: the host's noise is hidden
    "quiet": Noise(0.004, 0.003, 0.002, 0.01, 0.04),
    "typical": Noise(0.010, 0.006, 0.004, 0.05, 0.08),
    "noisy": Noise(0.025, 0.015, 0.008, 0.10, 0.08),
    "two_cores": Noise(0.040, 0.045, 0.010, 0.03, 0.15),  # four ranks of the tiny engine, 8 ms a step, 2 s a block
    "oversubscribed": Noise(0.060, 0.030, 0.020, 0.10, 0.15),
}


@dataclass(frozen=True, slots=True)
class Biased:
    """A measurement that favours arm b by a fixed log gain, in A/A as well."""

    source: Noise
    bias: float

    def gains(self, trials: int, pairs: int, rng: np.random.Generator) -> np.ndarray:
        return self.source.gains(trials, pairs, rng) + self.bias


@dataclass(frozen=True, slots=True)
class Recorded:
    """A/A log-ratios of real launches, in the order taken; runs of neighbours are drawn, so that drift survives."""

    log_ratios: tuple[float, ...]
    run: int = 3

    def gains(self, trials: int, pairs: int, rng: np.random.Generator) -> np.ndarray:
        """[trials, pairs] by circular block bootstrap with random sign per pair (arms are identical)."""
        source = np.array(self.log_ratios)
        blocks = -(-pairs // self.run)
        starts = rng.integers(0, source.size, (trials, blocks))
        index = (starts[:, :, None] + np.arange(self.run)) % source.size
        drawn = source[index.reshape(trials, -1)[:, :pairs]]
        return drawn * np.where(rng.random(drawn.shape) < 0.5, 1.0, -1.0)


def recorded(path: Path = RECORDED) -> dict[str, Recorded]:
    """Every series of a file that `record_noise` wrote: name -> noise. Empty when there is no file."""
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return {s["name"]: Recorded(tuple(s["log_ratios"])) for s in data["series"]}
