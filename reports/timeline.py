"""One token, N engines: the lanes of one step per engine and rank, as coloured spans on a shared time axis.

Host lanes show the innermost thing that ran at each moment, device lanes every kernel and why nothing ran where
nothing did, both merged where a reader could not tell spans apart. Pure data; drawn by the HTML template and by
`figures.timeline`. Not for: accounts (`trace_diff.attribute`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reports import palette
from reports.text import micro, tick
from trace_diff.types import Kind, Step

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.ingest import Trace

_IDLE_BINS = 200
_BINS = 2400  # host lanes: no finer than the axis is drawn
_ALL_SPANS = 11_000  # of a view, over all lanes: keeps a page well under 3 MB
MAX_RANKS = 4
_HOST = (Kind.CPU_OP, Kind.RUNTIME, Kind.DRIVER, Kind.PYTHON)
_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
WAIT = "comm.wait"


@dataclass(frozen=True, slots=True)
class Span:
    start_us: float
    dur_us: float
    category: str
    text: str = ""  # for the tooltip

    @property
    def colour(self) -> str:
        return palette.colour(self.category)


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    device: bool
    spans: tuple[Span, ...]
    idle: tuple[Span, ...] = ()  # why a device lane is empty where it is
    replays: tuple[Span, ...] = ()  # extents of graph replays


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
    def has_device(self) -> bool:
        return any(lane.device for e in self.engines for lane in e.lanes)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """About eight round positions in microseconds, with their text."""
        raw = self.end_us / 8
        base = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
        step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw)
        return [(i * step, tick(i * step) if i else "0") for i in range(int(self.end_us / step) + 1)]

    def height(self, lane: int) -> int:
        """Of the drawing: a head line for the axis, one per engine, and its lanes."""
        return 24 + 28 * len(self.engines) + lane * self.lanes


@dataclass(frozen=True, slots=True)
class _View:
    """One rank's window on its own clock."""

    trace: Trace
    analysis: Analysis
    step: Step
    zero_ns: int
    end_ns: int  # of the step, not of the axis
    pixel_ns: float
    limit: int  # spans per lane

    def span(self, start: float, end: float, category: str, text: str = "") -> Span:
        a, b = max(start, self.zero_ns), min(end, self.end_ns)
        return Span((a - self.zero_ns) / 1000, max(b - a, 0) / 1000, category, text)


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """(first, last + 1) of runs of equal neighbours."""
    edges = np.flatnonzero(np.diff(values)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True))


def innermost(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """For each bin between `edges`, the index of the innermost event over its middle (-1: none).

    Events must be nested and sorted by (start, -duration): then the innermost is the last that covers the bin.
    """
    middle = (edges[:-1] + edges[1:]) / 2
    first = np.searchsorted(middle, start, "left")
    last = np.searchsorted(middle, end, "left")
    width = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(len(start)), width)
    canvas = np.full(len(middle), -1)
    if len(owner):
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(width) - width, width)
        np.maximum.at(canvas, np.repeat(first, width) + offset, owner)
    return canvas


def _host_rows(view: _View) -> np.ndarray:
    """Host rows of the step's thread in the window, sorted for nesting."""
    from trace_diff.windows import marks

    e = view.trace.events
    track = marks(view.trace)[view.step.index].track
    rows = np.flatnonzero((e.track == track) & np.isin(e.kind, _HOST))
    rows = rows[(e.ts_ns[rows] < view.end_ns) & (e.ts_ns[rows] + e.dur_ns[rows] > view.zero_ns)]
    return rows[np.lexsort((-e.dur_ns[rows], e.ts_ns[rows]))]


def host_spans(view: _View) -> list[Span]:
    """What the step's thread was in, innermost first, by category."""
    e, trace = view.trace.events, view.trace
    rows = _host_rows(view)
    if not len(rows):
        return []
    bins = min(_BINS, 2 * view.limit)
    edges = np.linspace(view.zero_ns, view.end_ns, bins + 1)
    canvas = innermost(e.ts_ns[rows], e.ts_ns[rows] + e.dur_ns[rows], edges)
    words: list[str] = []
    known: dict[tuple[int, int], int] = {}
    painted = np.full(bins, -1)
    for at in np.unique(canvas[canvas >= 0]).tolist():
        key = (int(e.name[rows[at]]), int(e.kind[rows[at]]))
        if key not in known:
            word = categorise(trace.names[key[0]], key[1])
            if word not in words:
                words.append(word)
            known[key] = words.index(word)
        painted[canvas == at] = known[key]
    _paint_collectives(view, rows, edges, painted, words)
    spans = []
    for a, b in _runs(painted):
        if painted[a] < 0:
            continue
        owners = [o for o in dict.fromkeys(canvas[a:b].tolist()) if o >= 0]
        word = words[int(painted[a])]
        name = trace.names[int(e.name[rows[owners[0]]])] if owners else "in another thread"
        name += f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        spans.append(view.span(edges[a], edges[b], word, f"{_words(word)}: {_cut(name)}, {micro((edges[b] - edges[a]) / 1000)}"))
    return spans


