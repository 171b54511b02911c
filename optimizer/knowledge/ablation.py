"""Does knowledge pay? The same budget with accepted entries and without them, read out of the runs' ledgers.

Every seed gives two runs that differ in nothing but what the proposer may read. Gain is what the run brought of the
first engine's rate: speed-up - 1, by the product of confirmed ratios. A program has one speed-up, from all runs that came to
it: each run measures it by a few pairs, and where both arms end in the same program their noise would else decide which of them
had come there. An arm reaches a share of the final gain with the
attempt whose acceptance brings it there; final is the larger of the two arms' ends, so that knowledge which stops early
cannot win by wanting less. Not for: starting runs (trials.py), or deciding what is accepted (review/).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer import state, stats
from optimizer.ledger import Line

WITH, WITHOUT = "with", "without"
SHARE = 0.9
LEVEL = 0.975  # of each interval: attempts and time are looked at, so that both hold together with 95 %


@dataclass(frozen=True, slots=True)
class Point:
    """After an attempt: its number, seconds of work since the run began, the incumbent (its syntax tree's hash; "" is the
    first engine) and first engine / incumbent as this run measured it."""

    attempt: int
    seconds: float
    program: str
    speedup: float


@dataclass(frozen=True, slots=True)
class Reached:
    """When one arm had the share of the final gain; None: it never had, in `tried` attempts."""

    attempts: int | None
    seconds: float | None
    tried: int
    spent_s: float
    speedup: float  # at its end
    mechanisms: tuple[str, ...]  # tried, in order, accepted ones with a +


@dataclass(frozen=True, slots=True)
class Trial:
    """Both arms of one seed. None as an arm's end: the final gain was 0, there is nothing to reach."""

    seed: int
    arms: Mapping[str, Reached]

    @property
    def final(self) -> float:
        return max(arm.speedup for arm in self.arms.values())


