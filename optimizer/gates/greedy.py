"""G08, G09, G11: free-running greedy streams on fresh secret prompts, at the TP that is optimised.

When tokens are wrong it looks closer, in the same launch or one more, so that the verdict names the cause: only in a
batch, or only with several ranks. Not for: long contexts and odd shapes (`shapes.py`).
"""

from __future__ import annotations

from optimizer.gates import streams
from optimizer.gates.context import Lab, ask, failed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason, Stream

LENGTHS = (15, 16, 17, 24, 31, 33, 48, 64)
KINDS = ("random", "document", "marked", "languages", "random", "code", "random", "rare_scripts")
NEW_TOKENS = 12
CLEARLY = 50  # times the tolerance band


def check(lab: Lab) -> GateResult:
    setup = lab.setup()
    server = lab.server(setup)
    prompts = lab.draw("greedy", len(LENGTHS), LENGTHS, kinds=KINDS)
    got = ask(server, [Request(p, NEW_TOKENS) for p in prompts])
    oracle = lab.oracle(setup)
    result = streams.check(
        got,
        oracle,
        [NEW_TOKENS] * len(got),
        tokenizer=streams.tokenizer_of(lab.ctx.candidate.model_dir),
        gate="greedy",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    lab.notes["greedy"] = got
    if result.passed or result.reason is not RejectReason.WRONG_TOKENS:
        return result
    if result.facts["max_gap"] < CLEARLY * lab.ctx.oracle.bands.tolerance:
        return result  # numeric: what differs by chance from run to run tells nothing about the cause
    return _closer(lab, got, result)


def _closer(lab: Lab, got: list[Stream], result: GateResult) -> GateResult:
    """Right alone means that batches are wrong; right on one rank means that the exchange between ranks is."""
    setup = lab.setup()
    oracle = lab.oracle(setup)
    bad = next(s for s, score in zip(got, oracle.score(got), strict=True) if not score.ok)
    request = Request(bad.prompt_ids, NEW_TOKENS)
    alone = ask(lab.server(setup), [request])
    if oracle.score(alone)[0].ok:
        return failed(
            "greedy",
            "G12",
            RejectReason.SHAPES,
            f"right alone, wrong in a batch of {len(got)}: {result.detail}",
            **result.facts,
        )
    if lab.tp > 1:
        one = lab.setup(tp=1)
        if oracle.score(ask(lab.server(one), [request]))[0].ok:
            return failed(
                "greedy",
                "G12",
                RejectReason.SHAPES,
                f"right at TP 1, wrong at TP {lab.tp}: {result.detail}",
                **result.facts,
            )
    return result
