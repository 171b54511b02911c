"""One token, N engines: the lanes of one step per engine and rank, as coloured spans on a shared time axis.

Host lanes show the innermost thing that ran at each moment, device lanes every kernel, merged where a reader
could not tell them apart. Pure data; drawn by the HTML template and by `figures.timeline`. Not for: accounts
(`trace_diff.attribute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reports import palette
from reports.text import micro
from trace_diff.types import Kind, Step

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.ingest import Trace

_BINS = 2400  # host lanes: no finer than the axis is drawn
_MAX_SPANS = 1400  # per lane
MAX_RANKS = 4
_HOST = (Kind.CPU_OP, Kind.RUNTIME, Kind.DRIVER, Kind.PYTHON)
_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)


@dataclass(frozen=True, slots=True)
class Span:
    start_us: float
    dur_us: float
    colour: str
    text: str  # for the tooltip


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    device: bool
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class EngineView:
    title: str
    wall_us: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    engines: tuple[EngineView, ...]
    end_us: float
    legend: tuple[tuple[str, str], ...]  # (colour, words)

    @property
    def lanes(self) -> int:
        return sum(len(e.lanes) for e in self.engines)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """About eight round positions in microseconds, with their text."""
        raw = self.end_us / 8
        base = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
        step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw)
        return [(i * step, micro(i * step) if i else "0") for i in range(int(self.end_us / step) + 1)]

    def height(self, lane: int) -> int:
        """Of the drawing: a head line for the axis, one per engine, and its lanes."""
        return 24 + 28 * len(self.engines) + lane * self.lanes


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """(first, last + 1) of runs of equal neighbours."""
    edges = np.flatnonzero(np.diff(values)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True))


def innermost(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """For each bin between `edges`, the index of the innermost event over it (-1: none).

    Events must be nested and sorted by (start, -duration): then the innermost is the last that covers the bin.
    """
    first = np.clip(np.searchsorted(edges, start, "right") - 1, 0, len(edges) - 1)
    last = np.clip(np.searchsorted(edges, end, "left"), 0, len(edges) - 1)
    width = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(len(start)), width)
    if not len(owner):
        return np.full(len(edges) - 1, -1)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(width) - width, width)
    bins = np.repeat(first, width) + offset
    canvas = np.full(len(edges) - 1, -1)
    keep = bins < len(canvas)
    np.maximum.at(canvas, bins[keep], owner[keep])
    return canvas


def host_spans(trace: Trace, step: Step, zero_ns: int, end_ns: int, categorise: Callable[[str, int], str]) -> list[Span]:
    """Spans of the step's busiest host thread; `categorise(name, kind)` gives a category name."""
    ev = trace.events
    rows = step.rows[np.isin(ev.kind[step.rows], _HOST)]
    if not len(rows):
        return []
    tracks, times = np.unique(ev.track[rows], return_counts=True)
    rows = rows[ev.track[rows] == tracks[times.argmax()]]
    start, dur = ev.ts_ns[rows], ev.dur_ns[rows]
    order = np.lexsort((-dur, start))
    rows, start, dur = rows[order], start[order], dur[order]
    edges = np.linspace(zero_ns, end_ns, _BINS + 1)
    canvas = innermost(start, start + dur, edges)
    kinds, names = ev.kind[rows], ev.name[rows]
    known: dict[tuple[int, int], int] = {}
    words: list[str] = []
    category = np.full(len(rows), -1)
    for at in np.unique(canvas[canvas >= 0]).tolist():
        key = (int(names[at]), int(kinds[at]))
        if key not in known:
            word = categorise(trace.names[key[0]], key[1])
            if word not in words:
                words.append(word)
            known[key] = words.index(word)
        category[at] = known[key]
    painted = np.where(canvas >= 0, category[canvas], -1)
    spans = []
    for a, b in _runs(painted):
        if painted[a] < 0:
            continue
        x, w = (edges[a] - zero_ns) / 1000, (edges[b] - edges[a]) / 1000
        inside = np.unique(canvas[a:b])
        name = trace.names[int(names[inside[0]])] + (f" and {len(inside) - 1} more" if len(inside) > 1 else "")
        word = words[int(painted[a])]
        spans.append(Span(float(x), float(w), palette.colour(word), f"{word}: {_cut(name)}, {w:.1f} us"))
    return spans


def device_spans(trace: Trace, step: Step, zero_ns: int, end_ns: int, categorise: Callable[[str, int], str]) -> list[Span]:
    """Kernels and copies of the step; neighbours of one class that touch (below a pixel) become one span."""
    ev = trace.events
    rows = step.rows[np.isin(ev.kind[step.rows], _DEVICE)]
    rows = rows[np.argsort(ev.ts_ns[rows], kind="stable")]
    pixel = (end_ns - zero_ns) / _BINS
    known: dict[tuple[int, int], str] = {}
    items: list[tuple[int, int, str, str, int]] = []  # start, end, class, first name, count
    for row in rows.tolist():
        key = (int(ev.name[row]), int(ev.kind[row]))
        word = known.get(key)
        if word is None:
            word = known[key] = categorise(trace.names[key[0]], key[1])
        items.append((int(ev.ts_ns[row]), int(ev.ts_ns[row] + ev.dur_ns[row]), word, trace.names[key[0]], 1))
    merged = _merge(items, pixel / 2)
    if len(merged) > _MAX_SPANS:
        merged = _coarse(merged, (end_ns - zero_ns) / _MAX_SPANS)
    spans = []
    for start, end, word, name, count in merged:
        more = f" and {count - 1} more" if count > 1 else ""
        spans.append(
            Span((start - zero_ns) / 1000, (end - start) / 1000, palette.colour(word),
                 f"{word}: {_cut(name)}{more}, {(end - start) / 1000:.1f} us")
        )  # fmt: skip
    return spans


