"""Decide from pairs of timings: pure functions, no I/O, no clock, no configuration.

Inside this file g = ln(incumbent time / candidate time), so that a gain is positive. Stages use disjoint pairs,
and a candidate is accepted only if screen, decide and confirm all pass; the reported gain is that of the
confirmation. Not for: the looks and alphas of a stage (`rules.py`), guards and traffic cells (`guards.py`), which
pairs belong to a program that was tried before (`state.py`), taking timings (`measure.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optimizer import guards, rules, stats
from optimizer.types import Calibration, Pair, Protocol, RejectReason, Stage, StageResult, Verdict

MAX_DISCARDED = 0.2  # of the pairs of a stage
INTERRUPTED = "interrupted"  # a pair that a killed run left behind: nobody saw its times, it is no discard
BLIND_GUARD = 1.0  # a guard that lets a doubling pass guards nothing, and the run says so
CANARY_EVERY = 10  # candidates between two hidden A/A trials
CANARY_ALPHA = 0.002  # two-sided; three canaries a session stay under 1 %
_TARGET = "target_p50"


# --- calibration ---------------------------------------------------------------------------------------


def gains(pairs: Iterable[Pair]) -> stats.Array:
    """g = ln(a / b) of every pair that was not discarded, in the order given."""
    return np.array(
        [np.log(p.a_us_per_token / p.b_us_per_token) for p in pairs if not p.discarded and p.a_us_per_token and p.b_us_per_token],
        float,
    )


def calibrate(
    pairs: Sequence[Pair], device: str, tp: int, protocol: Protocol | None = None, guard_margins: Mapping[str, float] | None = None
) -> Calibration:
    """What A/A pairs say about this machine: spread, bias, margin and minimum detectable effect.

    guard_margins: by guard, what a person stated instead of the usual margins. Errors: ValueError when fewer than two
    usable pairs are left, or when there is no guard of a stated name.
    """
    g = gains(pairs)
    if g.size < 2:
        raise ValueError(f"calibration needs at least 2 usable A/A pairs, got {g.size} of {len(pairs)}")
    rule = rules.rule_of(protocol)
    log_sd = stats.robust_sd(g)
    bias = stats.hodges_lehmann(g)
    margin = rules.margin_for(rule, device, tp, log_sd, bias, int(g.size))
    sizes = rules.sizes_of(protocol)
    guard_sds = guards.calibrate(pairs)
    if unknown := sorted(set(guard_margins or ()) - guard_sds.keys()):
        raise ValueError(f"--guard-margin {unknown[0]}: no guard of that name here; there are: {', '.join(sorted(guard_sds))}")
    return Calibration(
        pairs=int(g.size),
        log_sd=log_sd,
        bias=bias,
        margin=margin,
        mde=rules.mde(rule, sizes, margin, log_sd, int(g.size) - 1),
        guard_sds=guard_sds,
        guard_margins=dict(guard_margins or {}),
    )


def false_accept_bound(protocol: Protocol, calibration: Calibration, trials: int = 50_000) -> float:
    """95 % upper bound of the chance to accept one no-op under this calibration's noise (normal), by simulation."""
    rule, sizes = rules.rule_of(protocol), rules.sizes_of(protocol)
    rate = rules.acceptance_rate(rule, sizes, 0.0, calibration.margin, calibration.log_sd, calibration.pairs - 1, trials)
    return rules.binomial_upper(round(rate * trials), trials)


def describe(calibration: Calibration, protocol: Protocol) -> list[str]:
    """What this protocol can and cannot tell on this machine, in sentences for a person."""
    c = calibration
    detectable = f"+{c.mde:.1%}" if c.mde < rules.MDE_CAP else "no effect"
    said = [
        f"{c.pairs} A/A pairs: spread {c.log_sd:.1%}, bias {c.bias:+.1%}, margin {c.margin:.1%}; "
        f"{detectable} is detected with 80 % power",
        f"protocol {protocol.name}: {rules.rule_of(protocol).why}; a patch that does nothing passes with a chance below "
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
        if c.guard_margins:
            said.append("margins stated for this run: " + ", ".join(f"{name} {m:.1%}" for name, m in sorted(c.guard_margins.items())))
        if blind := [name for width, _, name in wide if width > BLIND_GUARD]:
            said.append(f"warning: on this machine, as it is now, nothing guards {', '.join(blind)}: too noisy")
    return said


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
    planned = rules.stage_pairs(protocol, stage)
    if stage in (Stage.HEADLINE, Stage.CANARY, Stage.ABLATE):
        if g.size < planned:
            return None
        return {Stage.HEADLINE: headline, Stage.CANARY: canary, Stage.ABLATE: ablation}[stage](own, calibration)
    if g.size == 0:
        return None
    rule = rules.rule_of(protocol)
    state, p, used = rules.stage_outcome(
        rule, stage, planned, g[None, :], calibration.margin, calibration.log_sd, calibration.pairs - 1
    )
    if state[0] == 0:
        return None
    result = _result(stage, g[: int(used[0])], calibration, bool(state[0] == 1), float(p[0]), planned)
    if result.passed and (odd := sum(p.facts.get("drift", {}).get("tolerance", 0) for p in own)):
        far = max(p.facts["drift"].get("largest", 0.0) for p in own if "drift" in p.facts)
        why = f"{odd} timed streams lie between the bands of equal and wrong, up to {far:.3g} logits below the oracle's best: a person decides ({result.why})"
        return replace(result, passed=False, parked=True, reason=RejectReason.DRIFT, why=why)
    if not result.passed or stage is Stage.SCREEN:
        return result
    return _with_guards(result, pairs, calibration, _streams(protocol), more=g.size < planned)


def _streams(protocol: Protocol) -> dict[str, float]:
    """Streams at once of each closed batch cell, for each of the target cell's; {} where the target is no time per token."""
    if protocol.metric not in ("tpot", "token_wall"):
        return {}
    mine = max(1, protocol.cell.concurrency)
    return {c.name: c.concurrency / mine for c in protocol.guard_cells if c.concurrency > 1}


def _too_many_discarded(stage: Stage, own: Sequence[Pair], protocol: Protocol) -> StageResult | None:
    dropped = [p.discarded for p in own if p.discarded and p.discarded != INTERRUPTED]
    allowed = max(1, int(MAX_DISCARDED * rules.stage_pairs(protocol, stage)))
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
        most = f"at most {np.expm1(high):+.1%}" if high < bar else f"not taken further, though up to {np.expm1(high):+.1%} is not ruled out"
        why = f"gain {np.expm1(mean):+.1%} in {g.size} pairs, {most}; the margin is {cal.margin:.1%}"
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


def _with_guards(
    result: StageResult, pairs: Sequence[Pair], cal: Calibration, streams: Mapping[str, float], more: bool
) -> StageResult | None:
    """Guards after the gain is shown. Decide stops only on a guard that is shown worse; confirm needs all to pass."""
    judged = [p for p in pairs if p.stage in (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM)]
    found = guards.check(judged, cal, result.ratio, streams)
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
