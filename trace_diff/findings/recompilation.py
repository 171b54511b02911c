"""Something is compiled, traced or loaded while requests are served.

Signature: compiler, autotuner or module-loading calls within the averaged steps. Or, in any step of the trace, the thread
stands still, untraced, in front of the first launch of a kernel that no operator makes (a Triton kernel, say), and not
in front of the others: Triton compiles anew for a number that changed, and leaves nothing else in a trace. Saving: their
time, per step only where they occur in every step; a single occurrence is one-time and gets no bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from trace_diff import hosttree, windows
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.ingest import Trace
from trace_diff.links import links
from trace_diff.types import Kind, Step
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
_DRIVER_LAUNCH = re.compile(r"^(cuLaunchKernel|hipModuleLaunchKernel)")
LEAST_STALL_NS = 50_000_000  # no compiler is faster, few other things in front of a launch are as slow
TIMES_USUAL = 20  # of the step's other such launches


def look(context: Context) -> Draft | NotFound:
    uses = context.named(_compiles)
    if not uses:
        return _standstill(context) or NotFound("nothing is compiled or loaded in the averaged steps")
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


def _standstill(context: Context) -> Draft | None:
    """Over all complete steps of the rank, whatever their phase; None when every launch comes in time."""
    steps = [step for step in windows.steps(context.trace) if step.complete]
    found = [(step, kernel, ns) for step in steps for kernel, ns in _stalls(context.trace, step)]
    if not found:
        return None
    step, kernel, longest = max(found, key=lambda x: x[2])
    seen = len({step.index for step, _, _ in found})
    return Draft(
        title=f"A step stands still for {longest / 1e6:,.0f} ms before its first {kernel}, as compiling it would take"
        + (f"; {seen} of {len(steps)} steps do so" if seen > 1 else f" ({step.name})"),
        formula=FORMULA,
        basis=Basis.HOST,
        direct_ns=sum(ns for _, _, ns in found) / len(steps),
        evidence=tuple(
            {"what": f"before the first {kernel}", "step": step.name, "phase": str(step.phase), "us": round(ns / 1000, 1)}
            for step, kernel, ns in sorted(found, key=lambda x: -x[2])[:8]
        ),
        skills=SKILLS,
        inferred=True,
        seen_in=(seen, len(steps)),
    )


def _stalls(trace: Trace, step: Step) -> Iterator[tuple[str, int]]:
    """(kernel, ns without a traced row in front of its first launch in the step), where that is out of all proportion."""
    e, tree = trace.events, hosttree.build(trace, step)
    gaps = dict(zip(tree.rows[tree.outermost()[1:]].tolist(), tree.gaps_ns(trace).tolist(), strict=True))
    kernels = step.rows[e.kind[step.rows] == Kind.KERNEL]
    launched = dict(zip(links(trace).launch_of(len(e))[kernels].tolist(), e.name[kernels].tolist(), strict=True))
    launches = [row for row in gaps if row in launched and _DRIVER_LAUNCH.match(trace.names[e.name[row]])]
    usual = float(np.median([gaps[row] for row in launches])) if launches else 0.0
    first: set[int] = set()
    for row in launches:
        if launched[row] not in first and gaps[row] >= max(LEAST_STALL_NS, TIMES_USUAL * usual):
            yield trace.names[launched[row]], gaps[row]
        first.add(launched[row])


def _compiles(name: str) -> bool:
    return bool(_COMPILES.search(name) or _LOADS.match(name))
