"""Tables about single traces: the dearest kernels, host waits, ranks. Not for: comparing engines (`diff_page`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reports import palette
from reports.tables import Cell, Line, Table, count, percent
from reports.text import micro

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.types import Breakdown


def kernels(a: Analysis, limit: int = 12) -> Table | None:
    """The dearest names of the typical step."""
    seq = a.sequence
    if seq is None or not len(seq):
        return None
    per: dict[str, list[float]] = {}
    for name, dur in zip(seq.names, seq.dur_ns.tolist(), strict=True):
        entry = per.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += dur / 1000
    classes = dict(zip(seq.names, seq.classes, strict=True))
    whole = sum(us for _, us in per.values()) or 1.0
    top = sorted(per.items(), key=lambda kv: -kv[1][1])[:limit]
    lines = tuple(
        Line(kernel_name(n), (Cell(count(c)), Cell(micro(us), percent(us / whole)), Cell(micro(us / c))), palette.colour(classes[n]))
        for n, (c, us) in top
    )
    what = "kernels" if seq.device == "gpu" else "operators"
    return Table(f"Top {what}: {a.label}", "", ("per step", "time per step", "each"), lines, what[:-1])


def kernel_name(name: str) -> str:
    """A C++ kernel name without return type, namespace noise and arguments; template parameters stay."""
    text = re.sub(r"^void\s+", "", name.strip()).replace("(anonymous namespace)::", "")
    depth, start = 0, 0
    for at, c in enumerate(text):
        if c == "<":
            depth += 1
        elif c == ">" and depth:
            depth -= 1
        elif depth == 0 and c == " " and text[start:at].endswith("::type"):
            start = at + 1  # what came before was std::enable_if<...>::type, the return type
        elif depth == 0 and c == "(":
            text = text[:at]
            break
    text = text[start:].replace("at::native::", "") or name
    return text if len(text) <= 100 else text[:99] + "…"


def syncs(kept: Sequence[Analysis], limit: int = 8) -> Table | None:
    lines: list[Line] = []
    for a in kept:
        found = sorted(a.breakdown.syncs, key=lambda s: (-s.starves_ns, -s.blocked_ns))[:limit]
        if found:
            lines.append(Line(a.label, (), role="group"))
        for s in found:
            cells = (count(s.per_step), micro(s.blocked_ns / 1000), micro(s.starves_ns / 1000), s.site or "no stack recorded")
            lines.append(Line(s.op, tuple(Cell(c) for c in cells)))
    note = "Calls in which the host waits for the device. Only the time that starves the GPU could be saved."
    columns = ("per step", "host blocked", "starves the GPU", "where")
    return Table("Host waits", note, columns, tuple(lines), "call") if lines else None


def ranks(kept: Sequence[Analysis]) -> Table | None:
    lines: list[Line] = []
    for a in kept:
        if len(a.breakdowns) > 1:
            lines.append(Line(a.label + _late(a), (), role="group"))
            lines += [_rank(r, b, a.slowest) for r, b in sorted(a.breakdowns.items())]
    note = "Waiting is time spent in collectives for peers that arrive later; transfer is the rest."
    columns = ("step wall", "GPU busy", "collectives", "waiting", "transfer")
    return Table("Ranks", note, columns, tuple(lines), "rank") if lines else None


def _late(a: Analysis) -> str:
    """Who is late and what it was doing, where the collectives say so."""
    late = a.collectives.late if a.collectives is not None else None
    if late is None:
        return ""
    return f": rank {late.rank} is late, {micro(late.wait_ns / 1000)} per step ({late.cause})"


def _rank(rank: int, b: Breakdown, slowest: int) -> Line:
    def total(values: Iterable[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return sum(known) / 1000 if known else None

    wall, wait = total(c.wall_ns for c in b.collectives), total(c.wait_ns for c in b.collectives)
    move = total(c.transfer_ns for c in b.collectives)
    busy = None if b.gpu_busy_ns is None else b.gpu_busy_ns / 1000
    cells = tuple(Cell("n/a" if v is None else micro(v)) for v in (b.wall_ns / 1000, busy, wall, wait, move))
    return Line(f"{rank}{' (sets the pace)' if rank == slowest else ''}", cells)
