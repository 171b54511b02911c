"""The view of a comparison: the tables that terminal, Markdown and HTML all show, as plain values.

Built from `trace_diff`'s Diff and Analyses; formats and sorts, computes nothing that they do not say. Not for: tables
of single traces (`trace_tables`), findings (`finding_words`), drawing (templates, `terminal`), timelines (`timeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reports import palette, trace_tables
from reports.tables import Cell, Line, Table, count, percent
from reports.text import micro

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.compare import CategoryRow, Diff
    from trace_diff.groups import GroupCell

SMALL = 0.004  # rows below this share of every engine's wall are summed into one
KINDS = {
    "wall": ("Where the step's wall time goes", "Parts sum to the wall time of the rank that sets the pace."),
    "gpu": ("GPU work by category", "Summed kernel time per step, with the wait of kernels that were launched early; overlaps with the table above."),
    "cpu": ("Host time by category", "Self time of the step thread per step; overlaps with the first table."),
}
_COUNT_ORDER = ("kernel_launches", "graph_launches", "host_reads", "d2h_copies", "h2d_copies", "allocations", "collectives")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    label: str
    facts: str
    wall: str
    relative: str  # step wall over that of the first engine
    busy: str
    observer: str
    notes: tuple[str, ...]


@dataclass(slots=True)
class DiffPage:
    phase: str
    engines: list[Engine]
    tables: list[Table]
    layers: Table | None
    sentences: list[str]
    context: Table | None
    kernels: list[Table] = field(default_factory=list)
    syncs: list[Table] = field(default_factory=list)
    ranks: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lead: list[str] = field(default_factory=list)  # the answer in sentences
    timeline: Any = None  # reports.timeline.Timeline, where it was asked for


def words(category: str) -> str:
    """`idle.host_late` -> `idle: host late`; `gpu.gemm` -> `gpu: gemm`."""
    head, _, tail = category.partition(".")
    return f"{head}: {tail.replace('_', ' ')}" if tail else head.replace("_", " ")


def build(diff: Diff, analyses: Sequence[Analysis] = ()) -> DiffPage:
    """The whole view. Without `analyses` there are no kernel, sync and rank tables."""
    shown = {e.label for e in diff.engines}
    kept = [a for a in analyses if a.label in shown]
    page = DiffPage(
        phase=str(diff.engines[0].cell.get("phase") or "step"),
        engines=[_engine(diff, i) for i in range(len(diff.engines))],
        tables=[*_category_tables(diff), *_count_table(diff)],
        layers=layer_table(diff) if diff.layers else None,
        sentences=_sentences(diff),
        context=_context(diff),
        notes=[*diff.notes, *_coverage(diff)],
    )
    page.lead = lead(diff)
    page.kernels = [t for a in kept if (t := trace_tables.kernels(a))]
    page.syncs = [t] if (t := trace_tables.syncs(kept)) else []
    page.ranks = [t] if (t := trace_tables.ranks(kept)) else []
    return page


def _engine(diff: Diff, at: int) -> Engine:
    e, base = diff.engines[at], diff.engines[0]
    cell = e.cell
    facts = [
        str(cell.get("device") or ""),
        f"TP={cell['tp']}" if cell.get("tp") else "",
        f"batch {cell['batch']}" if cell.get("batch") else "",
        f"{cell['layers']} layers" if cell.get("layers") else "",
        str(cell.get("dtype") or ""),
        f"mean of {e.steps} step{'s' if e.steps != 1 else ''}, rank {e.rank} of {e.ranks}",
    ]
    relative = "n/a" if not base.wall_us else f"{e.wall_us / base.wall_us:.2f}x"
    notes = (*e.notes, *((f"taken as equal: {', '.join(e.assumed)}",) if e.assumed else ()))
    busy = "" if e.gpu_busy_us is None or not e.wall_us else percent(e.gpu_busy_us / e.wall_us)
    return Engine(
        e.label, ", ".join(f for f in facts if f), micro(e.wall_us), relative, busy, _observer(e.observer), notes
    )


def lead(diff: Diff) -> list[str]:
    """Who is fastest, and which parts of the step make most of the difference to the first engine."""
    here = diff.engines[0]
    if len(diff.engines) < 2:
        return []
    at = min(range(len(diff.engines)), key=lambda i: diff.engines[i].wall_us)
    if at == 0:
        second = min(diff.engines[1:], key=lambda e: e.wall_us)
        return [f"{here.label} is the fastest: {micro(here.wall_us)} per step, then {second.label} with {micro(second.wall_us)}."]
    best = diff.engines[at]
    gaps = sorted(((-(r.difference_us[at] or 0), r.category) for r in diff.rows if r.kind == "wall"), reverse=True)
    parts = ", ".join(f"{words(name)} {micro(us)}" for us, name in gaps[:3] if us > 0.05 * (here.wall_us - best.wall_us))
    out = f"{best.label} needs {micro(best.wall_us)} per step where {here.label} needs {micro(here.wall_us)}, {here.wall_us / best.wall_us:.1f} times as much."
    return [f"{out} Most of the difference: {parts}." if parts else out]


def _observer(observer: dict[str, Any]) -> str:
    control, ratio = observer.get("control_us"), observer.get("ratio")
    if not control or not ratio:
        return "not timed"
    kind = "perturbed" if observer.get("perturbed") else "not perturbed"
    return f"{micro(control)}; traced {ratio:.2f}x, {kind}"


def _category_tables(diff: Diff) -> list[Table]:
    columns = tuple(e.label for e in diff.engines)
    walls = [e.wall_us for e in diff.engines]
    host_only = all(e.gpu_busy_us is None for e in diff.engines)
    tables = []
    for kind, (title, note) in KINDS.items():
        if kind == "cpu" and host_only:
            continue  # the first table is that account already
        rows = [r for r in diff.rows if r.kind == kind]
        if not rows or not any(v for r in rows for v in r.us):
            continue
        big = [r for r in rows if _weight(r, walls) >= SMALL]
        small = [r for r in rows if _weight(r, walls) < SMALL]
        lines = [_category(r, walls) for r in sorted(big, key=lambda r: -_weight(r, walls))]
        if small and any(v for r in small for v in r.us):
            rest = [sum(r.us[i] or 0 for r in small) for i in range(len(columns))]
            lines.append(Line(f"{len(small)} smaller row{'s' if len(small) != 1 else ''}", tuple(_time(v, w) for v, w in zip(rest, walls, strict=True))))
        if kind == "wall":
            lines.append(Line("wall", tuple(Cell(micro(w), "100 %") for w in walls), role="sum"))
        else:
            sums = [sum(r.us[i] or 0 for r in rows) if any(r.us[i] is not None for r in rows) else None
                    for i in range(len(columns))]  # fmt: skip
            lines.append(Line("sum", tuple(_time(v, w) for v, w in zip(sums, walls, strict=True)), role="sum"))
        tables.append(Table(title, note, columns, tuple(lines), "category"))
    return tables


def _weight(row: CategoryRow, walls: Sequence[float]) -> float:
    return max((v or 0) / w if w else 0 for v, w in zip(row.us, walls, strict=True))


def _category(row: CategoryRow, walls: Sequence[float]) -> Line:
    best = _clear_best(row.us)
    cells = tuple(_time(v, w, best=v is not None and v == best) for v, w in zip(row.us, walls, strict=True))
    return Line(words(row.category), cells, palette.colour(row.category))


def _clear_best(values: Iterable[float | None]) -> float | None:
    """The smallest value that is there, if the next one is at least 3 % larger."""
    known = sorted(v for v in values if v)
    return known[0] if len(known) > 1 and known[1] > 1.03 * known[0] else None


def _time(us: float | None, wall: float, best: bool = False) -> Cell:
    if us is None:
        return Cell("n/a")
    share = us / wall if wall else 0.0
    if us < 0.005:
        return Cell("–")
    return Cell(micro(us), percent(share), min(share, 1.0), best and us > 0)


def _count_table(diff: Diff) -> list[Table]:
    names = list(dict.fromkeys(n for e in diff.engines for n in e.counts))
    names.sort(key=lambda n: (_COUNT_ORDER.index(n) if n in _COUNT_ORDER else 99, n))
    lines = [
        Line(n.replace("_", " "), tuple(Cell(count(e.counts.get(n))) for e in diff.engines))
        for n in names
        if any(e.counts.get(n) for e in diff.engines)
    ]
    columns = tuple(e.label for e in diff.engines)
    return [Table("Counts per step", "", columns, tuple(lines), "what")] if lines else []


def layer_table(diff: Diff) -> Table:
    """Aligned groups in execution order, per layer inside layers: kernels, time, and the gap in front of them."""
    lines: list[Line] = []
    where = None
    nouns = ["op" if e.gpu_busy_us is None else "kernel" for e in diff.engines]
    for row in diff.layers:
        if row.where != where:
            where = row.where
            text = f"one layer, mean of {row.layers}" if where == "layer" else where
            lines.append(Line(text, (), role="group"))
        share = row.layers if row.where == "layer" else 1
        best = _clear_best(c.us for c in row.cells if c.count)
        cells = tuple(_group(c, share, best, n) for c, n in zip(row.cells, nouns, strict=True))
        lines.append(Line(row.label, cells, palette.colour(row.classes[0]) if row.classes else ""))
    note = "Products anchor the alignment, so rows compare even where names and fusion differ."
    return Table("Layer by layer", note, tuple(e.label for e in diff.engines), tuple(lines), "work")


def _group(cell: GroupCell, share: int, best: float | None, noun: str) -> Cell:
    if not cell.count:
        return Cell("–")
    number = count(cell.count / share)
    sub = f"{number} {noun}{'' if number == '1' else 's'}"
    if cell.gap_us / share >= 0.05:
        sub += f", gaps {micro(cell.gap_us / share)}"
    return Cell(micro(cell.us / share), sub, best=cell.us == best)


def _sentences(diff: Diff, limit: int = 5) -> list[str]:
    """The groups for which another engine launches fewer kernels and needs less time for them, dearest first."""
    found: list[tuple[float, str]] = []
    for row in diff.layers:
        if row.anchor or not row.cells[0].count:
            continue
        per = "per layer" if row.where == "layer" else row.where
        for at, cell in enumerate(row.cells[1:], 1):
            if cell.count and cell.us < row.cells[0].us and row.cells[0].count > cell.count:
                saved = row.cells[0].us + row.cells[0].gap_us - cell.us - cell.gap_us
                text = row.sentence(0, at)
                if diff.engines[0].gpu_busy_us is None:
                    text = text.replace(" kernel", " operator")
                found.append((saved, f"{text} ({per})"))
    return [s for _, s in sorted(found, key=lambda f: -f[0])[:limit]]


def _coverage(diff: Diff) -> list[str]:
    if not diff.coverage:
        return []
    text = ", ".join(f"{label} {share:.1%}" for label, share in diff.coverage.items())
    return [f"Share of work time in aligned layer rows: {text}."]


def _context(diff: Diff) -> Table | None:
    if not diff.context:
        return None
    names = list(dict.fromkeys(n for c in diff.context for n, v in c.counts.items() if v))
    names.sort(key=lambda n: (_COUNT_ORDER.index(n) if n in _COUNT_ORDER else 99, n))
    names = names[:8]
    lines = tuple(
        Line(c.label, (*(Cell(count(c.counts.get(n))) for n in names), Cell("; ".join(c.reasons)))) for c in diff.context
    )
    columns = (*(n.replace("_", " ") for n in names), "not compared because")
    note = "Another cell was measured: counts per step only, no times, no findings, no difference."
    return Table("Context: structure only", note, columns, lines, "trace")
