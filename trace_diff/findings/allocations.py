"""The step allocates tensors anew and asks the runtime for attributes, every time.

Signature: `aten::empty*` and relatives, device allocations and frees, and attribute queries inside the step.
Saving per step <= the wall of the step replayed without these calls (self times as traced). Their share of a
host-bound step is small on every engine measured so far; fixed addresses matter more as a precondition of CUDA
graphs than by themselves. Device allocations (`cudaMalloc`) stop the host for long and should not occur at all.
"""

from __future__ import annotations

import re

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.whatif import Edit

RULE = "allocations"
SKILLS = ("preallocate-decode-buffers", "allocator-and-runtime")
FORMULA = "wall - wall of the step replayed without allocations and runtime queries"
_TENSORS = re.compile(r"^aten::(new_)?(empty|zeros|ones|full)(_like|_strided|_permuted)?$")
_DEVICE = re.compile(r"^(cuda|hip|cu)(Malloc|Free|MemAlloc|MemFree|HostAlloc|MallocAsync|FreeAsync|MallocHost)")
_QUERIES = re.compile(
    r"^(cuda|hip)(DeviceGetAttribute|FuncGetAttributes|FuncSetAttribute|GetDevice|GetDeviceProperties|"
    r"OccupancyMax\w*|PointerGetAttributes|StreamIsCapturing|StreamGetCaptureInfo\w*|EventQuery|PeekAtLastError)"
)
LEAST = 4  # calls a step


def look(context: Context) -> Draft | NotFound:
    kinds = (("tensor allocations", _TENSORS), ("device allocations", _DEVICE), ("runtime queries", _QUERIES))
    evidence = []
    total = 0.0
    for what, pattern in kinds:
        uses = context.named(lambda n, p=pattern: bool(p.match(n)))
        count = sum(u.mean for u in uses)
        if count:
            total += count
            evidence.append(
                {
                    "what": what,
                    "count": round(count, 2),
                    "us": round(sum(u.self_ns for u in uses) / 1000, 3),
                    "names": {u.name: round(u.mean, 2) for u in uses[:8]},
                }
            )
    if total < LEAST:
        return NotFound("almost nothing is allocated in the step", tuple(evidence))
    at = context.rows_named(lambda n: any(p.match(n) for _, p in kinds))
    return Draft(
        title=f"{total:.0f} allocations and runtime queries a step",
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(host_cuts=context.subtree_cuts(at, lead=False)),
        evidence=tuple(evidence),
        skills=SKILLS,
    )
