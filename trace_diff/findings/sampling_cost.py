"""Choosing the next token costs many small operations, or the host sees all logits.

Signature: the work behind the output head product. Saving per step <= wall minus wall of the step replayed with
the dearest of these operations only (one kernel that reads the logits once), or with the reference's sampling if
it is shorter. A copy of the logits to the host is named.
"""

from __future__ import annotations

import re

from trace_diff import groups
from trace_diff.findings.calls import operators
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.layers import PRODUCT
from trace_diff.types import Kind
from trace_diff.whatif import Edit

RULE = "sampling-cost"
SKILLS = ("device-side-sampling", "fused-kernels")
FORMULA = "wall - wall of the step replayed with only the dearest operation behind the output head"
LEAST_ITEMS = 8
_CHOOSES = frozenset({"sampling"})
_CHOICE = re.compile(r"argmax|multinomial|gumbel|top_?[kp]|ArgMaxOps|sampl", re.I)
LOGITS_BYTES = 4096


def look(context: Context) -> Draft | NotFound:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if seq is None or layers is None or not layers.count:
        return NotFound("no layers found")
    last = layers.anchors[layers.layers[-1][-1]].last
    heads = [a for a in layers.anchors if a.first > last and a.role == PRODUCT]
    if not heads:
        return NotFound("no output head product in the step")
    head = max(heads, key=lambda a: float(seq.dur_ns[a.first : a.last + 1].sum()))
    items = [i for i in range(head.last + 1, len(seq)) if seq.classes[i] not in groups.QUIET]
    if not any(seq.classes[i] in _CHOOSES or _CHOICE.search(seq.names[i]) for i in items):
        return NotFound("nothing behind the last product chooses a token")
    copies = [i for i in items if context.on_gpu and _bytes(context, int(seq.rows[i])) > LOGITS_BYTES]
    row = {
        "what": "behind the output head",
        "count": len(items),
        "us": round(float(sum(seq.dur_ns[i] for i in items)) / 1000, 3),
        "names": [seq.names[i][:80] for i in sorted(items, key=lambda i: -seq.dur_ns[i])[:5]],
    }
    if len(items) < LEAST_ITEMS and not copies:
        return NotFound(f"{len(items)} operations choose the token", (row,))
    dearest = max((i for i in items if i not in copies), key=lambda i: seq.dur_ns[i], default=-1)
    spare = [int(seq.rows[i]) for i in items if i != dearest]
    return Draft(
        title=f"{len(items)} operations behind the output head choose the token"
        + ("; the logits are copied to the host" if copies else ""),
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(
            host_cuts=context.subtree_cuts(operators(context, spare)),
            device=dict.fromkeys(spare, 0.0) if context.on_gpu else {},
        ),
        evidence=(row, *({"what": "logits to the host", "bytes": _bytes(context, int(seq.rows[i]))} for i in copies)),
        skills=SKILLS,
        inferred=True,
    )


def _bytes(context: Context, row: int) -> int:
    if context.trace.events.kind[row] != Kind.MEMCPY or "DtoH" not in context.trace.name(row):
        return 0
    size = context.trace.args(row).get("bytes")
    return size if isinstance(size, int) else 0
