"""Something is compiled, traced or loaded inside a steady step.

Signature: compiler, autotuner or module-loading calls within the averaged steps. Saving: their time, per step
only where they occur in every averaged step; a single occurrence is one-time and gets no bound.
"""

from __future__ import annotations

import re

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.whatif import Edit

RULE = "recompilation"
SKILLS = ("compile-regions", "static-decode-metadata")
FORMULA = "time of compiling and loading calls in the step"
_COMPILES = re.compile(
    r"compile_fx|CompileFxGraph|compile_file|dynamo.*compile|_compile\b|convert_frame|Inductor.*compile|"
    r"triton.*compil|autotun|nvrtc|backend_compile|aot_.*compil",
    re.I,
)

_LOADS = re.compile(r"^(cu|hip|cuda)(ModuleLoad|LibraryLoad)")


def look(context: Context) -> Draft | NotFound:
    uses = context.named(_compiles)
    if not uses:
        return NotFound("nothing is compiled or loaded in the averaged steps")
    steps = len(context.trees)
    seen = sum(any(u.per_step[k] for u in uses) for k in range(steps))
    at = context.rows_named(_compiles)
    whole = sum(u.total_ns for u in uses) / 1000
    return Draft(
        title=f"Compiling or loading code in {seen} of {steps} steps",
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(host_cuts=context.subtree_cuts(at)) if at else None,
        direct_ns=None if at else whole * 1000,
        evidence=tuple({"what": u.name, "count": u.mean, "us": round(u.total_ns / 1000, 3)} for u in uses[:8]),
        skills=SKILLS,
        seen_in=(seen, steps),
    )


def _compiles(name: str) -> bool:
    return bool(_COMPILES.search(name) or _LOADS.match(name))
