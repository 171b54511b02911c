"""Decide from pairs of timings: pure functions, no I/O, no clock, no configuration.

The sign convention inside this file: g = ln(incumbent time / candidate time), so that a gain is positive.
Margins and effects are fractions (0.02 = 2 %). The rule of each protocol is the table `RULES`; every look
at the data, and the alpha it spends, is written there before any data exist. Stages use disjoint pairs.
A candidate is accepted only if screen, decide and confirm all pass, so its false-accept rate is below the
product of the last two alphas; what it is on realistic noise is simulated by `benchmarks/decision_rules.py`,
which calls `stage_outcome` below, the very code that `judge` calls. Not for: guards and traffic cells
(`guards.py`), repeated tries of one patch (`alpha.py`), taking timings (`measure.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from optimizer import guards, stats
from optimizer.types import Calibration, Pair, Protocol, RejectReason, Stage, StageResult, Verdict

MARGIN_FLOOR = 0.005  # smaller gains are not worth a line of code
MARGIN_CPU_TP = 0.02  # ranks that share cores: A/A on such a machine is biased by more than the floor
MAX_DISCARDED = 0.2  # of the pairs of a stage
INTERRUPTED = "interrupted"  # a pair that a killed run left behind: nobody saw its times, it is no discard
CANARY_EVERY = 10  # candidates between two hidden A/A trials
CANARY_ALPHA = 0.002  # two-sided; three canaries a session stay under 1 %
MDE_POWER = 0.8
MDE_TRIALS = 4000
_TARGET = "target_p50"
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
    margin_sds: float = 0.0  # margin is at least this many SDs of the paired log-ratio
    why: str = ""


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
            Stage.SCREEN: (Look(1, 0.01, slower_alpha=0.05), Look(0, 0.2, against_margin=False)),
            Stage.DECIDE: (Look(2, 0.05, all_clear=True, futile_below=0.0), Look(0, 0.2, all_clear=True)),
            Stage.CONFIRM: (Look(2, 0.05, all_clear=True, futile_below=0.0), Look(0, 0.2, all_clear=True)),
        },
        margin_floor=0.03,
        margin_sds=0.25,
        why="few pairs: a larger margin, and every pair of decide and confirm must clear it",
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


# --- the core: vectorised over trials ------------------------------------------------------------------


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


# --- calibration ---------------------------------------------------------------------------------------


def gains(pairs: Iterable[Pair]) -> stats.Array:
    """g = ln(a / b) of every pair that was not discarded, in the order given."""
    return np.array(
        [np.log(p.a_us_per_token / p.b_us_per_token) for p in pairs if not p.discarded and p.a_us_per_token and p.b_us_per_token],
        float,
    )


def calibrate(pairs: Sequence[Pair], device: str, tp: int, protocol: Protocol | None = None) -> Calibration:
    """What A/A pairs say about this machine: spread, bias, margin and minimum detectable effect.

    Errors: ValueError when fewer than two usable pairs are left.
    """
    g = gains(pairs)
    if g.size < 2:
        raise ValueError(f"calibration needs at least 2 usable A/A pairs, got {g.size} of {len(pairs)}")
    rule = rule_of(protocol)
    log_sd = stats.robust_sd(g)
    bias = stats.hodges_lehmann(g)
    margin = margin_for(rule, device, tp, log_sd, bias)
    sizes = _sizes(protocol)
    return Calibration(
        pairs=int(g.size),
        log_sd=log_sd,
        bias=bias,
        margin=margin,
        mde=mde(rule, sizes, margin, log_sd, int(g.size) - 1),
        guard_sds=guards.calibrate(pairs),
    )


def margin_for(rule: Rule, device: str, tp: int, log_sd: float, bias: float) -> float:
    """Largest of the rule's floor, twice the A/A bias, its share of the SD, and 2 % for CPU ranks that share cores."""
    shared_cores = MARGIN_CPU_TP if device == "cpu" and tp > 1 else 0.0
    return max(rule.margin_floor, 2 * abs(bias), rule.margin_sds * log_sd, shared_cores)


def _sizes(protocol: Protocol | None) -> dict[Stage, int]:
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


