"""G21: start-up and the first answer cost no more than the incumbent's, within a stated allowance.

A coarse check for costs that were moved out of the timed window (tuning for minutes); the fine one is the guard of
`measure.py`. Not for: steady speed.
"""

from __future__ import annotations

from optimizer.gates.context import Lab, ask, failed, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

FACTOR = 1.5
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
    allowance = ALLOWANCE_S[lab.ctx.candidate.device]
    facts = {
        "start_s": before,
        "incumbent_start_s": server.start_s,
        "first_s": first,
        "incumbent_first_s": reference_first,
    }
    for what, mine, theirs in (
        ("start-up", before, server.start_s),
        ("the first answer", first, reference_first),
    ):
        if mine is not None and mine > FACTOR * theirs + allowance:
            return failed(
                "startup",
                "G21",
                RejectReason.START_UP,
                f"{what} takes {mine:.1f} s, the incumbent's {theirs:.1f} s",
                **facts,
            )
    return passed("startup", "G21", **facts)


def first_answer(lab: Lab, setup) -> float:
    """Seconds until the last token of the first request that an engine gets."""
    prompt = lab.draw("first", 1, 24, kinds=("random",))[0]
    stream = ask(lab.server(setup), [Request(prompt, 4)], 300.0)[0]
    return (stream.arrivals_ns[-1] - stream.sent_ns) / 1e9
