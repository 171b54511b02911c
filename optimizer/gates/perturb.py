"""G15: with the projections of one layer redrawn, the output changes as the oracle's does, at the TP optimised.

An engine that skips a layer, keeps a copy of the known weights or answers from elsewhere does not follow.
Not for: all weights new (`shapes.swap`).
"""

from __future__ import annotations

from dataclasses import replace

from optimizer.gates import shapes, startup, streams
from optimizer.gates.context import Lab, Setup, ask, failed, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason, Stream

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
        return result if result.parked else _named(lab, setup, got, result)
    moved = sum(not score.ok for score in lab.ctx.oracle.score(got))
    return passed("perturb", "G15", **(result.facts | {"streams_moved": moved}))


def _named(lab: Lab, setup: Setup, got: list[Stream], result: GateResult) -> GateResult:
    """Which fault it is: tokens that change from run to run, those of the weights as they were, or just wrong ones."""
    again = ask(lab.server(setup), [Request(s.prompt_ids, NEW_TOKENS) for s in got])
    if [s.token_ids for s in again] != [s.token_ids for s in got]:
        detail = f"the same prompts gave other tokens the second time: {result.detail}"
        return failed("perturb", "G20", RejectReason.RACES, detail, **result.facts)
    if any(score.ok for score in lab.ctx.oracle.score(got)):
        detail = f"tokens of the weights before the change: {result.detail}"
        return failed("perturb", "G15", RejectReason.WEIGHTS, detail, **result.facts)
    return replace(result, check="G08", reason=RejectReason.WRONG_TOKENS)
