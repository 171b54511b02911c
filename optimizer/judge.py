"""Gates and timed stages of one candidate, each result in the ledger as soon as it is known.

A stage takes pairs until `accept` has decided; pairs that an earlier process or an earlier attempt took of the
same program against the same incumbent count, so neither a kill nor a retry buys fresh alpha. Not for: how a
pair is timed (measure.py), what the numbers mean (accept.py), what a gate checks (gates/).
"""

from __future__ import annotations

import errno
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from optimizer import accept, state
from optimizer.candidate import Candidate, Member
from optimizer.confine.launch import LaunchError
from optimizer.confine.sandbox import SandboxError
from optimizer.measure import CandidateFailed, InfrastructureError
from optimizer.run import Run
from optimizer.serial import build, plain
from optimizer.services import Interrupted, Services, Stop
from optimizer.truth.oracle import OracleError
from optimizer.types import (
    Calibration,
    GateResult,
    LaunchSpec,
    Pair,
    RejectReason,
    Stage,
    StageResult,
    Verdict,
)

STAGES = (Stage.SCREEN, Stage.DECIDE, Stage.CONFIRM)
_DIED = {RejectReason.BOOT, RejectReason.CRASH, RejectReason.HANG, RejectReason.INFRASTRUCTURE}
_KIND = {Stage.SCREEN: "screened", Stage.DECIDE: "decided", Stage.CONFIRM: "confirmed"}


def pause_point(run: Run) -> None:
    """Between two steps: here a run that was asked to stop does so."""
    if run.stop_requested:
        raise Interrupted


@contextmanager
def failures(run: Run, stage: str) -> Iterator[None]:
    """Whatever breaks while a candidate is judged ends its attempt under a name; the loop goes on.

    But what dies while the run is asked to stop may have been stopped with it, as a service manager signals every process:
    that is nobody's fault. Raises Stop, or Interrupted.
    """
    try:
        with _named(stage):
            yield
    except Stop as stop:
        if run.stop_requested and stop.reason in _DIED:
            raise Interrupted from stop
        raise


