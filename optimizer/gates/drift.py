"""Numeric drift of all accepted patches together, against the original oracle: the run's budget.

Every gate compares with the oracle of the original model, never with the incumbent, so drift cannot creep. This one
adds log-probabilities on secret weights and states what the candidate has used of the reorder band.
Not for: wrong tokens.
"""

from __future__ import annotations

from dataclasses import replace

from optimizer.gates import logprobs, shapes
from optimizer.gates.context import Lab
from optimizer.types import GateResult


def check(lab: Lab) -> GateResult:
    result = logprobs.compare(lab, shapes.secret(lab), "drift", (21, 40, 64))
    facts = dict(result.facts)
    if "max_error" in facts:
        facts["budget_used"] = facts["max_error"] / lab.ctx.oracle.bands.reorder
    return replace(result, gate="drift", facts=facts)
