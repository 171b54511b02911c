"""Small-sample statistics on log-ratios, vectorised over trials. Pure numpy and scipy, no I/O.

Every function takes an array whose *last* axis holds the pairs of one stage, so that the very code which
judges one candidate also judges ten thousand simulated ones (`benchmarks/decision_rules.py`). Values are
natural logarithms of a ratio of times; nothing here knows which sign is good. Not for: rules, margins and
alphas (`accept.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Array = NDArray[np.float64]

# Finite-sample factors of the Qn scale estimator, Croux & Rousseeuw (1992), for n = 2..9.
_QN_SMALL = {2: 0.399, 3: 0.994, 4: 0.512, 5: 0.844, 6: 0.611, 7: 0.857, 8: 0.669, 9: 0.872}
_QN_FROM = 6  # below this the order statistic rests on one or two distances: the plain SD is steadier
_SD_FLOOR = 1e-6  # a fake clock can give identical pairs; a zero SD would divide by zero


def _array(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float64)


def sd(x: ArrayLike) -> Array:
    """Sample standard deviation (n - 1) along the last axis; NaN for fewer than two values."""
    x = _array(x)
    if x.shape[-1] < 2:
        return np.full(x.shape[:-1], np.nan)
    return np.maximum(x.std(axis=-1, ddof=1), _SD_FLOOR)


def robust_sd(x: ArrayLike) -> float:
    """SD of one sample, resistant to slow outliers: Qn from six values on, the sample SD below that.

    Errors: ValueError for fewer than two values.
    """
    v = _array(x).ravel()
    n = v.size
    if n < 2:
        raise ValueError("a spread needs at least two values")
    if n < _QN_FROM:
        return float(sd(v))
    i, j = np.triu_indices(n, 1)
    h = n // 2 + 1
    qn = np.partition(np.abs(v[i] - v[j]), h * (h - 1) // 2 - 1)[h * (h - 1) // 2 - 1]
    if n in _QN_SMALL:
        factor = _QN_SMALL[n]
    else:
        factor = n / (n + 1.4) if n % 2 else n / (n + 3.8)
    return max(float(2.2219 * factor * qn), _SD_FLOOR)


def pooled_sd(x: ArrayLike, prior_sd: ArrayLike, prior_df: ArrayLike) -> tuple[Array, Array]:
    """(SD, degrees of freedom) for the mean of `x`, borrowing a calibrated SD.

    Pooling only ever makes the test stricter than trusting the calibration alone: where the stage's own
    spread is larger than the pooled one, the stage's own (with its few degrees of freedom) is used. A
    machine that became noisier after its calibration therefore does not get the old, small SD.
    """
    x = _array(x)
    n = x.shape[-1]
    prior = np.broadcast_to(_array(prior_sd), x.shape[:-1])
    prior_n = np.broadcast_to(_array(prior_df), x.shape[:-1])
    if n < 2:
        return prior.copy(), np.maximum(prior_n, 1.0)
    own = sd(x)
    df = n - 1 + prior_n
    both = np.sqrt(((n - 1) * own**2 + prior_n * prior**2) / df)
    return np.maximum(both, own), np.where(own > both, n - 1.0, df)


def winsorised_sd(x: ArrayLike, prior_sd: float, prior_df: float) -> tuple[float, float]:
    """(SD, degrees of freedom) pooled with a prior, one extreme value on each side pulled in (n >= 5).

    For guards: one hiccup in one launch must not make every latency guard undecidable. The factor
    (n - 1) / (n - 3) makes the SD of the pulled-in sample an upward estimate of the plain one.
    """
    v = np.sort(_array(x).ravel())
    n = v.size
    if n < 2:
        return (float(prior_sd), float(prior_df)) if prior_df > 0 else (float("nan"), 0.0)
    if n >= 5:
        v[0], v[-1] = v[1], v[-2]
        own = float(sd(v)) * (n - 1) / (n - 3)
    else:
        own = float(sd(v))
    df = n - 1 + prior_df
    return float(np.sqrt(((n - 1) * own**2 + prior_df * prior_sd**2) / df)), float(df)


def t_p(x: ArrayLike, threshold: ArrayLike, s: ArrayLike, df: ArrayLike) -> Array:
    """One-sided p of "the mean of x exceeds threshold", Student's t with the given SD and df."""
    x = _array(x)
    t = (x.mean(axis=-1) - threshold) / (_array(s) / np.sqrt(x.shape[-1]))
    return special.stdtr(df, -t)


def sign_p(x: ArrayLike, threshold: float) -> Array:
    """One-sided sign test: chance of at least as many values above threshold if the median were at it."""
    x = _array(x)
    n = x.shape[-1]
    above = (x > threshold).sum(axis=-1)
    return stats.binom.sf(above - 1, n, 0.5)


def wilcoxon_p(x: ArrayLike, threshold: float) -> float:
    """One-sided exact signed-rank p of one sample against a threshold; reported beside the decision."""
    v = _array(x).ravel() - threshold
    if v.size == 0 or np.all(v == 0):
        return 1.0
    result: Any = stats.wilcoxon(v, alternative="greater", method="exact" if v.size <= 25 else "auto")
    return float(result.pvalue)


def hodges_lehmann(x: ArrayLike) -> float:
    """Median of all pairwise means (each value with itself included): a location that one outlier cannot move far."""
    v = _array(x).ravel()
    i, j = np.triu_indices(v.size)
    return float(np.median((v[i] + v[j]) / 2))


def t_interval(x: ArrayLike, level: float = 0.95, prior_sd: float = 0.0, prior_df: float = 0.0) -> tuple[float, float]:
    """Two-sided t interval for the mean of `x`; with a prior SD the spread is pooled as in `pooled_sd`.

    One value without a prior has no interval: (-inf, inf).
    """
    v = _array(x).ravel()
    if v.size < 2 and prior_df <= 0:
        return -np.inf, np.inf
    s, df = pooled_sd(v, prior_sd, prior_df)
    half = float(special.stdtrit(df, 0.5 + level / 2) * s / np.sqrt(v.size))
    return float(v.mean()) - half, float(v.mean()) + half


def normal_quantile(p: float) -> float:
    return float(special.ndtri(p))


def t_quantile(df: ArrayLike, p: float) -> Array:
    return special.stdtrit(df, p)


def normal_cdf(z: ArrayLike) -> Array:
    return special.ndtr(z)


def beta_quantile(p: float, a: float, b: float) -> float:
    return float(special.betaincinv(a, b, p))
