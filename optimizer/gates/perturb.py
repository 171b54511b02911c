"""G15: with the projections of one layer redrawn, the output changes as the oracle's does, at the TP optimised.

An engine that skips a layer, keeps a copy of the known weights or answers from elsewhere does not follow.
Not for: all weights new (`shapes.swap`).
"""

from __future__ import annotations

from optimizer.gates import shapes, startup, streams
from optimizer.gates.context import Lab, Setup, ask, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

LENGTHS = (13, 16, 29, 34)
NEW_TOKENS = 8


def perturbed(lab: Lab) -> Setup:
    """One layer redrawn, at the TP that is optimised. On GPUs the launch with all weights redrawn serves for it."""
    return shapes.secret(lab) if lab.on_gpu else lab.setup(weights="perturbed")


def check(lab: Lab) -> GateResult:
    setup = perturbed(lab)
    server = lab.server(setup)
    lab.notes["first_answer_s"] = startup.first_answer(lab, setup)
    prompts = lab.draw("perturb", len(LENGTHS), LENGTHS, kinds=("random",))
    got = ask(server, [Request(p, NEW_TOKENS) for p in prompts])
    result = streams.judge(
        lab.oracle(setup).score(got),
        "perturb",
        "G15",
        reason=RejectReason.WEIGHTS,
        what="one layer changed",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    if not result.passed:
        return result
    moved = sum(not score.ok for score in lab.ctx.oracle.score(got))
    return passed("perturb", "G15", **(result.facts | {"streams_moved": moved}))
