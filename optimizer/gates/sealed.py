"""G03: the gates themselves are untouched, and so are the weights that candidates read.

Not for: what SEAL covers (`seal.py`).
"""

from __future__ import annotations

from optimizer import seal
from optimizer.gates.context import Lab, failed, passed
from optimizer.truth import weights
from optimizer.types import GateResult, RejectReason

_WEIGHTS: dict[str, object] = {}


def check(lab: Lab) -> GateResult:
    try:
        seal.verify()
    except seal.SealBroken as error:
        return failed("seal", "G03", RejectReason.SEAL, str(error))
    model_dir = lab.ctx.candidate.model_dir
    now = weights.fingerprint(model_dir)
    if _WEIGHTS.setdefault(str(model_dir), now) != now:
        return failed("seal", "G03", RejectReason.SEAL, f"weight files of {model_dir} changed during the run")
    return passed("seal", "G03", digest=seal.digest(), version=seal.version())
