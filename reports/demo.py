"""`trace-diff demo`: the bundled H200 traces side by side, and why autograd, not `.item()`, was the cost.

The claim is made from data alone: what the rules say of the unpatched engine's trace, and the timings of the
same engine with one change at a time (`clean` in baseline_traces/index.json). Not for: new measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports import baselines, tables, terminal
from reports.baselines import BaselineTrace
from reports.text import micro

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.compare import Diff
    from trace_diff.types import Finding

BASE = "h200-metainfer-generated"
SHOWN = (
    BASE,
    "h200-metainfer-inference-mode",
    "h200-metainfer-no-item",
    "h200-metainfer-optimised",
    "h200-metainfer-meta0",
    "h200-hf-eager",
    "h200-vllm-eager",
    "h200-vllm-graph",
)
TOKENS = 12  # of the timed runs, prefill included


@dataclass(frozen=True, slots=True)
class Demo:
    analyses: tuple[Analysis, ...]
    diff: Diff
    findings: tuple[Finding, ...]
    ablation: tables.Table
    sentences: tuple[str, ...]
    published: tables.Table


def build(root: Path = baselines.ROOT) -> Demo:
    """Load, check, analyse and compare the bundled traces. Raises BaselineError or TraceError."""
    from trace_diff import api, ingest

    traces = {t.id: t for t in baselines.load_index(root)}
    analyses: list[Analysis] = []
    for name in SHOWN:
        t = traces[name]
        analysis = api.analyse(ingest.load_many(t.paths, t.label))
        analyses.append(analysis.with_control(t.control_us))
    found = api.find(analyses[0], analyses[1:])
    ablation, sentences = why(traces, analyses, found)
    return Demo(tuple(analyses), api.compare(analyses), tuple(found), ablation, sentences, published_table(root))


def why(
    traces: dict[str, BaselineTrace], analyses: Sequence[Analysis], findings: Sequence[Finding]
) -> tuple[tables.Table, tuple[str, ...]]:
    """The one-change-at-a-time table of clean timings, and what the trace of the unpatched engine predicted."""
    base = traces[BASE].clean
    start = float(base["wall_ms"])
    lines = [_ablation_line("as generated", base, None)]
    for label, data in base["one_change"].items():
        lines.append(_ablation_line(label, data, start))
    note = (
        f"Wall of {TOKENS} tokens without the profiler, interleaved on one H200, median and bootstrap 95 %; published "
        "elsewhere, the gain was credited to removing .item()."
    )
    columns = ("wall", "95 %", "tok/s", "saved per token", "samples")
    table = tables.Table("One change at a time", note, columns, tuple(lines), "generated engine")
    return table, tuple(_sentences(base, start, analyses[0], findings))


def _ablation_line(label: str, data: dict[str, Any], start: float | None) -> tables.Line:
    low, high = data["wall_ms_95"]
    saved = "" if start is None else micro((start - data["wall_ms"]) / TOKENS * 1000)
    cells = (f"{data['wall_ms']:.0f} ms", f"{low:.0f} to {high:.0f}", f"{data['tok_s']:.1f}", saved, str(data["n"]))
    return tables.Line(label, tuple(tables.Cell(c) for c in cells))


def _sentences(base: dict[str, Any], start: float, analysis: Analysis, findings: Sequence[Finding]) -> list[str]:
    out = []
    low = float(base["wall_ms_95"][0])
    for label, key, rule in (
        ("inference_mode", "inference mode only", "autograd"),
        (".item() removal", "no .item() only", "host-read"),
    ):
        measured = (start - float(base["one_change"][key]["wall_ms"])) / TOKENS
        hit = next((f for f in findings if rule in f.id.replace("_", "-") or rule in f.rule.replace("_", "-")), None)
        if hit is None or hit.bound_us is None:
            said = "no finding" if hit is None else f"'{hit.title}' ({hit.status.replace('_', ' ')}), without a bound"
        else:
            said = f"'{hit.title}', at most {micro(hit.bound_us)} per {hit.per}"
        noise = float(base["one_change"][key]["wall_ms_95"][1]) > low
        tail = ", which is within the noise" if noise else ""
        out.append(f"{label}: the trace said {said}; measured {micro(measured * 1000)} per token{tail}.")
    return out


def published_table(root: Path = baselines.ROOT) -> tables.Table:
    """Published MetaInfer rows as a context table."""
    rows = baselines.published(root)
    lines = []
    for r in rows:
        v = r.values
        cells = (
            r.mode, f"TP={v['tp']}", *(("n/a" if v[k] is None else f"{v[k]:g}") for k in ("tok_s", "wall_ms", "self_cpu_ms", "self_cuda_ms")),
            r.hardware, r.source,
        )  # fmt: skip
        lines.append(tables.Line(r.engine, tuple(tables.Cell(c) for c in cells)))
    note = "Published by the MetaInfer project, other hardware, most of them single runs: context, never a threshold."
    columns = ("mode", "TP", "tok/s", "wall ms", "self CPU ms", "self CUDA ms", "hardware", "source")
    return tables.Table("Published figures", note, columns, tuple(lines), "engine")


def print_to(console: Any, demo: Demo) -> None:
    """The demo on a terminal."""
    console.print(terminal.side_by_side(demo.diff, demo.analyses))
    console.print(terminal.findings(demo.findings))
    console.print(terminal.table(demo.ablation))
    for s in demo.sentences:
        console.print(s)
    console.print(terminal.table(demo.published))


def write_html(demo: Demo, out: Path) -> Path:
    """The demo as one page."""
    from reports import html

    return html.comparison(
        demo.diff,
        demo.findings,
        out,
        analyses=demo.analyses,
        title="Qwen3-8B decode on one H200: eight engines",
        intro=["Recorded traces that ship with this tool; batch 1, 12 prompt tokens, bf16, random weights.", *demo.sentences],
        extra=[demo.ablation],
        published=demo.published,
    )
