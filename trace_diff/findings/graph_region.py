"""Stretches of the step that could be one CUDA graph: launches with nothing between that forbids capture.

Signature: more than one launch, and no graph launch. Obstacles are blocking calls, device allocations and
pageable copies; the longest stretch between two of them is named with its launches and device time. Its time
is the idle time that launch-bound-decode claims, so there is no bound of its own.
"""

from __future__ import annotations

import numpy as np

from trace_diff import classify
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.types import Kind

RULE = "graph-capturable-region"
SKILLS = ("cuda-graph-capture", "static-decode-metadata", "preallocate-decode-buffers")
FORMULA = "none of its own: idle time between its kernels, see launch-bound-decode"
LEAST_LAUNCHES = 20


def look(context: Context) -> Draft | NotFound:
    if not context.on_gpu:
        return NotFound("no device work in the step")
    e, trace = context.trace.events, context.trace
    rows = context.tree.rows
    calls = rows[np.isin(e.kind[rows], (Kind.RUNTIME, Kind.DRIVER))].tolist()
    blocking = {w.row for w in context.model.waits}
    stretches: list[tuple[list[int], str]] = [([], "start of the step")]
    for r in calls:
        cls = classify.call_class(trace.name(r))
        if r in blocking or cls in ("sync", "malloc", "free"):
            stretches.append(([], trace.name(r)))
        elif cls == "launch":
            stretches[-1][0].append(r)
    best, after = max(stretches, key=lambda s: len(s[0]))
    total = sum(len(s[0]) for s in stretches)
    row = {"what": "longest stretch without an obstacle", "count": len(best), "launches": total, "after": after}
    if len(best) < LEAST_LAUNCHES:
        return NotFound("no stretch of many launches outside a graph", (row,))
    ids = {int(e.correlation[r]) for r in best}
    device = [d for d in context.model.rows if int(e.correlation[d]) in ids]
    busy = float(e.dur_ns[device].sum())
    span = float((e.ts_ns[device] + e.dur_ns[device]).max() - e.ts_ns[device].min()) if device else 0.0
    obstacles = [name for _, name in stretches[1:]]
    return Draft(
        title=f"{len(best)} of {total} launches in a row could be one graph: {busy / 1e6:.2f} ms of work in {span / 1e6:.2f} ms",
        formula=FORMULA,
        basis=Basis.HOST,
        direct_ns=max(0.0, span - busy),
        evidence=({**row, "busy_us": round(busy / 1000, 1), "span_us": round(span / 1000, 1)}, *tuple({"what": "obstacle", "call": o} for o in obstacles[:8])),
        skills=SKILLS,
        counted_under="launch-bound-decode",
    )
