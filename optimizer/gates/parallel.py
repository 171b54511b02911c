"""G12, G11: every tensor-parallel size that the target offers, against the oracle, natural ends of text included.

The size that is optimised is `greedy.py`'s, one rank is `shapes.py`'s; this gate starts the others.
Not for: races between ranks (`races.py`).
"""

from __future__ import annotations

from optimizer.gates import streams
from optimizer.gates.context import Lab, ask, failed, passed
from optimizer.traffic.client import Request
from optimizer.truth import weights
from optimizer.types import GateResult, RejectReason

LENGTHS = (15, 17, 32, 48)
ENDING = (12, 21, 28, 34, 40)  # prompts that may end by themselves: under secret weights many do
MOST = 24


def check(lab: Lab) -> GateResult:
    sizes = [] if lab.on_gpu else [tp for tp in lab.ctx.target.tp if tp not in (1, lab.tp)]
    result = passed(
        "parallel", "G12", "on GPUs only the TP that is optimised is started" if lab.on_gpu else ""
    )
    for tp in sizes:
        result = _one(lab, tp)
        if not result.passed:
            return result
    return result


def _one(lab: Lab, tp: int) -> GateResult:
    setup = lab.setup(tp=tp, weights="secret")
    model_dir = lab.model_dir("secret")
    server = lab.server(setup)
    prompts = lab.draw(f"tp{tp}", len(LENGTHS) + len(ENDING), (*LENGTHS, *ENDING))
    fixed, free = prompts[: len(LENGTHS)], prompts[len(LENGTHS) :]
    got = ask(server, [Request(p, 8) for p in fixed] + [Request(p, MOST, ignore_eos=False) for p in free])
    wants = [streams.Expected(8)] * len(fixed) + [streams.Expected(MOST, weights.eos_ids(model_dir))] * len(free)
    if wrong := next((w for w in map(streams.account, got, wants) if w), None):
        return failed("parallel", "G11", RejectReason.TOKEN_ACCOUNTING, f"TP {tp}: {wrong}")
    return streams.judge(
        lab.oracle(setup).score(got),
        "parallel",
        "G12",
        reason=RejectReason.SHAPES,
        what=f"TP {tp}",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