def false_accept_bound(protocol: Protocol, calibration: Calibration, trials: int = 50_000) -> float:
    """95 % upper bound of the chance to accept one no-op under this calibration's noise (normal), by simulation."""
    rule, sizes = rule_of(protocol), _sizes(protocol)
    rate = acceptance_rate(rule, sizes, 0.0, calibration.margin, calibration.log_sd, calibration.pairs - 1, trials)
    return binomial_upper(round(rate * trials), trials)


def describe(calibration: Calibration, protocol: Protocol) -> list[str]:
    """What this protocol can and cannot tell on this machine, in sentences for a person."""
    c = calibration
    detectable = f"+{c.mde:.1%}" if c.mde < MDE_CAP else "no effect"
    said = [
        f"{c.pairs} A/A pairs: spread {c.log_sd:.1%}, bias {c.bias:+.1%}, margin {c.margin:.1%}; "
        f"{detectable} is detected with 80 % power",
        f"protocol {protocol.name}: {rule_of(protocol).why}; a patch that does nothing passes with a chance below "
        f"{false_accept_bound(protocol, c):.2%} (simulated with this spread)",
    ]
    pairs = protocol.decide_pairs + protocol.confirm_pairs
    wide = sorted(((*guards.margin(name, c, pairs), name) for name in c.guard_sds), reverse=True)
    if wide:
        weakest = min(power for _, power, _ in wide)
        said.append(
            f"guards: margins from {wide[-1][0]:.1%} ({wide[-1][2]}) to {wide[0][0]:.1%} ({wide[0][2]}), what this "
            f"noise can decide with {pairs} pairs; an unchanged guard passes with {weakest:.0%} or more"
        )
    return said


def binomial_upper(hits: int, trials: int) -> float:
    """Clopper-Pearson one-sided 95 % bound."""
    return 1.0 if hits >= trials else float(stats.beta_quantile(0.95, hits + 1, trials - hits))


# --- the judge -----------------------------------------------------------------------------------------


def judge(stage: Stage, pairs: Sequence[Pair], calibration: Calibration, protocol: Protocol) -> StageResult | None:
    """What the pairs of `stage` say; None when more pairs are needed.

    pairs: all pairs of this candidate so far. The stage's own alone decide the gain; guards use those of
    screen, decide and confirm. A discarded pair has no times and is to be taken again; more than 20 % of
    them end the stage. Errors: KeyError for an unknown protocol, ValueError for CALIBRATE.
    """
    if stage is Stage.CALIBRATE:
        raise ValueError("A/A pairs are for accept.calibrate")
    own = [p for p in pairs if p.stage is stage]
    if (spoiled := _too_many_discarded(stage, own, protocol)) is not None:
        return spoiled
    g = gains(own)
    planned = stage_pairs(protocol, stage)
    if stage in (Stage.HEADLINE, Stage.CANARY, Stage.ABLATE):
        if g.size < planned:
            return None
        return {Stage.HEADLINE: headline, Stage.CANARY: canary, Stage.ABLATE: ablation}[stage](own, calibration)
    if g.size == 0:
        return None
    rule = rule_of(protocol)
    state, p, used = stage_outcome(
        rule, stage, planned, g[None, :], calibration.margin, calibration.log_sd, calibration.pairs - 1
    )
    if state[0] == 0:
        return None
    result = _result(stage, g[: int(used[0])], calibration, bool(state[0] == 1), float(p[0]), planned)
    if not result.passed or stage is Stage.SCREEN:
        return result
    return _with_guards(result, pairs, calibration, more=g.size < planned)


def _too_many_discarded(stage: Stage, own: Sequence[Pair], protocol: Protocol) -> StageResult | None:
    dropped = [p.discarded for p in own if p.discarded and p.discarded != INTERRUPTED]
    allowed = max(1, int(MAX_DISCARDED * stage_pairs(protocol, stage)))
    if len(dropped) <= allowed:
        return None
    why = f"{len(dropped)} pairs discarded ({', '.join(sorted(set(dropped)))}); at most {allowed} may be"
    return StageResult(stage, False, None, 1.0, _as_ratios(-np.inf, np.inf), len(own) - len(dropped), why=why)