def _paint_collectives(view: _View, rows: np.ndarray, edges: np.ndarray, painted: np.ndarray, words: list[str]) -> None:
    """Waiting in its own shade; and collectives that a helper thread ran (gloo) while the step's thread had no row."""
    from trace_diff.comm_rows import calls

    e = view.trace.events
    if len(view.trace.rows(*_DEVICE)):
        return  # on a GPU trace the device lane shows them
    helpers = np.array([c.row for c in calls(view.trace) if c.row not in set(rows.tolist())], np.int64)
    for word in ("communication", WAIT):
        if word not in words:
            words.append(word)
    comm, wait = words.index("communication"), words.index(WAIT)
    for row in helpers.tolist():
        a, b = np.searchsorted(edges, (e.ts_ns[row], e.ts_ns[row] + e.dur_ns[row])).tolist()
        painted[a:b] = np.where(painted[a:b] < 0, comm, painted[a:b])
    for start, arrival in _waits(view, np.concatenate((rows, helpers))):
        a, b = np.searchsorted(edges, (start, arrival)).tolist()
        painted[a:b] = np.where(painted[a:b] == comm, wait, painted[a:b])


def _waits(view: _View, rows: np.ndarray) -> list[tuple[int, int]]:
    """(start, arrival of the last peer) of these rows that are collectives which waited."""
    found = view.analysis.collectives
    if found is None:
        return []
    arrivals = found.arrivals.get(view.trace.rank, {})
    e = view.trace.events
    out = []
    for row in rows[np.isin(rows, np.fromiter(arrivals, np.int64, len(arrivals)))].tolist():
        start = int(e.ts_ns[row])
        end = min(arrivals[row], start + int(e.dur_ns[row]))
        if end > start:
            out.append((start, end))
    return out


Item = tuple[int, int, str, str, int]  # start, end, category, name, how many


def device_spans(view: _View) -> list[Span]:
    """Kernels and copies in the window; neighbours of one class that a pixel cannot part become one span."""
    e, trace = view.trace.events, view.trace
    rows = trace.rows(*_DEVICE)
    rows = rows[(e.ts_ns[rows] < view.end_ns) & (e.ts_ns[rows] + e.dur_ns[rows] > view.zero_ns)]
    waits = dict(_waits(view, rows))
    known: dict[tuple[int, int], str] = {}
    items: list[Item] = []
    for row in rows.tolist():
        key = (int(e.name[row]), int(e.kind[row]))
        word = known.get(key) or known.setdefault(key, categorise(trace.names[key[0]], key[1]))
        start, end, name = int(e.ts_ns[row]), int(e.ts_ns[row] + e.dur_ns[row]), trace.names[key[0]]
        if start in waits and word == "communication":
            items.append((start, waits[start], WAIT, name, 1))
            start = waits[start]
        items.append((start, end, word, name, 1))
    merged = _merge(items, view.pixel_ns / 2)
    if len(merged) > view.limit:
        merged = _coarse(merged, (view.end_ns - view.zero_ns) / view.limit)
    return [
        view.span(a, b, word, f"{_words(word)}: {_cut(name)}{f' and {n - 1} more' if n > 1 else ''}, {micro((b - a) / 1000)}")
        for a, b, word, name, n in merged
    ]


def _merge(items: Sequence[Item], gap: float) -> list[Item]:
    out: list[Item] = []
    for item in items:
        if out and out[-1][2] == item[2] and item[0] - out[-1][1] <= gap:
            start, end, word, name, count = out[-1]
            out[-1] = (start, max(end, item[1]), word, name, count + item[4])
        else:
            out.append(item)
    return out


