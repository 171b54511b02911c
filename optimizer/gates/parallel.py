"""G12: every tensor-parallel size that the target offers, against the oracle.

The size that is optimised is `greedy.py`'s, one rank is `shapes.py`'s; this gate starts the others.
Not for: races between ranks (`races.py`).
"""

from __future__ import annotations

from optimizer.gates import streams
from optimizer.gates.context import Lab, ask, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

LENGTHS = (15, 17, 32, 48)


def check(lab: Lab) -> GateResult:
    sizes = [] if lab.on_gpu else [tp for tp in lab.ctx.target.tp if tp not in (1, lab.tp)]
    result = passed(
        "parallel", "G12", "on GPUs only the TP that is optimised is started" if lab.on_gpu else ""
    )
    for tp in sizes:
        setup = lab.setup(tp=tp)
        got = ask(lab.server(setup), [Request(p, 8) for p in lab.draw(f"tp{tp}", len(LENGTHS), LENGTHS)])
        result = streams.judge(
            lab.oracle(setup).score(got),
            "parallel",
            "G12",
            reason=RejectReason.SHAPES,
            what=f"TP {tp}",
            accept_numeric_drift=lab.ctx.accept_numeric_drift,
        )
        if not result.passed:
            return result
    return result
