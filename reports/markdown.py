"""The same views as Markdown, for pull requests and terminals without a browser. Not for: numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reports import diff_page, finding_words, tables
from reports.text import clip, micro

if TYPE_CHECKING:
    from reports.run_clients import ClientRow
    from reports.run_page import RunPage
    from trace_diff.analysis import Analysis
    from trace_diff.compare import Diff
    from trace_diff.types import Finding

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|~"})


def cell(text: object, limit: int = 160) -> str:
    """Text that is safe in a table cell: no markup, no line break."""
    return clip(text, limit).replace("\n", " ").translate(_SPECIAL)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> list[str]:
    marks = ["---" if i < numbers_from else "---:" for i in range(len(head))]
    return [f"| {' | '.join(r)} |" for r in (head, marks, *rows)]


def _table(t: tables.Table) -> list[str]:
    out = [f"### {cell(t.title)}", ""]
    if t.note:
        out += [t.note, ""]
    rows = []
    for line in t.lines:
        if line.role == "group":
            rows.append([f"**{cell(line.name)}**", *[""] * len(t.columns)])
            continue
        cells = [cell(c.text) + (f" ({cell(c.sub, 60)})" if c.sub else "") for c in line.cells]
        rows.append([cell(line.name), *([f"**{c}**" for c in cells] if line.role == "sum" else cells)])
    return [*out, *_rows([cell(t.first) or " ", *[cell(c, 60) for c in t.columns]], rows), ""]


def _findings(found: Iterable[Finding]) -> list[str]:
    ordered = finding_words.order(found)
    hits = [f for f in ordered if f.status == "found"]
    out = ["## Findings", "", "Each saving is an upper bound.", ""]
    rows = [
        [finding_words.bound(f), cell(f.title), cell(f.id), cell(", ".join(f.skills))]
        for f in hits
    ]
    out += _rows(["could save", "finding", "id", "answered by"], rows, numbers_from=9) if hits else ["Nothing found."]
    out.append("")
    out += [
        f"- could not look: {cell(f.rule)} needs {cell(', '.join(f.missing))}"
        for f in ordered
        if f.status == "could_not_look"
    ]
    return [*out, ""]


def _comparison(page: diff_page.DiffPage) -> list[str]:
    out = ["## Side by side", ""]
    rows = [
        [cell(e.label), e.wall, cell(e.relative) or "1", e.busy or "n/a", cell(e.observer), cell(e.facts)]
        for e in page.engines
    ]
    out += [*[cell(line, 500) for line in page.lead], ""] * bool(page.lead)
    out += [*_rows(["engine", f"{page.phase} step", "relative", "GPU", "profiler", "measured"], rows, 9), ""]
    for table in page.tables:
        out += _table(table)
    if page.sentences:
        out += ["### The same work with fewer launches elsewhere", "", *[f"- {cell(s, 300)}" for s in page.sentences], ""]
    if page.layers:
        out += _table(page.layers)
    for table in (*page.kernels, *page.syncs, *page.ranks):
        out += _table(table)
    if page.context:
        out += _table(page.context)
    out += [f"- {cell(e.label)}: {cell(n, 400)}" for e in page.engines for n in e.notes]
    out += [f"- {cell(n, 400)}" for n in page.notes]
    return [*out, ""]


def comparison(diff: Diff, findings: Iterable[Finding], analyses: Sequence[Analysis] = (), title: str = "") -> str:
    """One comparison as a Markdown document."""
    page = diff_page.build(diff, analyses)
    labels = " against ".join(e.label for e in diff.engines)
    return "\n".join([f"# {cell(title or labels)}", "", *_findings(findings), *_comparison(page)])


def _fault(row: ClientRow) -> str:
    return "fault of measurement" + (f": {row.why}" if row.why else "") if row.fault else ""


def run(
    page: RunPage,
    diff: diff_page.DiffPage | None,
    findings: Sequence[Finding],
    notes: Sequence[str],
    pictures: Sequence[str] = (),
) -> str:
    """One run as a Markdown document; `pictures` are names of PNG files beside it."""
    h = page.headline
    out = [f"# {cell(page.title)}", "", cell(page.subtitle, 300), ""]
    out += [f"> {cell(w, 300)}" for w in page.warnings] + [""] * bool(page.warnings)
    rows = [
        ["speed-up", f"**{h.speedup}**" + (f" (95 %: {h.interval})" if h.interval != "n/a" else "")],
        ["before", f"{h.before} tok/s, {h.before_us} per token"],
        ["after", f"{h.after} tok/s, {h.after_us} per token"],
        ["goal", cell(h.goal)],
        ["lower bound", cell(h.bound)],
        *[[f"reference: {cell(r.label, 60)}", f"{micro(r.us)} per token"] for r in page.references],
        *[[cell(k), cell(v, 400)] for k, v in page.timing],
    ]
    out += [*_rows(["", ""], rows, 9), "", f"From {h.basis}.", ""]
    out += [f"![{name}]({name}.png)" for name in pictures if name != "timeline"] + [""]
    out += ["## Every attempt", ""]
    table = [
        [str(r.number), cell(r.mechanism, 60), r.outcome, cell(r.reason, 160), r.predicted, r.measured, r.traced,
         r.speedup, r.interval, cell(r.gates, 120), r.commit] for r in page.rows
    ]  # fmt: skip
    head = ["#", "patch", "outcome", "why", "predicted", "measured", "in trace", "speed-up", "95 %", "gates", "commit"]
    out += [*(_rows(head, table, 99) if table else ["None."]), ""]
    if page.ablations:
        rows = [[cell(v, 200) for v in row] for row in page.ablations]
        out += ["## Leave one out", "", *_rows(["left out", "what it buys", "95 %", "outcome"], rows, 9), ""]
    if page.clients:
        rows = [[cell(r.engine, 60), r.metric, r.ours, r.aiperf, r.difference, cell(_fault(r), 300)] for r in page.clients.rows]
        out += ["## By two clients", "", page.clients.about, "", *_rows(["engine", "", "our client", "AIPerf", "differ", ""], rows, 2), ""]
    if "timeline" in pictures:
        out += ["## One token, N engines", "", "![timeline](timeline.png)", ""]
    if findings:
        out += _findings(findings)
    if diff is not None:
        out += _comparison(diff)
    out += [f"- {cell(n, 300)}" for n in notes]
    out += ["", "## How it was judged", "", *_rows(["", ""], [[cell(k), cell(v, 600)] for k, v in page.judged], 9), ""]
    return "\n".join([*out, "```", page.command.replace("```", "` ` `"), "```", ""])