@dataclass(frozen=True, slots=True)
class Ratio:
    """With / without over all seeds: geometric mean, t interval of the logarithms at LEVEL; below 1 knowledge is cheaper.

    `never`: arms of each kind that never reached the share, counted as one attempt more than they had (or as all their
    time), which is the least it can be: so such an arm without knowledge can only hide that knowledge pays, and such an
    arm with it only that it costs.
    """

    mean: float
    interval: tuple[float, float] | None
    seeds: int
    never: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the trials say. `pays`: True and False where an interval excludes 1, None where it does not."""

    share: float
    trials: tuple[Trial, ...]
    attempts: Ratio | None
    seconds: Ratio | None
    pays: bool | None
    why: str


def curve(lines: Sequence[Line]) -> list[Point]:
    """One point per ended attempt, in order."""
    points, last, program, proposed = [], 0, "", ""
    for at, line in enumerate(lines):
        if line["kind"] == "proposed":
            proposed = str(line["data"]["ast_hash"])  # of a series the last one stays
        elif line["kind"] in state.VERDICTS and line["attempt"] is not None and line["attempt"] > last:
            last = line["attempt"]
            program = proposed if line["kind"] == "accepted" else program
            points.append(Point(last, state.wall_s(lines[: at + 1]), program, state.speedup(lines[: at + 1])))
    return points


def speedups(curves: Iterable[Sequence[Point]]) -> dict[str, float]:
    """Program -> its speed-up: that of the program before it, times what the step brought; the geometric mean over the
    runs that made the step."""
    steps: dict[str, list[tuple[str, float]]] = {}  # program -> (the one before, log of what the step brought)
    for points in curves:
        before, log, met = "", 0.0, {""}
        for point in points:
            if point.program not in met:
                steps.setdefault(point.program, []).append((before, math.log(point.speedup) - log))
            before, log = point.program, math.log(point.speedup)
            met.add(before)

    def log_of(program: str, behind: frozenset[str]) -> float:
        ways = [(b, gain) for b, gain in steps.get(program, []) if b not in behind]  # two runs may go to and fro
        return sum(log_of(b, behind | {program}) + gain for b, gain in ways) / len(ways) if ways else 0.0

    return {program: math.exp(log_of(program, frozenset())) for program in ("", *steps)}


def trials(ledgers: Mapping[int, Mapping[str, Sequence[Line]]], share: float = SHARE) -> list[Trial]:
    """Of every seed both arms, held to one final gain. ledgers: seed -> arm -> lines."""
    curves = {seed: {arm: curve(lines) for arm, lines in arms.items()} for seed, arms in ledgers.items()}
    known = speedups(points for arms in curves.values() for points in arms.values())
    return [_trial(seed, arms, ledgers[seed], known, share) for seed, arms in curves.items()]


def _trial(seed: int, curves: Mapping[str, Sequence[Point]], ledgers: Mapping[str, Sequence[Line]], known: Mapping[str, float], share: float) -> Trial:
    final = max((known[points[-1].program] for points in curves.values() if points), default=1.0) - 1.0
    return Trial(seed, {arm: _reached(points, ledgers[arm], known, share * final) for arm, points in curves.items()})


def _reached(points: Sequence[Point], lines: Sequence[Line], known: Mapping[str, float], gain: float) -> Reached:
    there = next((p for p in points if gain > 0 and known[p.program] - 1.0 >= gain - 1e-12), None)
    tried = [
        ("+" if a.end is not None and a.end["kind"] == "accepted" else "") + str(a.data("proposed")[-1]["mechanism"])
        for a in state.attempts(lines)
    ]
    return Reached(
        attempts=None if there is None else 1 + points.index(there),
        seconds=None if there is None else there.seconds,
        tried=len(points),
        spent_s=state.wall_s(lines),
        speedup=known[points[-1].program] if points else 1.0,
        mechanisms=tuple(tried),
    )


def answer(trials: Sequence[Trial], share: float = SHARE) -> Answer:
    """The ratios over all seeds in which anything was gained, and whether knowledge paid."""
    told = [t for t in trials if t.final > 1.0]
    if not told:
        return Answer(share, tuple(trials), None, None, None, "no arm of any seed gained anything: nothing can be said of knowledge")
    attempts = _ratio(told, lambda arm: arm.attempts, lambda arm: arm.tried + 1)
    seconds = _ratio(told, lambda arm: arm.seconds, lambda arm: arm.spent_s)
    verdicts = {name: _verdict(r) for name, r in (("attempts", attempts), ("time", seconds))}
    if True in verdicts.values() and False not in verdicts.values():
        return Answer(share, tuple(trials), attempts, seconds, True, "it pays: fewer " + " and less ".join(n for n, v in verdicts.items() if v))
    if False in verdicts.values() and True not in verdicts.values():
        return Answer(share, tuple(trials), attempts, seconds, False, "it costs: more " + " and ".join(n for n, v in verdicts.items() if v is False))
    why = "one seed has no interval" if len(told) == 1 else "no difference could be shown: the intervals hold 1"
    return Answer(share, tuple(trials), attempts, seconds, None, why)


def _ratio(trials: Sequence[Trial], value: Any, at_least: Any) -> Ratio:
    logs = []
    never: dict[str, int] = {WITH: 0, WITHOUT: 0}
    for one in trials:
        found = []
        for arm in (WITH, WITHOUT):
            reached = one.arms[arm]
            known = value(reached)
            never[arm] += known is None
            found.append(max(1e-9, at_least(reached) if known is None else known))
        logs.append(math.log(found[0] / found[1]))
    low, high = stats.t_interval(logs, LEVEL)
    ends = (math.exp(low), math.exp(high)) if len(logs) > 1 else None
    return Ratio(math.exp(sum(logs) / len(logs)), ends, len(logs), never)


def _verdict(ratio: Ratio) -> bool | None:
    """True below 1, False above, None where the interval holds 1, is none, or rests on what is not known."""
    if ratio.interval is None:
        return None
    if ratio.interval[1] < 1.0:
        return None if ratio.never[WITH] else True
    return False if ratio.interval[0] > 1.0 and not ratio.never[WITHOUT] else None


def rows(found: Answer) -> list[tuple[str, ...]]:
    """(seed, arm, reached after attempts, seconds, end, what was tried) for a table."""
    return [
        (
            str(one.seed),
            arm,
            f"not in {reached.tried}" if reached.attempts is None else str(reached.attempts),
            f"not in {reached.spent_s:.0f}" if reached.seconds is None else f"{reached.seconds:.0f}",
            f"{reached.speedup:.2f}x",
            ", ".join(reached.mechanisms) or "nothing",
        )
        for one in found.trials
        for arm, reached in one.arms.items()
    ]


def words(found: Answer) -> str:
    """The answer in one or two sentences."""
    said = found.why
    for name, ratio in (("attempts", found.attempts), ("time", found.seconds)):
        if ratio is not None:
            ends = f" [{ratio.interval[0]:.2f}, {ratio.interval[1]:.2f}]" if ratio.interval else ""
            late = "".join(f"; {n} of them {arm} never got there" for arm, n in ratio.never.items() if n)
            said += f"; {name} to {found.share:.0%} of the final gain, with / without: {ratio.mean:.2f}{ends} ({ratio.seeds} seeds{late})"
    return said
