"""A/A: the incumbent against itself, at the start (what can be resolved here?) and hidden in between (canaries).

Not for: the statistics (accept.py), or timing (measure.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from optimizer import accept, state
from optimizer.candidate import incumbent_name
from optimizer.headline import floor
from optimizer.judge import calibration_of, failures, kept, pairs_of, take_pair
from optimizer.ledger import Line
from optimizer.run import Run, RunError
from optimizer.serial import plain
from optimizer.services import Services, Stop
from optimizer.types import Pair, Stage

MUCH_FASTER = 0.6  # of the calibrated step
# The A/A bias widens the margin, and three pairs of a fast, loud engine give one of several per cent by chance: where
# pairs are cheap more are taken, up to so many seconds and so many times the protocol's number.
CALIBRATE_S = 60.0
CALIBRATE_MOST = 3


def calibrate(run: Run, do: Services) -> None:
    """Take A/A pairs of the incumbent until the protocol's number is there; enter and print what they say.

    A run that goes on in another environment (hash), or whose incumbent has become much faster since, is calibrated
    anew: the noise of a slow step says nothing of a fast one. Raises RunError when the engine cannot even be timed
    against itself.
    """
    if _still_holds(run):
        return
    key = f"aa/{run.ledger.context.env_hash}"
    pairs = _aa(run, do, Stage.CALIBRATE, key, do.protocol.calibrate_pairs)
    try:
        found = accept.calibrate(pairs, run.request.device, run.request.tp, do.protocol, run.request.guard_margins)
    except ValueError as error:
        raise RunError(str(error)) from None
    first = state.calibration(run.ledger.lines()) is None
    bound = floor(run, do) if first else {}
    run.ledger.append("calibrated", None, {**plain(found), **bound, "token_us": state.token_us(run.ledger.lines())})
    for line in accept.describe(found, do.protocol):
        do.view.note(line)
    if bound:
        do.view.note(f"reading the weights alone takes {bound['bound_us_per_token']:,.0f} us a token at the {bound['bandwidth_bytes_per_s'] / 1e9:,.1f} GB/s measured here")
    goal = run.request.goal
    if goal is not None and goal.kind == "factor" and goal.value - 1 < found.mde:
        do.view.note(f"warning: the goal of {goal} is below what can be resolved here (+{found.mde:.1%})")


def _still_holds(run: Run) -> bool:
    lines = run.ledger.lines()
    done = [line for line in lines if line["kind"] == "calibrated"]
    if not done or done[-1]["env_hash"] != run.ledger.context.env_hash:
        return False
    then, now = done[-1]["data"].get("token_us"), state.token_us(lines)
    return not then or not now or now > MUCH_FASTER * then


def _aa(run: Run, do: Services, which: Stage, key: str, wanted: int) -> list[Pair]:
    commit = run.repo.incumbent()
    spec = run.spec(commit, incumbent_name(commit), "incumbent")
    try:
        with failures(run, which):
            while _more(kept(pairs_of(run, which, key)), wanted, which):
                if len(pairs_of(run, which, key)) >= 3 * wanted:
                    raise RunError(f"{which}: too many pairs had to be discarded; this machine is not quiet enough")
                take_pair(run, do, spec, spec, which, key, None)
    except Stop as stop:
        raise RunError(f"the engine fails against itself: {stop.reason}: {stop.detail}") from stop
    return pairs_of(run, which, key)


def _more(have: Sequence[Pair], wanted: int, which: Stage) -> bool:
    if len(have) < wanted:
        return True
    if which is not Stage.CALIBRATE or len(have) >= CALIBRATE_MOST * wanted:
        return False
    spent = sum(pair.seconds for pair in have)
    return spent + spent / len(have) <= CALIBRATE_S


def canary_due(lines: Sequence[Line]) -> bool:
    """After every so many candidates one more A/A trial, which the judge must not call a win."""
    judged = sum(1 for a in state.attempts(lines) if a.end is not None)
    done = sum(1 for line in lines if line["kind"] == "decided" and line["data"]["stage"] == Stage.CANARY)
    return accept.canary_due(judged, done)


def run_canary(run: Run, do: Services) -> str | None:
    """A hidden A/A trial. Returns the reason to void the session when it looks like a win."""
    after = len(state.attempts(run.ledger.lines()))
    pairs = _aa(run, do, Stage.CANARY, f"canary/{after}", do.protocol.screen_pairs)
    result = accept.canary(pairs, calibration_of(run))
    run.ledger.append("decided", None, {**plain(result), "after": after})
    if result.passed:
        return None
    return f"void: {result.why}"