def _coarse(items: Sequence[Item], width: float) -> list[Item]:
    """One span per cell of `width` ns that holds several: as long as its work, named after its largest part."""
    cells: dict[int, list[Item]] = {}
    for item in items:
        cells.setdefault(int(item[0] // width), []).append(item)
    out: list[Item] = []
    for cell in cells.values():
        largest = max(cell, key=lambda i: i[1] - i[0])
        busy = sum(i[1] - i[0] for i in cell)
        out.append((cell[0][0], cell[0][0] + busy, largest[2], largest[3], sum(i[4] for i in cell)))
    return out


def idle_spans(view: _View) -> list[Span]:
    """Why the device was idle, in steps of 1/200 of the step: the largest cause of each by the step's account."""
    from trace_diff import device, host

    side = host.side(view.trace)
    edges = np.linspace(view.step.start_ns, view.step.end_ns, _IDLE_BINS + 1).astype(np.int64).tolist()
    items: list[Item] = []
    for a, b in itertools.pairwise(edges):
        parts = device.account(view.trace, a, b, side).parts
        causes = {k: v for k, v in parts.items() if k.startswith("idle.")}
        if causes:
            items.append((a, b, max(causes, key=lambda k: causes[k]), "", 1))
    return [view.span(a, b, cause) for a, b, cause, _, _ in _merge(items, 0)]


def replay_spans(view: _View) -> list[Span]:
    """Extents of graph replays in the window."""
    from trace_diff.links import links

    tied, e = links(view.trace), view.trace.events
    rows, call = tied.device_rows[tied.in_graph], tied.launch[tied.in_graph]
    out = []
    for c in np.unique(call).tolist():
        own = rows[call == c]
        a, b = int(e.ts_ns[own].min()), int((e.ts_ns[own] + e.dur_ns[own]).max())
        if b > view.zero_ns and a < view.end_ns:
            out.append(view.span(a, b, "graph_launch", f"graph replay, {len(own)} kernels, {micro((b - a) / 1000)}"))
    return out


def categorise(name: str, kind: int) -> str:
    """Category of one event, by the one table of `trace_diff.classify`; runtime calls by what they do."""
    from trace_diff import classify

    if kind in _DEVICE:
        return classify.kernel_class(name)
    if kind == Kind.PYTHON:
        return "python"
    if kind in (Kind.RUNTIME, Kind.DRIVER):
        found = classify.call_class(name)
        return "runtime" if found == classify.UNKNOWN else "runtime.memcpy" if found == "memcpy" else found
    return classify.op_class(name)


def _words(category: str) -> str:
    return category.replace("_", " ").replace(".", ": ")


def _cut(name: str, limit: int = 56) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def step_of(analysis: Analysis, rank: int) -> Step | None:
    """The representative step: that of the typical sequence, on other ranks the one at the same position."""
    steps = analysis.steps.get(rank, ())
    if not steps:
        return None
    own = analysis.steps[analysis.slowest]
    wanted = analysis.sequence.step if analysis.sequence is not None else None
    at = next((i for i, s in enumerate(own) if s.index == wanted), len(own) // 2)
    return steps[min(at, len(steps) - 1)]


def _zero(analysis: Analysis, trace: Trace, step: Step) -> int:
    """Where the axis begins on this rank's clock: the start of the pace setter's step."""
    first = analysis.traceset.traces[analysis.slowest]
    own = step_of(analysis, analysis.slowest)
    clock = analysis.collectives.offsets if analysis.collectives is not None else {}
    if own is None or trace.rank == first.rank or trace.rank not in clock:
        return step.start_ns
    common = first.base_ns + own.start_ns - clock[first.rank]
    zero = common + clock[trace.rank] - trace.base_ns
    return zero if abs(zero - step.start_ns) < own.wall_ns else step.start_ns


def _ranks(analysis: Analysis) -> list[int]:
    ranks = [r for r in analysis.traceset.traces if analysis.steps.get(r)]
    return ranks if len(ranks) <= MAX_RANKS else sorted({analysis.slowest, *ranks[: MAX_RANKS - 1]})


def _engine(analysis: Analysis, end_us: float, limit: int) -> EngineView | None:
    ranks, whole = _ranks(analysis), len(analysis.traceset)
    lanes: list[Lane] = []
    for rank in ranks:
        step = step_of(analysis, rank)
        if step is None:
            continue
        trace = analysis.traceset.traces[rank]
        zero = _zero(analysis, trace, step)
        end = min(max(step.end_ns, zero + 1), zero + round(end_us * 1000))
        view = _View(trace, analysis, step, zero, end, end_us * 1000 / _BINS, limit)
        mark = f" rank {rank}" if whole > 1 else ""
        lanes.append(Lane(f"host{mark}", False, tuple(host_spans(view))))
        device = device_spans(view)
        if device:
            lanes.append(Lane(f"GPU{mark}", True, tuple(device), tuple(idle_spans(view)), tuple(replay_spans(view))))
    own = step_of(analysis, analysis.slowest)
    if not lanes or own is None:
        return None
    shown = f" (ranks {', '.join(map(str, ranks))} of {whole})" if len(ranks) < whole else ""
    wall = own.wall_ns / 1000
    return EngineView(f"{analysis.label}{shown}: {micro(wall)}", wall, tuple(lanes))


def build(analyses: Sequence[Analysis], labels: Iterable[str] | None = None) -> Timeline | None:
    """The view of all analyses (or of those with these labels); None when there is nothing to draw."""
    wanted = set(labels) if labels is not None else {a.label for a in analyses}
    kept = [a for a in analyses if a.label in wanted]
    end = max((s.wall_ns / 1000 for a in kept for r in a.steps if (s := step_of(a, r))), default=0.0) * 1.02
    if end <= 0:
        return None
    lanes = sum(2 * len(_ranks(a)) for a in kept)
    limit = max(150, _ALL_SPANS // max(lanes, 1))
    engines = tuple(e for a in kept if (e := _engine(a, end, limit)))
    if not engines:
        return None
    spans = (s for e in engines for lane in e.lanes for s in (*lane.spans, *lane.idle, *lane.replays))
    legend = palette.legend({s.category for s in spans})
    return Timeline(engines, end, tuple((shade, text) for _, shade, text in legend))