def _result(stage: Stage, g: stats.Array, cal: Calibration, passed: bool, p: float, planned: int) -> StageResult:
    low, high = stats.t_interval(g, 0.95, cal.log_sd, cal.pairs - 1)
    bar = float(np.log1p(cal.margin))
    mean = float(g.mean())
    reason = None
    if passed:
        why = f"gain {np.expm1(mean):+.1%}, p = {p:.3g}"
    elif high < bar or mean <= 0:
        reason = RejectReason.NO_GAIN
        why = f"gain {np.expm1(mean):+.1%}, at most {np.expm1(high):+.1%}: the margin is {cal.margin:.1%}"
    else:
        why = f"gain {np.expm1(mean):+.1%} not resolved (p = {p:.3g}); margin {cal.margin:.1%}, detectable {cal.mde:.1%}"
    facts = {
        "hodges_lehmann_ratio": float(np.exp(-stats.hodges_lehmann(g))),
        "wilcoxon_p": stats.wilcoxon_p(g, bar),
        "sign_p": float(stats.sign_p(g, bar)),
        "margin": cal.margin,
    }
    return StageResult(
        stage, passed, p, float(np.exp(-mean)), _as_ratios(low, high), int(g.size),
        early=g.size < planned, why=why, reason=reason, facts=facts,
    )  # fmt: skip


def _with_guards(result: StageResult, pairs: Sequence[Pair], cal: Calibration, more: bool) -> StageResult | None:
    """Guards after the gain is shown. Decide stops only on a guard that is shown worse; confirm needs all to pass."""
    judged = [p for p in pairs if p.stage in (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM)]
    found = guards.check(judged, cal, result.ratio)
    facts = {**result.facts, "guards": [g.to_json() for g in found]}
    bad = [g for g in found if g.state is not guards.GuardState.PASS]
    if result.stage is Stage.DECIDE:
        bad = [g for g in bad if g.state is not guards.GuardState.UNDECIDED]
    if not bad:
        return replace(result, facts=facts)
    worst = bad[0]
    text = _text(worst)
    if worst.state is guards.GuardState.ABSURD:
        return replace(result, passed=False, parked=True, why=f"quarantined, too fast to be believed: {text}", facts=facts)
    if worst.state is guards.GuardState.WORSE:
        return replace(result, passed=False, reason=RejectReason.GUARD, why=f"worse: {text}", facts=facts)
    if more:
        return None  # the gain stopped early; the guards still need pairs
    return replace(result, passed=False, why=f"non-inferiority not shown: {text}", facts=facts)


def _text(guard: guards.Guard) -> str:
    return f"{guard.name} {guard.change:+.1%} (bound {guard.upper:+.1%}, margin {guard.margin:.1%})"


def verdict(result: StageResult) -> Verdict:
    """The verdict that a stage result means for its candidate. A pass short of CONFIRM is no verdict yet.

    Errors: ValueError for a passed stage other than CONFIRM.
    """
    if result.parked:
        return Verdict.PARKED
    if result.passed:
        if result.stage is not Stage.CONFIRM:
            raise ValueError(f"{result.stage} passed: the candidate goes on, there is no verdict yet")
        return Verdict.ACCEPT
    return Verdict.UNDECIDED if result.reason is None else Verdict.REJECT


# --- canary, ablation, headline ------------------------------------------------------------------------


def canary_due(judged: int, canaries: int) -> bool:
    """A hidden A/A trial is due after every `CANARY_EVERY` judged candidates."""
    return judged // CANARY_EVERY > canaries


def canary(pairs: Sequence[Pair], calibration: Calibration) -> StageResult:
    """A hidden A/A trial. Not passed: two identical arms differ by more than the margin; the session is void."""
    g = gains(pairs)
    s, df = stats.pooled_sd(g, calibration.log_sd, calibration.pairs - 1)
    bar = float(np.log1p(calibration.margin))
    p = float(min(1.0, 2 * min(stats.t_p(g, bar, s, df), stats.t_p(-g, bar, s, df))))
    ok = p >= CANARY_ALPHA
    result = _result(Stage.CANARY, g, calibration, True, p, int(g.size))
    why = "identical arms agree" if ok else f"identical arms differ: {result.why}; this session's measurements are void"
    return replace(result, passed=ok, why=why)


