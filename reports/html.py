"""Self-contained HTML pages: one per run, one per comparison. No network, no script, same input, same bytes.

All text goes through the template engine's escaping and is clipped, so names from traces and patches can be
hostile. Not for: the numbers (`run_page`, `diff_page`), figures (`figures`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from reports import (
    diff_page,
    figures,
    finding_words,
    markdown,
    run_data,
    run_page,
    run_traces,
    tables,
    timeline,
)
from reports.text import clip, micro

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.compare import Diff
    from trace_diff.types import Finding

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_DIFF_LINES, _DIFF_WIDTH = 400, 400


def _diff(edit: dict[str, str]) -> Markup:
    """An edit as removed, added and unchanged lines; long ones are cut, and say so."""
    old, new = edit["old"].splitlines(), edit["new"].splitlines()
    if len(old) + len(new) <= _DIFF_LINES:
        lines = [x for x in difflib.ndiff(old, new) if not x.startswith("?")]
    else:  # ndiff takes quadratic time
        lines = [f"- {x}" for x in old[: _DIFF_LINES // 2]] + [f"+ {x}" for x in new[: _DIFF_LINES // 2]]
    out = []
    for line in lines:
        css = {"-": "del", "+": "add"}.get(line[:1], "same")
        out.append(Markup('<span class="{}">{}</span>').format(css, clip(line, _DIFF_WIDTH)))
    left = max(0, len(old) + len(new) - _DIFF_LINES)
    if left:
        out.append(escape(f"… of {len(old):,} removed and {len(new):,} added lines, {_DIFF_LINES // 2} of each are shown at most"))
    return Markup("\n").join(out)


def environment(*folders: Path) -> jinja2.Environment:
    """Our templates, those of more folders before them, and the filters of both."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "clip": clip,
        "diff": _diff,
        "micro": micro,
        "toks": run_page.tok_s,
        "bound": finding_words.bound,
        "keys": finding_words.evidence_keys,
        "value": finding_words.evidence_value,
    }
    return env


def style() -> str:
    """The style sheet of every page."""
    return (_TEMPLATES / "style.css").read_text("utf-8")


def _page(template: str, **values: Any) -> bytes:
    text = environment().get_template(template).render(css=Markup(style()), **values)
    # A lone surrogate (a name that was not UTF-8) must not stop a report.
    return text.encode("utf-8", "replace")


def _render(template: str, out: Path, **values: Any) -> None:
    page = _page(template, **values)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(page)


def _svg(figure: Any) -> Markup:
    return Markup(figures.svg(figure))


def comparison(
    diff: Diff,
    findings: Iterable[Finding],
    out: Path,
    *,
    analyses: Sequence[Analysis] = (),
    title: str = "",
    intro: Sequence[str] = (),
    extra: Sequence[tables.Table] = (),
    published: tables.Table | None = None,
) -> Path:
    """Write one comparison to `out` (an .html file). With `analyses` it has timelines, kernels, syncs and ranks."""
    page = diff_page.build(diff, analyses)
    page.timeline = timeline.build(analyses, {e.label for e in diff.engines})
    labels = [e.label for e in diff.engines]
    _render(
        "comparison.html.j2",
        out,
        title=title or " against ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else ""),
        subtitle=page.engines[0].facts,
        intro=list(intro),
        extra=list(extra),
        diff=page,
        findings=finding_words.order(findings),
        published=published,
    )
    return out


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything that a run's page shows, drawn once."""

    page: run_page.RunPage
    traces: run_traces.RunTraces
    diff: diff_page.DiffPage | None
    drawn: dict[str, Any]  # name -> matplotlib figure


def run_view(run: run_data.Run, traces: run_traces.RunTraces | None = None) -> RunView:
    """The view of a run; `traces` where they were read before (they change more rarely than the ledger)."""
    page = run_page.build(run)
    traces = run_traces.load(run) if traces is None else traces
    drawn: dict[str, Any] = {}
    if page.waterfall:
        start, steps, final = page.waterfall
        drawn["waterfall"] = figures.waterfall(start, steps, final, page.references)
    if page.predictions:
        drawn["calibration"] = figures.calibration(page.predictions)
    diff = None
    if traces.diff is not None:
        diff = diff_page.build(traces.diff, traces.analyses)
        diff.timeline = timeline.build(traces.analyses, {e.label for e in traces.diff.engines})
        if diff.timeline:
            drawn["timeline"] = figures.timeline(diff.timeline)
    return RunView(page, traces, diff, drawn)


def run_html(view: RunView, **live: Any) -> bytes:
    """The page of a run. `live` is for a page that follows a running loop: see `live.words`."""
    return _page(
        "run.html.j2",
        title=view.page.title,
        page=view.page,
        diff=view.diff,
        findings=finding_words.order(view.traces.findings),
        notes=view.traces.notes,
        waterfall=_svg(view.drawn["waterfall"]) if "waterfall" in view.drawn else None,
        calibration=_svg(view.drawn["calibration"]) if "calibration" in view.drawn else None,
        **live,
    )


def run_report(run_dir: Path, out: Path) -> Path:
    """Write `index.html`, `report.md` and the figures as PNG into folder `out`; returns the HTML file.

    Reads ledger.jsonl, run.json, attempts/*/patch.json and traces only. A run that was stopped early still
    gives a report that says so. Raises run_data.RunError when there is no ledger.
    """
    view = run_view(run_data.read(run_dir))
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in view.drawn.items():
        (out / f"{name}.png").write_bytes(figures.png(figure))
    text = markdown.run(view.page, view.diff, view.traces.findings, view.traces.notes, pictures=tuple(view.drawn))
    (out / "report.md").write_bytes(text.encode("utf-8", "replace"))
    target = out / "index.html"
    target.write_bytes(run_html(view))
    return target