@contextmanager
def _named(stage: str) -> Iterator[None]:
    try:
        yield
    except CandidateFailed as error:
        raise Stop(Verdict.REJECT, stage, error.reason, error.detail) from error
    except LaunchError as error:
        raise Stop(Verdict.REJECT, stage, error.reason, error.detail) from error
    except (InfrastructureError, OracleError, SandboxError) as error:
        raise Stop(Verdict.REJECT, stage, RejectReason.INFRASTRUCTURE, str(error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EADDRINUSE):
            raise
        raise Stop(Verdict.REJECT, stage, RejectReason.INFRASTRUCTURE, str(error)) from error


def gates(run: Run, do: Services, candidate: Candidate, stage: str) -> None:
    """Run a gate stage on every member of the series. Raises Stop at the first that fails or is parked."""
    passed = _attempt(run, candidate.number).gates_passed
    left = [(at, member) for at, member in enumerate(candidate.members) if not passed(stage, at)]
    if stage == "quick":
        _texts(run, do, candidate, left[1:])
    with do.compiling([member.spec for _, member in left[1:]]):
        for at, member in left:
            do.check_seal()
            with failures(run, stage):
                seconds = _member_gates(run, do, candidate, stage, at, member)
            do.check_seal()
            done = {"stage": stage, "member": at, "gate": "all", "check": "", "passed": True, "seconds": seconds}
            run.ledger.append("gate", candidate.number, done)


def _texts(run: Run, do: Services, candidate: Candidate, later: Sequence[tuple[int, Member]]) -> None:
    """Minutes of engines for the first members are lost when a later one's text is refused: that is looked at before."""
    for at, member in later:
        for result in do.gates("static", member.spec, candidate.incumbent, member.parent, member.commit):
            if not result.passed and not result.parked:
                run.ledger.append("gate", candidate.number, {**plain(result), "stage": "quick", "member": at})
                _refuse(result, "quick")


def _refuse(result: GateResult, stage: str) -> None:
    raise Stop(Verdict.REJECT, stage, result.reason or RejectReason.POLICY, f"{result.gate}: {result.detail}")


def _member_gates(run: Run, do: Services, candidate: Candidate, stage: str, at: int, member: Member) -> float:
    parked, seconds = None, 0.0
    do.view.step(f"attempt {candidate.number}: {stage} gates")
    for result in do.gates(stage, member.spec, candidate.incumbent, member.parent, member.commit):
        run.ledger.append("gate", candidate.number, {**plain(result), "stage": stage, "member": at})
        do.view.step(f"attempt {candidate.number}: {stage} gates: {result.gate}")
        seconds += result.seconds
        if result.parked:
            parked = parked or result
        elif not result.passed:
            _refuse(result, stage)
        pause_point(run)
    if parked is not None and not candidate.admitted:
        raise Stop(Verdict.PARKED, stage, parked.reason or RejectReason.DRIFT, f"{parked.gate}: {parked.detail}")
    return seconds


def _attempt(run: Run, number: int) -> state.Attempt:
    return next(a for a in state.attempts(run.ledger.lines()) if a.number == number)


def screen(run: Run, do: Services, candidate: Candidate) -> StageResult:
    """Enablers must not make it slower; the end of the series must look faster. Raises Stop."""
    for at, member in enumerate(candidate.members[:-1]):
        _enabler(run, do, candidate, at, member)
    return stage(run, do, candidate, Stage.SCREEN)


def stage(run: Run, do: Services, candidate: Candidate, which: Stage) -> StageResult:
    """Take pairs until the stage is decided, and enter the result. Raises Stop unless it passed."""
    calibration = calibration_of(run)
    have = [d for d in _attempt(run, candidate.number).data(_KIND[which]) if d.get("member") is None]
    if have:
        result = build(StageResult, {k: have[0][k] for k in StageResult.__slots__})
    else:
        with failures(run, which):
            result, pairs = _decide(run, do, candidate, which, calibration)
        run.ledger.append(_KIND[which], candidate.number, {**plain(result), **_prediction(candidate, pairs)})
    if result.parked and not candidate.admitted:
        raise Stop(Verdict.PARKED, which, result.reason or RejectReason.PHYSICS, result.why)
    if not result.passed and not result.parked:
        raise Stop(accept.verdict(result), which, result.reason, result.why)
    return result


def _decide(
    run: Run, do: Services, candidate: Candidate, which: Stage, calibration: Calibration
) -> tuple[StageResult, list[Pair]]:
    key = candidate.end.key
    while True:
        pairs = pairs_of(run, which, key)
        judged = [pair for each in STAGES for pair in pairs_of(run, each, key)]  # guards use those of every stage
        result = accept.judge(which, judged, calibration, do.protocol)
        if result is not None:
            return result, pairs
        if not do.budget.fits(do.budget.pair_s()):
            why = f"the time was spent after {len(pairs)} pairs of {which}"
            raise Stop(Verdict.UNDECIDED, which, RejectReason.NO_BUDGET, why)
        take_pair(run, do, candidate.incumbent, candidate.end.spec, which, key, candidate.number)


def _enabler(run: Run, do: Services, candidate: Candidate, at: int, member: Member) -> None:
    """A member before the end: neutral is enough. What few pairs make look worse gets as many as a decision has, and what is
    plainly faster no more than one."""
    if any(d.get("member") == at for d in _attempt(run, candidate.number).data("screened")):
        return
    with failures(run, Stage.SCREEN):
        while (result := _of_enabler(run, do, member)) is None:
            take_pair(run, do, candidate.incumbent, member.spec, Stage.SCREEN, member.key, candidate.number)
    run.ledger.append("screened", candidate.number, {**plain(result), "member": at})
    if not result.passed:
        why = f"patch {at + 1} of the series: {result.why}"
        raise Stop(accept.verdict(result), Stage.SCREEN, result.reason, why)


def _of_enabler(run: Run, do: Services, member: Member) -> StageResult | None:
    """What its pairs say; None when more are needed."""
    pairs = pairs_of(run, Stage.SCREEN, member.key)
    lost = len(pairs) - len(kept(pairs))
    if lost > do.protocol.screen_pairs:
        raise InfrastructureError(f"{lost} pairs had to be discarded")
    if len(pairs) == lost:
        return None
    result = accept.noninferior(pairs, calibration_of(run))
    if result.passed and result.ci95[1] < 1.0:
        return result  # plainly faster: one pair says that it is not slower
    if result.pairs < do.protocol.screen_pairs:
        return None
    return result if result.passed or result.parked or result.pairs >= do.protocol.decide_pairs else None


def _prediction(candidate: Candidate, pairs: Sequence[Pair]) -> dict[str, object]:
    """What was predicted and what the arms' medians say; microseconds per `per`."""
    good = kept(pairs)
    a = statistics.median(p.a_us_per_token or 0.0 for p in good) if good else None
    b = statistics.median(p.b_us_per_token or 0.0 for p in good) if good else None
    return {
        "a_us": a,
        "b_us": b,
        "measured_us": a - b if a is not None and b is not None else None,
        "predicted_us": candidate.predicted_us,
        "per": candidate.end.patch.per,
    }


def kept(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs that count."""
    return [pair for pair in pairs if pair.discarded is None]


def calibration_of(run: Run) -> Calibration:
    found = state.calibration(run.ledger.lines())
    if found is None:
        raise RuntimeError("nothing is judged before the calibration")
    return found


def pairs_of(run: Run, which: Stage, key: str) -> list[Pair]:
    return state.pairs(run.ledger.lines(), which, key, run.ledger.context.incumbent_commit)


def order_of(run: Run, which: str, key: str, index: int) -> str:
    """ABBA with a random start: `ab` and `ba` in turn by twos, the start drawn from the run's seed."""
    start = random.Random(f"{run.request.seed}/{which}/{key}").randrange(2)
    return ("ab", "ba", "ba", "ab")[(index + 2 * start) % 4]


def take_pair(
    run: Run, do: Services, a: LaunchSpec, b: LaunchSpec, which: Stage, key: str, attempt: int | None
) -> Pair:
    """Time one pair and enter it. A kill in between leaves it behind as `interrupted`."""
    pause_point(run)
    index = len(pairs_of(run, which, key))
    order = order_of(run, which, key, index)
    do.view.step(f"{f'attempt {attempt}: ' if attempt else ''}{which}: pair {index + 1}", do.budget.pair_s())
    run.pair_begins(attempt, {"stage": which.value, "index": index, "order": order, "key": key})
    pair = do.run_pair(a, b, which, index, order)
    run.pair_ended(attempt, pair, key)
    return pair
