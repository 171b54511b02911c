"""G12, G13: what users send, all at once: greedy and sampled requests, two temperatures, short prompts and a long one.

Batches for gates that need traffic anyway (`resources.py`); nothing of it goes unjudged. So batches, sampling and long
prompts are looked at under every set of weights and at the TP that is optimised, not only where their own gate runs.
Not for: which shape is at fault (`shapes.py`), or fine tests of one distribution (`sampling.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from optimizer.gates import sampling, shapes, streams
from optimizer.gates.context import Failed, Lab, Setup, ask
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason, Stream

BATCH = 60
NEW_TOKENS = 2
LONGEST = 900  # tokens of the long prompt


@dataclass(slots=True)
class Mixed:
    """Streams that came, by how they were to be drawn."""

    greedy: list[Stream] = field(default_factory=list)
    sampled: dict[float, list[Stream]] = field(default_factory=dict)


def send(lab: Lab, setup: Setup, name: str, into: Mixed, *, long: bool = False) -> None:
    """One batch; every prompt its own. Every second request is greedy, the others have one of two temperatures in turn."""
    server = lab.server(setup)
    kinds = ("random", "marked", "random", "random", "random")
    prompts = lab.draw(f"mixed-{name}", BATCH, [4 + i % 13 for i in range(BATCH)], kinds=kinds)
    wanted = [(0.0, *_temperatures(lab, setup))[(0, 1, 0, 2)[i % 4]] for i in range(BATCH)]
    requests = [Request(p, NEW_TOKENS, temperature=t) for p, t in zip(prompts, wanted, strict=True)]
    if long:
        length = min(LONGEST, shapes.max_len(lab) - NEW_TOKENS)
        requests.append(Request(lab.draw(f"mixed-{name}-long", 1, length)[0], NEW_TOKENS))
    got = ask(server, requests, 120.0)
    if wrong := next((w for s in got if (w := streams.account(s, NEW_TOKENS))), None):
        raise Failed(RejectReason.TOKEN_ACCOUNTING, wrong, "G11")
    for request, stream in zip(requests, got, strict=True):
        t = request.temperature
        (into.sampled.setdefault(t, []) if t else into.greedy).append(stream)


def _temperatures(lab: Lab, setup: Setup) -> tuple[float, float]:
    """Two at which the model of this setup draws from many tokens."""
    key = f"temperatures-{setup.weights}"
    if key not in lab.notes:
        prompts = lab.draw(key, 6, 9, kinds=("random",))
        first = sampling.broad_temperature(lab.oracle(setup).logits(prompts))
        lab.notes[key] = (first, sampling.WARMER * first)
    return lab.notes[key]


def judge(lab: Lab, setup: Setup, got: Mixed, gate: str, what: str = "mixed traffic") -> GateResult:
    """Greedy tokens against the oracle, and each draw's place in its own distribution."""
    oracle = lab.oracle(setup)
    result = streams.judge(
        oracle.score(got.greedy),
        gate,
        "G12",
        reason=RejectReason.SHAPES,
        what=what,
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    if not result.passed:
        return result
    rng = np.random.default_rng(lab.ctx.prompts.integers(f"gate/{lab.ctx.candidate_commit}/{gate}", 1, 2**62)[0])
    for temperature, drawn in got.sampled.items():
        p = sampling.places_p(oracle.mass(drawn, temperature), rng)
        if p < sampling.ALPHA:
            detail = f"{what}: draws at temperature {temperature:.2g} do not follow the model (p = {p:.1g})"
            raise Failed(RejectReason.SAMPLING, detail, "G13")
    return result
