"""Many small copies between host and device in one step, where one would do.

Signature: more than one host-to-device or device-to-host copy a step. Saving per step <= wall minus wall of the
step replayed with one copy per direction (the dearest stays; the rest joins it as a few more bytes). Metadata
that a device kernel could compute (positions, slot mapping, sequence lengths) needs no copy at all.
"""

from __future__ import annotations

from collections import defaultdict

from trace_diff import classify
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.findings.host_reads import feeds_device
from trace_diff.nesting import nesting
from trace_diff.types import Kind
from trace_diff.whatif import Edit

RULE = "host-device-copies"
SKILLS = ("batch-host-copies", "static-decode-metadata")
FORMULA = "wall - wall of the step replayed with one copy per direction"


def look(context: Context) -> Draft | NotFound:
    if not context.on_gpu:
        return NotFound("no device in the step")
    e = context.trace.events
    by_way: dict[str, list[int]] = defaultdict(list)
    for r in context.model.rows:
        if e.kind[r] == Kind.MEMCPY:
            way = classify.copy_kind(context.trace.name(r))
            if way in ("h2d", "d2h"):
                by_way[way].append(r)
    spare: list[int] = []
    for rows in by_way.values():
        spare += sorted(rows, key=lambda r: int(e.dur_ns[r]))[:-1]
    if not spare:
        return NotFound("at most one copy per direction in the step")
    reads = {w.row for w in context.model.waits if not feeds_device(context, w)}
    waits = frozenset(w.row for w in context.model.waits if w.item >= 0 and context.model.rows[w.item] in spare)
    waits -= reads
    calls = _calls(context, spare)
    host = _whole_operators(context, [c for c in calls if c not in reads])
    return Draft(
        title=f"{sum(map(len, by_way.values()))} copies between host and device a step",
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(host_cuts=context.subtree_cuts(host), device=dict.fromkeys(spare, 0.0), waits=waits),
        evidence=tuple(
            {
                "what": "host to device" if way == "h2d" else "device to host",
                "count": len(rows),
                "us": round(sum(float(e.dur_ns[r]) for r in rows) / 1000, 3),
                "bytes": _bytes(context, rows),
            }
            for way, rows in sorted(by_way.items())
        ),
        skills=SKILLS,
        notes=("copies that also block the host are counted under host-reads",) if reads & set(calls) else (),
    )


def _calls(context: Context, device_rows: list[int]) -> list[int]:
    e = context.trace.events
    ids = {int(e.correlation[r]) for r in device_rows}
    rows = context.tree.rows
    return [int(r) for r in rows if int(e.correlation[r]) in ids and e.kind[r] in (Kind.RUNTIME, Kind.DRIVER)]


def _whole_operators(context: Context, calls: list[int]) -> list[int]:
    """Positions of the outermost copying operators around these calls, else of the calls themselves."""
    position = {int(r): i for i, r in enumerate(context.tree.rows)}
    parent = nesting(context.trace).parent
    kinds = context.trace.events.kind
    out: list[int] = []
    for call in calls:
        best, at = call, int(parent[call])
        while at >= 0:
            if kinds[at] == Kind.CPU_OP and classify.op_class(context.trace.name(at)) == "copy":
                best = at
            at = int(parent[at])
        out.append(position.get(best, position[call]))
    return out


def _bytes(context: Context, rows: list[int]) -> int | None:
    sizes = [context.trace.args(r).get("bytes") for r in rows]
    return sum(s for s in sizes if isinstance(s, int)) if any(isinstance(s, int) for s in sizes) else None
