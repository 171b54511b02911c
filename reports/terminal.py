"""The comparison and the findings as rich renderables. Not for: printing (the command lines do), numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reports import diff_page, finding_words, tables
from reports.text import clip, short

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.compare import Diff
    from trace_diff.types import Finding


def side_by_side(diff: Diff, analyses: Sequence[Analysis] = (), *, layers: bool = False) -> RenderableType:
    """Engines, where the wall goes, counts, and context; with `layers` the layer drill-down too."""
    page = diff_page.build(diff, analyses)
    parts: list[RenderableType] = [_engines(page)]
    parts += [Text(f"\n{line}") for line in page.lead]
    parts += [table(t) for t in page.tables]
    if layers and page.layers:
        parts.append(table(page.layers))
    parts += [Text(f"  {s}") for s in page.sentences]
    parts += [table(t) for t in (*page.ranks, *page.syncs)]
    if page.context:
        parts.append(table(page.context))
    parts += [Text(f"{e.label}: {n}", style="dim") for e in page.engines for n in e.notes]
    parts += [Text(n, style="dim") for n in page.notes]
    return Group(*parts)


def _engines(page: diff_page.DiffPage) -> Table:
    table = Table(title=f"Mean {page.phase} step", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for head in ("engine", "wall", "relative", "GPU busy", "without the profiler", "measured"):
        table.add_column(head, justify="right" if head in ("wall", "relative", "GPU busy") else "left", overflow="fold")
    for e in page.engines:
        table.add_row(
            Text(short(e.label, 40), style="bold"), e.wall, Text(short(e.relative, 50)), e.busy, e.observer,
            Text(short(e.facts, 90), style="dim"),
        )  # fmt: skip
    return table


def table(t: tables.Table) -> Table:
    """One table of the view."""
    out = Table(title=f"\n{short(t.title, 100)}", title_justify="left", title_style="bold", box=None, pad_edge=False,
                  caption=t.note or None, caption_justify="left")  # fmt: skip
    out.add_column(t.first, overflow="fold", max_width=60)
    for column in t.columns:
        out.add_column(Text(short(column, 32)), justify="right", overflow="fold", max_width=46)
    for line in t.lines:
        if line.role == "group":
            out.add_row(Text(line.name, style="bold"))
            continue
        style = "bold" if line.role == "sum" else ""
        out.add_row(Text(short(line.name, 90), style=style), *[_cell(c, style) for c in line.cells])
    return out


def _cell(cell: tables.Cell, style: str) -> Text:
    text = Text(clip(cell.text, 200), style=style or ("green" if cell.best else ""))
    if cell.sub:
        text.append(f"  {short(cell.sub, 40):>5}", style="dim")
    return text


def findings(found: Iterable[Finding], *, limit: int | None = None) -> RenderableType:
    """What could be saved, dearest first, with bound, evidence and the skills that answer; then what is not there."""
    ordered = finding_words.order(found)
    hits = [f for f in ordered if f.status == "found"]
    parts: list[RenderableType] = [Text("\nFindings", style="bold")]
    if not hits:
        parts.append(Text("  nothing found that a rule looks for"))
    for f in hits[:limit]:
        parts.append(_finding(f))
    smaller = hits[limit:] if limit is not None else []
    if smaller:
        parts.append(Text(f"  and {len(smaller)} smaller: {', '.join(f.id for f in smaller)}", style="dim"))
    blind = [f for f in ordered if f.status == "could_not_look"]
    parts += [Text(f"  could not look: {f.rule} needs {short(', '.join(f.missing), 120)}", style="dim") for f in blind]
    silent = [f.title for f in ordered if f.status == "not_found"]
    if silent:
        parts.append(Text(f"  not found: {'; '.join(short(s, 60) for s in silent)}", style="dim"))
    return Group(*parts)


def _finding(f: Finding) -> RenderableType:
    head = Text.assemble((f"{finding_words.bound(f):>30}  ", "bold green"), (short(f.title, 110), "bold"), (f"  {f.id}", "dim"))
    lines: list[RenderableType] = [head]
    if f.inferred:
        lines.append(Text(f"{'':32}inferred", style="dim"))
    for row in f.evidence[:3]:
        rest = [(k, v) for k, v in row.items() if k != "what" and v not in (None, "")][:5]
        words = f"{row['what']}: " if row.get("what") else ""
        words += ", ".join(f"{k.replace('_', ' ')} {finding_words.evidence_value(v)}" for k, v in rest)
        lines.append(Padding(Text(short(words, 200), style="dim"), (0, 0, 0, 32)))
    if f.skills:
        lines.append(Padding(Text(f"answered by {', '.join(f.skills)}"), (0, 0, 0, 32)))
    return Group(*lines)


def explain(f: Finding) -> RenderableType:
    """One finding in full."""
    parts: list[RenderableType] = [_finding(f)]
    if f.formula:
        parts.append(Text(f"\nformula: {f.formula}"))
    if f.missing:
        parts.append(Text(f"missing evidence: {', '.join(f.missing)}"))
    parts += [Text(f"note: {n}") for n in f.notes]
    keys = finding_words.evidence_keys(f.evidence)
    if keys:
        table = Table(box=None, pad_edge=False, title="\nEvidence", title_justify="left", title_style="bold")
        for k in keys:
            table.add_column(short(k, 30), overflow="fold")
        for row in f.evidence[:40]:
            table.add_row(*[Text(clip(finding_words.evidence_value(row.get(k)), 160)) for k in keys])
        parts.append(table)
    return Group(*parts)
