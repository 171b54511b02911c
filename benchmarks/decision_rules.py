"""How often our own acceptance code errs: `python -m benchmarks.decision_rules [--protocol full] [--trials N]`.

Simulates whole sessions (A/A calibration, then candidates) with `optimizer.rules`, imported, not copied: the
array functions that `accept.judge` calls for one candidate are called here for thousands. Prints the rate of
false acceptance per candidate and per session of 30 no-ops, and the power at several gains, per noise. The last
line is one JSON object. Not for: measuring noise (`record_noise.py`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks import noise
from optimizer import rules, stats
from optimizer.targets import PROTOCOLS
from optimizer.types import Protocol, Stage

EFFECTS = (0.01, 0.02, 0.03, 0.05, 0.10, 0.15, 0.20, 0.30, 1.00)
NO_OPS = 30  # candidates of a session
SESSIONS = 4000
STAGES = (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM)


@dataclass(frozen=True, slots=True)
class Row:
    """What one rule does under one noise."""

    protocol: str
    noise: str
    device: str
    tp: int
    sd: float  # median calibrated SD of the paired log-ratio
    margin: float  # median
    false_accept: float  # per no-op candidate
    false_accept_upper: float  # 95 % bound: what so many trials can exclude
    session_false_accept: float  # sessions of 30 no-ops that accepted at least one, simulated as sessions
    pairs_at_zero: float  # mean pairs that a no-op costs
    power: dict[str, float]
    pairs: dict[str, float]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The calibrations of all simulated sessions."""

    sd: np.ndarray
    margin: np.ndarray
    df: int


def calibrate(rule: rules.Rule, gains: np.ndarray, device: str, tp: int) -> Calibrated:
    """Each session's A/A pairs through the functions that `accept.calibrate` uses."""
    sd = np.array([stats.robust_sd(g) for g in gains])
    bias = np.array([stats.hodges_lehmann(g) for g in gains])
    n = gains.shape[1]
    margin = [rules.margin_for(rule, device, tp, float(s), float(b), n) for s, b in zip(sd, bias, strict=True)]
    return Calibrated(sd, np.array(margin), gains.shape[1] - 1)


def candidates(
    protocol: Protocol, source, effect: float, cal: Calibrated, each: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """[sessions, each] accepted, and pairs used, of candidates with this effect."""
    sizes = {s: rules.stage_pairs(protocol, s) for s in STAGES}
    sessions = cal.sd.size
    g = source.gains(sessions * each, sum(sizes.values()), rng) + np.log1p(effect)
    cuts = np.cumsum([sizes[s] for s in STAGES])[:-1]
    by_stage: dict[Stage, stats.Array] = dict(zip(STAGES, np.split(g, cuts, axis=1), strict=True))
    rule = rules.rule_of(protocol)
    accepted, used = rules.procedure(
        rule, sizes, by_stage, np.repeat(cal.margin, each), np.repeat(cal.sd, each), cal.df
    )
    return accepted.reshape(sessions, each), used.reshape(sessions, each)


def simulate(
    protocol: Protocol, name: str, source, calibrated_on, device: str, tp: int, sessions: int, seed: int = 1
) -> Row:
    """One row. calibrated_on: the noise during calibration (another than `source` for a machine that changes)."""
    rng = np.random.default_rng(seed)
    rule = rules.rule_of(protocol)
    cal = calibrate(rule, calibrated_on.gains(sessions, protocol.calibrate_pairs, rng), device, tp)
    wrong, cost = candidates(protocol, source, 0.0, cal, NO_OPS, rng)
    power, pairs = {}, {}
    for effect in EFFECTS:
        right, used = candidates(protocol, source, effect, cal, 2, rng)
        power[f"{effect:.2f}"] = round(float(right.mean()), 4)
        pairs[f"{effect:.2f}"] = round(float(used.mean()), 1)
    return Row(
        protocol.name, name, device, tp, float(np.median(cal.sd)), float(np.median(cal.margin)),
        float(wrong.mean()), rules.binomial_upper(int(wrong.sum()), wrong.size), float(wrong.any(axis=1).mean()),
        float(cost.mean()), power, pairs,
    )  # fmt: skip


def show(row: Row) -> str:
    power = " ".join(f"{100 * p:4.0f}" for p in row.power.values())
    return (
        f"{row.protocol:5} {row.noise:24} {row.device:4} tp{row.tp}  sd {row.sd:6.2%}  margin {row.margin:6.2%}  "
        f"no-op {row.false_accept:.3%} (< {row.false_accept_upper:.3%})  session {row.session_false_accept:.2%}  "
        f"pairs {row.pairs_at_zero:4.1f} | {power}"
    )


def rows(protocols: list[Protocol], sessions: int) -> list[Row]:
    found = []
    for protocol in protocols:
        for name, source in noise.MODELS.items():
            found.append(simulate(protocol, name, source, source, "cuda", 4, sessions))
        found.append(simulate(protocol, "quiet", noise.MODELS["quiet"], noise.MODELS["quiet"], "cpu", 4, sessions))
        for before, after, device in (("typical", "oversubscribed", "cpu"), ("device_bound", "typical", "cuda")):
            found.append(simulate(protocol, f"{before}->{after}", noise.MODELS[after], noise.MODELS[before], device, 4, sessions))
        for name, bias in (("quiet", 0.01), ("typical", 0.02)):
            biased = noise.Biased(noise.MODELS[name], bias)
            found.append(simulate(protocol, f"{name}, biased {bias:.0%}", biased, biased, "cpu", 1, sessions))
        for name, source in noise.recorded().items():
            found.append(simulate(protocol, f"recorded: {name}", source, source, "cpu", 4, sessions))
    return found


def summary(found: list[Row]) -> dict[str, object]:
    """The last line: the figures that are asked of `full`, and every row."""
    full = {r.noise: r for r in found if r.protocol == "full" and (r.device == "cuda" or r.noise.startswith("rec"))}
    models = [full[n] for n in noise.MODELS if n in full]
    result: dict[str, object] = {}
    if models:
        result["session_false_accept"] = max(r.session_false_accept for r in models)
        result["power_at_3pct_quiet"] = full["quiet"].power["0.03"]
        result["power_at_5pct_typical"] = full["typical"].power["0.05"]
        result["recorded"] = {n: r.power for n, r in full.items() if n.startswith("recorded")}
    quick = [r for r in found if r.protocol == "quick"]
    if quick:
        result["quick_false_accept_per_candidate"] = max(r.false_accept for r in quick)
        result["quick_session_false_accept"] = max(r.session_false_accept for r in quick)
    return result | {"rows": [asdict(r) for r in found]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--protocol", choices=[*PROTOCOLS, "all"], default="all")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    args = parser.parse_args(argv)
    chosen = list(PROTOCOLS.values()) if args.protocol == "all" else [PROTOCOLS[args.protocol]]
    found = rows(chosen, args.sessions)
    print(f"{'':125}power in % at gains of " + " ".join(f"{e:+.0%}" for e in EFFECTS))
    for row in found:
        print(show(row))
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    main()
