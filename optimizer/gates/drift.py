"""Numeric drift of all accepted patches together, against the original oracle: the run's budget.

Every gate compares with the oracle of the original model, never with the incumbent, so drift cannot creep. This one
adds log-probabilities on secret weights, in a batch and at a long context, and states what the candidate has used of the reorder band.
Not for: wrong tokens.
"""

from __future__ import annotations

from dataclasses import replace

from optimizer.gates import logprobs, shapes
from optimizer.gates.context import Lab
from optimizer.types import GateResult

LENGTHS = (21, 40, 64, 9, 30, 17, 33, 12, 25, 48, 6, 14)  # one batch: what only a larger one rounds shows
LONGEST = 900  # tokens of one more prompt: what only a long context rounds shows


def check(lab: Lab) -> GateResult:
    long = min(LONGEST, shapes.max_len(lab) - logprobs.NEW_TOKENS)
    result = logprobs.compare(lab, shapes.secret(lab), "drift", (*LENGTHS, long))
    facts = dict(result.facts)
    if "max_error" in facts:
        facts["budget_used"] = facts["max_error"] / lab.ctx.oracle.bands.reorder
    return replace(result, gate="drift", facts=facts)
