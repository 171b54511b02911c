"""G21: start-up and the first answer cost no more than the incumbent's, within a stated allowance.

A coarse check for costs that were moved out of the timed window (tuning for minutes); the fine one is the guard of
`measure.py`. Not for: steady speed.
"""

from __future__ import annotations

from optimizer.gates.context import Lab, ask, failed, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

FACTOR = 1.5
AGAIN = 2  # more launches of a candidate that seems too slow
ALLOWANCE_S = {"cpu": 2.0, "cuda": 20.0}


def check(lab: Lab) -> GateResult:
    """Best start of all launches at the same TP against one of the incumbent; first answer against its first."""
    if lab.on_gpu:
        return passed("startup", "G21", "left to the guards of the timed pairs: another launch is dear here")
    setup = lab.setup(arm="incumbent", weights="perturbed")
    before = min((s for at, s in lab.starts if at.tp == lab.tp and at.arm == "candidate"), default=None)
    first = lab.notes.get("first_answer_s")
    server = lab.server(setup)
    reference_first = first_answer(lab, setup)
    theirs = server.start_s, reference_first
    mine = before, first
    for _ in range(AGAIN):
        if not _over(lab, mine, theirs):
            break
        lab.close()  # other work on the machine slows a launch: only what stays slow is the engine's
        fresh = lab.setup(weights="perturbed")
        again = lab.server(fresh).start_s, first_answer(lab, fresh)
        mine = tuple(None if a is None else min(a, b) for a, b in zip(mine, again, strict=True))
    facts = {
        "start_s": mine[0],
        "incumbent_start_s": theirs[0],
        "first_s": mine[1],
        "incumbent_first_s": theirs[1],
    }
    if wrong := _over(lab, mine, theirs):
        return failed("startup", "G21", RejectReason.START_UP, wrong, **facts)
    return passed("startup", "G21", **facts)


def _over(lab: Lab, mine: tuple[float | None, ...], theirs: tuple[float, ...]) -> str | None:
    """What takes longer than the incumbent's and its allowance, or None."""
    allowance = ALLOWANCE_S[lab.ctx.candidate.device]
    for what, a, b in zip(("start-up", "the first answer"), mine, theirs, strict=True):
        if a is not None and a > FACTOR * b + allowance:
            return f"{what} takes {a:.1f} s, the incumbent's {b:.1f} s"
    return None


def first_answer(lab: Lab, setup) -> float:
    """Seconds until the last token of the first request that an engine gets."""
    prompt = lab.draw("first", 1, 24, kinds=("random",))[0]
    stream = ask(lab.server(setup), [Request(prompt, 4)], 300.0)[0]
    return (stream.arrivals_ns[-1] - stream.sent_ns) / 1e9