def ablation(pairs: Sequence[Pair], calibration: Calibration) -> StageResult:
    """Arm a: final without one patch; arm b: final. Not passed: the patch is shown to buy less than the margin.

    A patch is dropped only on evidence; one whose share cannot be resolved stays, since it was accepted once.
    """
    g = gains(pairs)
    s, df = stats.pooled_sd(g, calibration.log_sd, calibration.pairs - 1)
    p = float(stats.t_p(-g, -np.log1p(calibration.margin), s, df))
    keep = p >= 0.1
    result = _result(Stage.ABLATE, g, calibration, True, p, int(g.size))
    why = f"buys {np.expm1(g.mean()):+.1%}" if keep else f"buys {np.expm1(g.mean()):+.1%}: less than the margin"
    return replace(result, passed=keep, why=why, reason=None if keep else RejectReason.NO_GAIN)


def headline(pairs: Sequence[Pair], calibration: Calibration | None = None) -> StageResult:
    """Original (arm a) against final (arm b): ratio of times with its 95 % interval, from the headline's own pairs.

    Passed: the interval lies below 1. Errors: ValueError without a usable pair.
    """
    g = gains(pairs)
    if g.size == 0:
        raise ValueError("the headline has no usable pair")
    low, high = _interval(g, calibration)
    ratio = float(np.exp(-g.mean()))
    why = f"{1 / ratio:.2f}x [{np.exp(low):.2f}, {np.exp(high):.2f}] from {g.size} pairs"
    facts = {"hodges_lehmann_ratio": float(np.exp(-stats.hodges_lehmann(g)))}
    return StageResult(Stage.HEADLINE, low > 0, None, ratio, _as_ratios(low, high), int(g.size), why=why, facts=facts)


def ci(pairs: Sequence[Pair], calibration: Calibration | None = None) -> tuple[float, float]:
    """95 % interval of candidate time / incumbent time (t on log-ratios; the calibrated SD is pooled in if given)."""
    return _as_ratios(*_interval(gains(pairs), calibration))


def _as_ratios(low: float, high: float) -> tuple[float, float]:
    """An interval of gains as one of time ratios. "Anything" is e-20 to e20: the ledger holds no infinities."""
    return float(np.exp(-min(high, 20.0))), float(np.exp(-max(low, -20.0)))


def ratio(pairs: Sequence[Pair]) -> float:
    """Geometric mean of candidate time / incumbent time over the usable pairs. Errors: ValueError without one."""
    g = gains(pairs)
    if g.size == 0:
        raise ValueError("no usable pair")
    return float(np.exp(-g.mean()))


def _interval(g: stats.Array, calibration: Calibration | None) -> tuple[float, float]:
    if g.size == 0:
        return -np.inf, np.inf
    if calibration is None:
        return stats.t_interval(g)
    return stats.t_interval(g, 0.95, calibration.log_sd, calibration.pairs - 1)


def interval(pairs: Sequence[Pair], calibration: Calibration | None = None) -> tuple[float, tuple[float, float]]:
    """(ratio, 95 % interval) of candidate time / incumbent time. Errors: ValueError without a usable pair."""
    return ratio(pairs), ci(pairs, calibration)


def noninferior(pairs: Sequence[Pair], calibration: Calibration) -> StageResult:
    """For a member of a series: not slower by more than the margin, and no guard worse; it need not gain.

    The margin is that of a p50 guard: 2 %, or what the calibrated noise can decide with these pairs.
    Errors: ValueError without a usable pair.
    """
    g = gains(pairs)
    if g.size == 0:
        raise ValueError("no usable pair")
    as_guard = [replace(p, guards={**p.guards, _TARGET: (p.a_us_per_token, p.b_us_per_token)}) for p in pairs if p.a_us_per_token and p.b_us_per_token]  # fmt: skip
    cal = replace(calibration, guard_sds={**calibration.guard_sds, _TARGET: calibration.log_sd})
    result = replace(_result(pairs[0].stage, g, cal, True, 1.0, int(g.size)), p=None)
    found = guards.check(as_guard, cal, result.ratio)
    facts = {**result.facts, "guards": [x.to_json() for x in found]}
    bad = [x for x in found if x.state is not guards.GuardState.PASS]
    if not bad:
        return replace(result, why="not worse", facts=facts)
    reason = RejectReason.GUARD if bad[0].state is guards.GuardState.WORSE else None
    parked = bad[0].state is guards.GuardState.ABSURD
    return replace(result, passed=False, reason=reason, parked=parked, why=_text(bad[0]), facts=facts)
