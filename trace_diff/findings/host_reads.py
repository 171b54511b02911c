"""The host reads device values in the step (`.item()`, `.tolist()`, copies to the host, stream synchronisation).

Signature: a runtime call that returned only when device work was done, or an operator that reads a scalar.
Saving per step <= wall minus the wall of the step replayed without these waits: a read on a device that has
work queued is worth nothing, one that lets the device run dry is worth the time until it is fed again.
On a CPU there is nothing to wait for: only the calls' own time counts.
"""

from __future__ import annotations

import re
from collections import Counter

from trace_diff import classify
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.syncs import operator
from trace_diff.whatif import Edit, Wait

RULE = "host-reads"
SKILLS = ("remove-host-reads", "device-side-sampling", "batch-host-copies", "overlap-scheduling")
FORMULA = "wall - wall of the step replayed without the blocking calls"
_READS = re.compile(r"^aten::(item|_local_scalar_dense|is_nonzero|equal|nonzero|tolist)$")


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    if not context.on_gpu:
        return _on_cpu(context)
    waits = [w for w in context.model.waits if not feeds_device(context, w)]
    if not waits:
        return NotFound("no call of the step waited for the device")
    rows = [w.row for w in waits]
    sites = Counter((operator(context.trace, r), context.trace.name(r), context.site(r)) for r in rows)
    blocked = {r: float(context.trace.events.dur_ns[r]) for r in rows}
    evidence = []
    for (op, call, site), n in sites.most_common(12):
        mine = [r for r in rows if (operator(context.trace, r), context.trace.name(r), context.site(r)) == (op, call, site)]
        evidence.append(
            {
                "what": op or call,
                "call": call,
                "site": site,
                "count": n,
                "blocked_us": round(sum(blocked[r] for r in mine) / 1000, 3),
            }
        )
    calls = sorted({context.trace.name(r) for r in rows})
    uses = context.named(lambda n: n in calls)
    seen = sum(any(u.per_step[k] for u in uses) for k in range(len(context.trees)))
    return Draft(
        title=f"The host waits for the device {len(rows)} times a step",
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(waits=frozenset(rows)),
        evidence=tuple(evidence),
        skills=SKILLS,
        seen_in=(seen, len(context.trees)),
        notes=() if any(s for _, _, s in sites) else ("call sites need a trace with Python stacks",),
    )


def _on_cpu(context: Context) -> Draft | NotFound:
    uses = context.named(lambda n: bool(_READS.match(n)))
    at = context.rows_named(lambda n: bool(_READS.match(n)))
    if not at:
        return NotFound("no scalar is read in the step")
    outer = [u for u in uses if u.name != "aten::_local_scalar_dense"] or uses
    n = sum(u.mean for u in outer)
    return Draft(
        title=f"{n:.0f} tensor values are read into Python a step; on a CPU they cost their own time only",
        formula="self time of the reading operators",
        basis=Basis.HOST,
        edit=Edit(host_cuts=context.subtree_cuts(at)),
        evidence=tuple({"what": u.name, "count": u.mean, "us": round(u.self_ns / 1000, 3)} for u in uses),
        skills=SKILLS,
        seen_in=(max(u.steps_with for u in uses), len(context.trees)),
    )


def feeds_device(context: Context, wait: Wait) -> bool:
    """True when the call only waited for a copy to the device: that reads nothing."""
    return wait.item >= 0 and classify.copy_kind(context.trace.name(context.model.rows[wait.item])) == "h2d"

