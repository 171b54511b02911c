"""Non-inferiority of everything that was not to be improved: latencies, traffic cells, memory, start-up.

Pure functions over the guard values of pairs. A guard is a metric measured in both arms of every pair,
lower is better. Names carry their kind: `..._fraction` is compared by difference, everything else by the
logarithm of candidate / incumbent. All guards must pass (an intersection-union test: no multiplicity
correction is needed, each is tested at its full alpha). Few launches cannot show 2 % on a noisy machine,
so a guard's margin is the stated one or the smallest that the calibrated noise can decide, whichever is
larger; a person may state another for a run at its start. Margin and power are part of the result. Not for: the target metric (`accept.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
from scipy import special

from optimizer import stats
from optimizer.types import Calibration, Pair

ALPHA = 0.05  # one-sided, per guard
POWER_Z = 2.326  # a guard that did not change passes with about 99 % where its SD is known
SD_CONFIDENCE = 0.2  # the calibrated SD rests on few pairs: its 80 % upper bound sets the margin
ABSURD = 4.0  # a guard cell this many times faster than the target's own speed-up is not believed ...
SAME_STEP = 0.9  # ... unless one of its steps takes what a step of the target cell takes with the same candidate, or longer

_BASE = (("_fraction", 0.02), ("p95", 0.05), ("p99", 0.05), ("memory", 0.02), ("start_up", 0.10))
_BASE_P50 = 0.02
_NOT_TIME = ("memory", "start_up", "_fraction")  # never grounds for "absurdly fast"


class GuardState(StrEnum):
    PASS = "pass"
    WORSE = "worse"  # shown to be worse, and not shown to stay within the margin
    UNDECIDED = "undecided"  # neither: more pairs are needed
    ABSURD = "absurd"  # a person looks at it


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard's verdict. change: estimate of candidate / incumbent - 1 (or a difference for fractions)."""

    name: str
    state: GuardState
    change: float
    upper: float  # one-sided 95 % bound of change
    margin: float
    power: float  # chance that an unchanged guard passes at this size and noise
    pairs: int

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def base_margin(name: str) -> float:
    """The stated margin: 2 % (p50, memory), 5 % (p95, p99), 10 % (start-up), 2 points for fractions."""
    return next((m for key, m in _BASE if key in name), _BASE_P50)


def values(name: str, pairs: Iterable[Pair]) -> np.ndarray:
    """Change per pair, positive is worse: ln(b/a), or b - a for fractions. Pairs without the metric are skipped."""
    both = [p.guards[name] for p in pairs if not p.discarded and name in p.guards]
    if name.endswith("_fraction"):
        return np.array([b - a for a, b in both], float)
    return np.array([np.log(b / a) for a, b in both if a > 0 and b > 0], float)


def calibrate(pairs: Sequence[Pair]) -> dict[str, float]:
    """SD of each guard's change over A/A pairs."""
    names = sorted({n for p in pairs if not p.discarded for n in p.guards})
    sample = {n: values(n, pairs) for n in names}
    return {n: stats.robust_sd(v) for n, v in sample.items() if v.size >= 2}


def stated_margin(name: str, calibration: Calibration) -> float:
    """What a person stated for this run, else the usual margin."""
    return calibration.guard_margins.get(name, base_margin(name))


def margin(name: str, calibration: Calibration, n: int) -> tuple[float, float]:
    """(margin, power) of a guard with n pairs. Without a calibrated SD: the stated margin, power NaN."""
    base = stated_margin(name, calibration)
    sd = calibration.guard_sds.get(name)
    df = calibration.pairs - 1
    if sd is None or df < 1:
        return base, float("nan")
    upper_sd = sd * np.sqrt(df / special.chdtri(df, 1 - SD_CONFIDENCE))
    t = float(stats.t_quantile(n - 1 + df, 1 - ALPHA))
    root = np.sqrt(n)
    wide = (t + POWER_Z) * upper_sd / root
    m = max(base, float(wide if name.endswith("_fraction") else np.expm1(wide)))
    bar = m if name.endswith("_fraction") else np.log1p(m)
    return m, float(stats.normal_cdf(bar / (sd / root) - t)) if sd > 0 else 1.0


def check(
    pairs: Sequence[Pair], calibration: Calibration, target_ratio: float, streams: Mapping[str, float] | None = None
) -> list[Guard]:
    """Every guard found in `pairs`, worst first. target_ratio: candidate / incumbent on the target metric.

    streams: by batch cell, its streams at once for each of the target cell's, where the target is a time per token:
    with them a batch cell that the incumbent was slow at for reasons of its own is told from one that is too fast.

    A guard that arm a has and arm b lacks cannot occur here: a pair holds both or `measure` failed the
    candidate. No guards at all means an empty list: the protocol decides whether that is allowed.
    """
    names = sorted({n for p in pairs if not p.discarded for n in p.guards})
    found = [_one(n, pairs, calibration, target_ratio, streams or {}) for n in names]
    order = [GuardState.ABSURD, GuardState.WORSE, GuardState.UNDECIDED, GuardState.PASS]
    return sorted(found, key=lambda g: (order.index(g.state), -g.change))


def _one(
    name: str, pairs: Sequence[Pair], calibration: Calibration, target_ratio: float, streams: Mapping[str, float]
) -> Guard:
    v = values(name, pairs)
    n = v.size
    if n == 0:
        return Guard(name, GuardState.UNDECIDED, float("nan"), float("nan"), stated_margin(name, calibration), float("nan"), 0)
    fraction = name.endswith("_fraction")
    m, power = margin(name, calibration, n)
    bar = m if fraction else float(np.log1p(m))
    location = stats.hodges_lehmann(v)
    sd, df = stats.winsorised_sd(v, calibration.guard_sds.get(name, 0.0), max(calibration.pairs - 1, 0))
    half = float(stats.t_quantile(df, 1 - ALPHA)) * sd / np.sqrt(n) if df > 0 else np.inf
    if location + half < bar:
        state = GuardState.PASS
    elif location - half > 0:
        state = GuardState.WORSE
    else:
        state = GuardState.UNDECIDED
    timed = not any(k in name for k in _NOT_TIME)
    if timed and location < np.log(min(target_ratio, 1.0)) - np.log(ABSURD) and not _whole_steps(name, pairs, streams):
        state = GuardState.ABSURD
    shown = (lambda x: float(x)) if fraction else (lambda x: float(np.expm1(x)))
    return Guard(name, state, shown(location), shown(location + half), m, power, n)


def _whole_steps(name: str, pairs: Sequence[Pair], streams: Mapping[str, float]) -> bool:
    """Whether a step of this batch cell takes the candidate no less than one of the target cell: nothing was left out.

    An engine without patches may be slow at a batch for reasons of its own (attention planned anew for every new
    shape); a candidate that gains more there than at the target is then no riddle.
    """
    cell, _, metric = name.rpartition(".")
    if metric != "token_wall_us" or cell not in streams:
        return False
    both = [(p.guards[name][1], p.b_us_per_token) for p in pairs if not p.discarded and name in p.guards]
    steps = [np.log(wall * streams[cell] / token) for wall, token in both if wall > 0 and token]
    return bool(steps) and float(np.median(steps)) >= np.log(SAME_STEP)