def _merge(items: Sequence[tuple[int, int, str, str, int]], gap: float) -> list[tuple[int, int, str, str, int]]:
    out: list[tuple[int, int, str, str, int]] = []
    for item in items:
        if out and out[-1][2] == item[2] and item[0] - out[-1][1] <= gap:
            start, end, word, name, count = out[-1]
            out[-1] = (start, max(end, item[1]), word, name, count + item[4])
        else:
            out.append(item)
    return out


def _coarse(items: Sequence[tuple[int, int, str, str, int]], width: float) -> list[tuple[int, int, str, str, int]]:
    """One span per cell of `width` ns that holds several: as long as its work, named after its largest part."""
    out: list[tuple[int, int, str, str, int]] = []
    cell: list[tuple[int, int, str, str, int]] = []

    def close() -> None:
        if cell:
            largest = max(cell, key=lambda i: i[1] - i[0])
            busy = sum(i[1] - i[0] for i in cell)
            out.append((cell[0][0], cell[0][0] + busy, largest[2], largest[3], sum(i[4] for i in cell)))

    for item in items:
        if cell and item[0] // width != cell[0][0] // width:
            close()
            cell = []
        cell.append(item)
    close()
    return out


def _cut(name: str, limit: int = 70) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _categorise(name: str, kind: int) -> str:
    """Category of one event, by the one table of `trace_diff.classify`; runtime calls by what they do."""
    from trace_diff import classify

    if kind in _DEVICE:
        return classify.kernel_class(name)
    if kind == Kind.PYTHON:
        return "python"
    if kind in (Kind.RUNTIME, Kind.DRIVER):
        found = classify.call_class(name)
        return "runtime" if found == classify.UNKNOWN else "runtime copy" if found == "memcpy" else found
    return classify.op_class(name)


def _step_of(analysis: Analysis, rank: int) -> Step | None:
    """The representative step: that of the typical sequence, on other ranks the one at the same position."""
    steps = analysis.steps.get(rank, ())
    if not steps:
        return None
    own = analysis.steps[analysis.slowest]
    wanted = analysis.sequence.step if analysis.sequence is not None else None
    at = next((i for i, s in enumerate(own) if s.index == wanted), len(own) // 2)
    return steps[min(at, len(steps) - 1)]


def _engine(analysis: Analysis, end_us: float) -> EngineView | None:
    by_rank = {t.rank: t for t in analysis.traceset}
    ranks = [r for r in sorted(by_rank) if analysis.steps.get(r)]
    if len(ranks) > MAX_RANKS:
        ranks = sorted({analysis.slowest, *ranks[: MAX_RANKS - 1]})
    lanes: list[Lane] = []
    for rank in ranks:
        step = _step_of(analysis, rank)
        if step is None:
            continue
        zero, end = step.start_ns, step.start_ns + round(end_us * 1000)
        mark = f" rank {rank}" if len(by_rank) > 1 else ""
        trace = by_rank[rank]
        host = host_spans(trace, step, zero, end, _categorise)
        device = device_spans(trace, step, zero, end, _categorise)
        lanes.append(Lane(f"host{mark}", False, tuple(host)))
        if device:
            lanes.append(Lane(f"GPU{mark}", True, tuple(device)))
    if not lanes:
        return None
    shown = f" (ranks {', '.join(map(str, ranks))} of {len(by_rank)})" if len(ranks) < len(by_rank) else ""
    wall = analysis.breakdown.wall_ns / 1000
    step = _step_of(analysis, analysis.slowest)
    wall = step.wall_ns / 1000 if step is not None else wall
    return EngineView(f"{analysis.label}{shown}: {micro(wall)}", wall, tuple(lanes))


def build(analyses: Sequence[Analysis], labels: Iterable[str] | None = None) -> Timeline | None:
    """The view of all analyses (or of those with these labels); None when there is nothing to draw."""
    wanted = set(labels) if labels is not None else {a.label for a in analyses}
    kept = [a for a in analyses if a.label in wanted]
    end = max((s.wall_ns / 1000 for a in kept for r in a.steps if (s := _step_of(a, r))), default=0.0)
    if end <= 0:
        return None
    engines = tuple(e for a in kept if (e := _engine(a, end * 1.02)))
    if not engines:
        return None
    used = {s.colour for e in engines for lane in e.lanes for s in lane.spans}
    legend: dict[str, str] = {}
    for shade, text in palette.TOPICS.values():
        if shade in used:
            legend.setdefault(shade, text)
    return Timeline(engines, end * 1.02, tuple(legend.items()))
