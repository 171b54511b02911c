"""The device waits for the host: launches come slower than kernels finish.

Signature: many launches in a step and a device that is idle most of it. Saving per step <= wall - device busy
time, less what the causes named by other rules already claim. This is the verdict on the step as a whole:
faster kernels will not help until it is gone; fewer launches (fusion), cheaper ones (compiled regions) or one
launch for the whole step (a CUDA graph over static buffers) will.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound

RULE = "launch-bound-decode"
SKILLS = ("cuda-graph-capture", "static-decode-metadata", "compile-regions", "fused-kernels")
FORMULA = "wall - device busy time - time claimed by named causes"
LEAST_IDLE = 0.2  # of the wall
LEAST_LAUNCHES = 8  # kernels and graphs together


def look(context: Context) -> Draft | NotFound:
    if not context.on_gpu:
        return NotFound("no device work in the step")
    busy, idle = context.breakdown.gpu_busy_ns or 0, context.breakdown.gpu_idle_ns or 0
    launches, graphs = (context.breakdown.counts.get(name, 0.0) for name in ("kernel_launches", "graph_launches"))
    share = idle / context.breakdown.wall_ns if context.breakdown.wall_ns else 0.0
    row = {
        "what": "launches",
        "count": round(launches, 1),
        "graph_launches": round(graphs, 1),
        "busy_us": round(busy / 1000, 1),
        "idle_us": round(idle / 1000, 1),
    }
    if share < LEAST_IDLE or launches + graphs < LEAST_LAUNCHES:
        return NotFound(f"the device is idle {share:.0%} of the step", (row,))
    causes = {k: round(v / 1000, 1) for k, v in context.breakdown.parts.items() if k.startswith("idle")}
    return Draft(
        title=f"Host-bound: the device is idle {share:.0%} of the step, {_count(launches, graphs)} feed {busy / 1e6:.2f} ms of work",
        formula=FORMULA,
        basis=Basis.HOST,
        rest="idle",
        evidence=(row, {"what": "idle by cause, us", **causes}),
        skills=SKILLS,
    )


def _count(launches: float, graphs: float) -> str:
    return f"{launches:.0f} launches" + (f" and {graphs:.0f} graph launches" if graphs else "")
