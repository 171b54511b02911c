"""The pre-registered decision rules: every look at the data and the alpha it spends, and how often they err.

The sign convention: g = ln(incumbent time / candidate time), so that a gain is positive; margins and effects are
fractions. All functions take arrays with one row per trial: `accept.judge` calls them with one row, the simulation
in `benchmarks/decision_rules.py` with a hundred thousand. Not for: pairs, guards and verdicts (`accept.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer import stats
from optimizer.types import Protocol, Stage

MARGIN_FLOOR = 0.005  # smaller gains are not worth a line of code
MARGIN_CPU_TP = 0.02  # ranks that share cores: A/A on such a machine is biased by more than the floor
MDE_POWER = 0.8
MDE_TRIALS = 4000
MDE_CAP = 4.0  # +400 %: where this is not detected the machine resolves nothing; every figure stays finite


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the first `n` pairs of a stage; n = 0 means all of them, the last look.

    alpha: passes when the one-sided p is below it. against_margin: p against the margin, else against 0.
    all_clear: every single pair must lie above that threshold too, which bounds the error of the look by
    2^-n whatever the distribution. slower_alpha: fails when "the candidate is slower" has a p below it.
    futile_below: fails when the mean gain is below this many margins.
    """

    n: int
    alpha: float
    against_margin: bool = True
    all_clear: bool = False
    slower_alpha: float | None = None
    futile_below: float | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """The pre-registered decision rule of one protocol."""

    looks: Mapping[Stage, tuple[Look, ...]]
    margin_floor: float = MARGIN_FLOOR
    quiet_floor: float = MARGIN_FLOOR  # where `quiet_sds` SDs of the paired log-ratio are less than `margin_floor`, they are
    quiet_sds: float = 0.0  # the floor, but never less than this
    margin_sds: float = 0.0  # margin is at least this many SDs of the paired log-ratio
    bias_ses: float = 0.0  # of the A/A bias, what exceeds this many of its standard errors counts
    why: str = ""


_QUICK_EARLY = (
    Look(2, 0.05, all_clear=True, futile_below=0.0),
    Look(4, 0.03, all_clear=True, futile_below=0.5),
)
RULES: dict[str, Rule] = {
    "full": Rule(
        looks={
            Stage.SCREEN: (
                Look(1, 0.001, slower_alpha=0.01),
                Look(2, 0.01, all_clear=True, slower_alpha=0.02),
                Look(0, 0.2, against_margin=False),
            ),
            Stage.DECIDE: (Look(3, 0.003, all_clear=True, futile_below=0.0), Look(0, 0.027)),
            Stage.CONFIRM: (Look(3, 0.005, all_clear=True, futile_below=0.0), Look(0, 0.045)),
        },
        why="DESIGN 4.3: screen 3 (p < 0.2), decide 6 (p < 0.03), confirm 6 (p < 0.05)",
    ),
    "quick": Rule(
        looks={
            Stage.SCREEN: (Look(1, 0.01, slower_alpha=0.05), Look(0, 0.3, against_margin=False)),
            Stage.DECIDE: (*_QUICK_EARLY, Look(0, 0.1)),
            Stage.CONFIRM: (*_QUICK_EARLY, Look(0, 0.1)),
        },
        margin_floor=0.03,
        quiet_floor=0.01,
        quiet_sds=4.0,
        margin_sds=0.25,
        bias_ses=1.0,
        why="few cells, a larger margin: screen 2 (p < 0.3), decide 6 and confirm 8 (p < 0.1), large effects after 1, 2 and 2",
    ),
}


def rule_of(protocol: Protocol | str | None) -> Rule:
    """The rule of a protocol by its name. Errors: KeyError that names the valid ones."""
    name = "full" if protocol is None else protocol if isinstance(protocol, str) else protocol.name
    if name not in RULES:
        raise KeyError(f"no decision rule for protocol {name!r}; valid: {', '.join(RULES)}")
    return RULES[name]


def stage_pairs(protocol: Protocol, stage: Stage) -> int:
    """Planned pairs of a stage."""
    return {
        Stage.CALIBRATE: protocol.calibrate_pairs,
        Stage.SCREEN: protocol.screen_pairs,
        Stage.DECIDE: protocol.decide_pairs,
        Stage.CONFIRM: protocol.confirm_pairs,
        Stage.CANARY: protocol.screen_pairs,
        Stage.HEADLINE: protocol.headline_pairs,
        Stage.ABLATE: protocol.decide_pairs,
    }[stage]


def fewest_pairs(protocol: Protocol) -> int:
    """Pairs of a candidate that passes every stage at its first look."""
    stages = (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM)
    first = {stage: rule_of(protocol).looks[stage][0].n for stage in stages}
    return sum(min(first[stage] or planned, planned) for stage in stages for planned in [stage_pairs(protocol, stage)])


