"""Communication and copies that run while nothing else does, and work that is already hidden.

Signature: device work on more than one stream. Per group, exposed time is what no other stream covers. Saving
per step <= min(exposed communication and copies, compute that could run meanwhile: all compute of the step that
is not already beside other work). Work that is mostly hidden goes on a *do not chase* list: making it faster
saves nothing. Whether the exposed work may move is not known from a trace: work on the main compute stream, or
with close neighbours on its own stream, is labelled a serial risk (never proof) and not counted where it is high.
"""

from __future__ import annotations

import numpy as np

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.intervals import cover, union
from trace_diff.types import Kind
from trace_diff.whatif import Edit

RULE = "overlap"
SKILLS = ("overlap-scheduling",)
FORMULA = "min(exposed communication and copies, independent compute), replayed"
MOVABLE = frozenset({"communication", "h2d", "d2h", "d2d", "memset"})
HIDDEN_SHARE = 0.65
SERIAL_NS = 5000


def look(context: Context) -> Draft | NotFound:
    seq = context.analysis.sequence
    if seq is None or seq.device != "gpu":
        return NotFound("no device work in the step")
    streams = np.unique(seq.streams)
    if len(streams) < 2:
        return NotFound("one stream: nothing is hidden and nothing is beside anything")
    e = context.trace.events
    rows = seq.rows
    start, end = e.ts_ns[rows], e.ts_ns[rows] + e.dur_ns[rows]
    hidden = np.zeros(len(rows))
    work = context.trace.rows(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)  # of any step: work of two steps may meet
    for s in streams:
        mine = seq.streams == s
        rest = work[e.stream[work] != s]
        other = union(e.ts_ns[rest], e.ts_ns[rest] + e.dur_ns[rest])
        hidden[mine] = cover(other, start[mine], end[mine])
    table, quiet = _groups(context, hidden)
    risk = {str(r["what"]): r["serial_risk"] for r in table}
    movable = np.asarray([c in MOVABLE and risk[c] != "high" for c in seq.classes])
    exposed = e.dur_ns[rows] - hidden
    compute = float(exposed[~movable].sum())
    gain = min(float(exposed[movable].sum()), compute) if movable.any() else 0.0
    if gain < 1000:
        return NotFound("what could move is already hidden; the rest is likely serial", (*table, quiet))
    factor = 1.0 - gain / float(exposed[movable].sum())
    edit = {
        int(r): float(hidden[i] + exposed[i] * factor) for i, r in enumerate(rows.tolist()) if movable[i]
    }
    return Draft(
        title=f"{exposed[movable].sum() / 1000:.0f} us of communication and copies a step run beside nothing",
        formula=FORMULA,
        basis=Basis.DEVICE,
        edit=Edit(device=edit),
        evidence=(*table, quiet),
        skills=SKILLS,
        notes=("a bound: whether the exposed work depends on its neighbours is not known from a trace",),
        inferred=True,
    )


def _groups(context: Context, hidden: np.ndarray) -> tuple[list[dict[str, object]], dict[str, object]]:
    seq = context.analysis.sequence
    assert seq is not None
    e = context.trace.events
    dur = e.dur_ns[seq.rows].astype(float)
    table: list[dict[str, object]] = []
    quiet: list[str] = []
    for cls in dict.fromkeys(seq.classes):
        at = np.asarray([c == cls for c in seq.classes])
        whole, under = float(dur[at].sum()), float(hidden[at].sum())
        table.append(
            {
                "what": cls,
                "count": int(at.sum()),
                "us": round(whole / 1000, 1),
                "exposed_us": round((whole - under) / 1000, 1),
                "hidden_us": round(under / 1000, 1),
                "serial_risk": _serial(context, np.flatnonzero(at), cls),
            }
        )
        if whole and under >= HIDDEN_SHARE * whole:
            quiet.append(cls)
    table.sort(key=lambda r: -float(str(r["exposed_us"])))
    return table, {"what": "do not chase: already hidden", "names": quiet}


def _serial(context: Context, items: np.ndarray, cls: str) -> str:
    """How likely these items depend on their neighbours, in words.

    Communication on the main compute stream feeds the kernel behind it. Else the share of items with a neighbour
    on their own stream within a few microseconds decides.
    """
    seq = context.analysis.sequence
    assert seq is not None
    e = context.trace.events
    values, counts = np.unique(seq.streams, return_counts=True)
    main = values[np.argmax(counts)]
    if cls == "communication" and (seq.streams[items] == main).mean() > 0.5:
        return "high"
    close = 0
    for s in np.unique(seq.streams[items]):
        same = np.flatnonzero(seq.streams == s)
        rows = seq.rows[same]
        gap = e.ts_ns[rows][1:] - (e.ts_ns[rows] + e.dur_ns[rows])[:-1]
        close += int(np.isin(same[:-1], items)[gap < SERIAL_NS].sum())
    share = close / len(items) if len(items) else 0.0
    return "high" if share > 0.7 else "medium" if share > 0.3 else "low"