def stage_outcome(
    rule: Rule, stage: Stage, planned: int, g: stats.Array, margin: stats.ArrayLike, sd: stats.ArrayLike, df: float
) -> tuple[NDArray[np.int8], stats.Array, NDArray[np.int64]]:
    """Walk the looks of `stage` over gains `g` (trials x pairs so far).

    margin, sd: per trial or one for all; sd and df are the calibration's and are pooled with the stage's own
    spread. Returns per trial: the state (+1 passed, -1 failed, 0 undecided yet), the p of the deciding (or
    latest) look, and the pairs that look used. The first look that decides binds: later pairs cannot change it.
    """
    trials, have = g.shape
    state = np.zeros(trials, np.int8)
    p_at = np.ones(trials)
    used = np.full(trials, have, np.int64)
    threshold = np.broadcast_to(np.log1p(np.asarray(margin, float)), (trials,))
    for look in rule.looks[stage]:
        n = look.n or planned
        if n > have or n > planned or (look.n == planned):  # a look at the full size is the last look's business
            continue
        p, ok, bad = _at(look, g[:, :n], threshold, sd, df)
        if not look.n:
            bad = ~ok
        fresh = state == 0
        p_at = np.where(fresh, p, p_at)
        used = np.where(fresh & (ok | bad), n, used)
        state = np.where(fresh, np.where(ok, 1, np.where(bad, -1, 0)), state).astype(np.int8)
    return state, p_at, used


def _at(look: Look, g: stats.Array, threshold: stats.Array, sd: stats.ArrayLike, df: float):
    """p, passed and failed of one look for every trial."""
    s, dof = stats.pooled_sd(g, sd, df)
    bar = threshold if look.against_margin else np.zeros_like(threshold)
    p = stats.t_p(g, bar, s, dof)
    ok = p < look.alpha
    if look.all_clear:
        ok &= (g > bar[:, None]).all(axis=1)
    bad = np.zeros_like(ok)
    if look.slower_alpha is not None:
        bad |= stats.t_p(-g, 0.0, s, dof) < look.slower_alpha
    if look.futile_below is not None:
        bad |= g.mean(axis=1) < look.futile_below * threshold
    return p, ok, bad & ~ok


def procedure(
    rule: Rule, sizes: Mapping[Stage, int], g: Mapping[Stage, stats.Array], margin: stats.ArrayLike, sd: stats.ArrayLike, df: float
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """(accepted, pairs used) of screen, decide and confirm for gains `g[stage]` (trials x planned pairs)."""
    alive = np.ones(g[Stage.SCREEN].shape[0], bool)
    spent = np.zeros(alive.shape, np.int64)
    for stage in (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM):
        state, _, used = stage_outcome(rule, stage, sizes[stage], g[stage], margin, sd, df)
        spent += np.where(alive, used, 0)
        alive &= state == 1
    return alive, spent


def margin_for(rule: Rule, device: str, tp: int, log_sd: float, bias: float, pairs: int) -> float:
    """Largest of the rule's floor (lower where hardly anything moves), twice the A/A bias, its share of the SD, and 2 % for
    CPU ranks that share cores.

    `full` counts the whole bias: counting only what exceeds its standard error would buy power on noisy machines
    (+10 %: 64 instead of 42 %), but with a real bias of 2 % a no-op would be accepted in 15 instead of 3 sessions of
    100. `quick` has too few A/A pairs for that (the estimate's noise alone would set a margin of 18 %), and its floor.
    """
    shared_cores = MARGIN_CPU_TP if device == "cpu" and tp > 1 else 0.0
    sure_bias = max(0.0, abs(bias) - rule.bias_ses * log_sd / math.sqrt(pairs))
    floor = min(rule.margin_floor, max(rule.quiet_floor, rule.quiet_sds * log_sd))
    return max(floor, 2 * sure_bias, rule.margin_sds * log_sd, shared_cores)


def sizes_of(protocol: Protocol | None) -> dict[Stage, int]:
    if protocol is None:
        return {Stage.SCREEN: 3, Stage.DECIDE: 6, Stage.CONFIRM: 6}
    return {s: stage_pairs(protocol, s) for s in (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM)}


def _unit_noise(sizes: Mapping[Stage, int], trials: int) -> dict[Stage, stats.Array]:
    rng = np.random.default_rng(20240229)  # fixed: the same calibration always states the same figures
    return {stage: rng.standard_normal((trials, n)) for stage, n in sizes.items()}


def acceptance_rate(
    rule: Rule, sizes: Mapping[Stage, int], effect: float, margin: float, log_sd: float, df: int, trials: int = MDE_TRIALS
) -> float:
    """Chance that the whole procedure accepts a candidate of this effect under normal noise of SD log_sd."""
    noise = _unit_noise(sizes, trials)
    g = {stage: np.log1p(effect) + log_sd * z for stage, z in noise.items()}
    return float(procedure(rule, sizes, g, margin, log_sd, df)[0].mean())


def mde(rule: Rule, sizes: Mapping[Stage, int], margin: float, log_sd: float, df: int) -> float:
    """Smallest effect that the full procedure accepts with 80 % power, by simulation; `MDE_CAP` where none does."""
    low, high = margin, MDE_CAP
    if margin >= high or acceptance_rate(rule, sizes, high, margin, log_sd, df) < MDE_POWER:
        return MDE_CAP
    while high - low > 0.002 + 0.01 * low:
        middle = (low + high) / 2
        enough = acceptance_rate(rule, sizes, middle, margin, log_sd, df) >= MDE_POWER
        low, high = (low, middle) if enough else (middle, high)
    return high


def binomial_upper(hits: int, trials: int) -> float:
    """Clopper-Pearson one-sided 95 % bound."""
    return 1.0 if hits >= trials else float(stats.beta_quantile(0.95, hits + 1, trials - hits))
