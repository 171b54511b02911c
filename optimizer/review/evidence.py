"""What stands behind an entry or a parked patch, looked up anew: traces by hash, gates, stages and their intervals.

Nothing that an entry claims is shown as evidence before it was found: a trace counts where a file with that very
sha256 is here. Not for: deciding (queue.py, parked.py), or drawing (templates).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from optimizer import state
from optimizer.knowledge.blueprint import Entry, Gain
from reports import baselines, run_data, run_page, run_traces, timeline
from reports.run_data import Attempt, Measured, Run

BEFORE, AFTER = "before", "after"
GALLERY = Path(__file__).resolve().parents[2] / "reports" / "gallery"
_STAGES = ("screen", "decide", "confirm")


@dataclass(frozen=True, slots=True)
class Interval:
    """A gain as a factor of speed, with its 95 % interval; both above 1 where it is faster."""

    label: str
    mid: float
    low: float | None
    high: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval on a shared axis; positions are per cent of its width."""

    interval: Interval
    mid: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Chart:
    bars: tuple[Bar, ...]
    zero: float  # position of "no change"
    margin: float | None  # position of the margin that a patch has to clear
    margin_text: str
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class TraceFile:
    label: str
    sha256: str
    state: str  # "as recorded", "differs", "not on this machine"
    path: Path | None  # only of files that are as recorded
    when: str  # before, after, or ""


@dataclass(frozen=True, slots=True)
class Gate:
    check: str
    name: str
    outcome: str  # passed, failed, parked
    detail: str
    seconds: float | None


@dataclass(slots=True)
class Judged:
    """What a run's ledger says of one attempt."""

    run: str = ""
    attempt: int | None = None
    gates: list[Gate] = field(default_factory=list)
    stages: list[Interval] = field(default_factory=list)
    margin: float | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)


def record(entry: Entry) -> Path | None:
    """The record of a run that ships with the repository and holds the very ledger line that the entry cites."""
    return _records().get(entry.evidence.ledger_hash or "")


@lru_cache(maxsize=1)
def _records() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for place in sorted(GALLERY.glob("*/ledger.jsonl")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found |= {json.loads(line)["hash"]: place.parent for line in place.read_text("utf-8").splitlines()}
    return found


def judged(run_dir: Path | None, number: int | None) -> Judged:
    """Gates, stages and predictions of an attempt; empty where the run is not here."""
    if run_dir is None or number is None:
        return Judged()
    try:
        run = run_data.read(run_dir)
    except (run_data.RunError, OSError):
        return Judged()
    attempt = next((a for a in run.attempts if a.number == number), None)
    if attempt is None:
        return Judged()
    margin = run.last("calibrated").get("margin")
    return Judged(
        run=run.id,
        attempt=number,
        gates=[_gate(g) for g in attempt.gates],
        stages=[i for stage in _STAGES if (i := _stage(stage, attempt.measured(stage)))],
        margin=float(margin) if isinstance(margin, int | float) else None,
        facts=_facts(run, attempt),
    )


def _gate(data: dict[str, Any]) -> Gate:
    outcome = "parked" if data.get("parked") else "passed" if data.get("passed") else "failed"
    seconds = data.get("seconds")
    return Gate(
        check=str(data.get("check") or ""),
        name=str(data.get("gate") or ""),
        outcome=outcome,
        detail=str(data.get("detail") or ""),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
    )


def _stage(stage: str, found: Measured) -> Interval | None:
    if found.ratio is None:
        return None
    low, high = found.ci95 or (None, None)
    note = _pairs(found.pairs) + (f", {found.discarded} discarded" if found.discarded else "")
    return Interval(stage, 1 / found.ratio, 1 / high if high else None, 1 / low if low else None, note)


def _facts(run: Run, attempt: Attempt) -> list[tuple[str, str]]:
    row = next(r for r in run_page.build(run).rows if r.number == attempt.number)
    return [
        ("Outcome", row.outcome + (f": {row.reason}" if row.reason else "")),
        ("Predicted", f"{row.predicted} per {attempt.per}"),
        ("Measured", row.measured),
        ("In the trace", row.traced),
        ("Proposer", row.proposer),
    ]


def gains(entry: Entry) -> list[Interval]:
    """The gains that an entry states."""
    named = (("when accepted", entry.gain.marginal), ("left out at the end", entry.gain.leave_one_out), ("whole series", entry.gain.series))
    return [_gain(label, gain) for label, gain in named if gain is not None]


def _gain(label: str, gain: Gain) -> Interval:
    low, high = gain.ci95
    note = _pairs(gain.pairs) + ("" if gain.metric == "us_per_token" else f", {gain.metric}")
    return Interval(label, 1 / gain.ratio, 1 / high if high > 0 else None, 1 / low if low > 0 else None, note)


def _pairs(count: int) -> str:
    return f"{count} pair{'s' if count != 1 else ''}"


def chart(intervals: Sequence[Interval], margin: float | None = None) -> Chart | None:
    """Intervals on one axis that holds "no change" and the margin; None when there are none."""
    if not intervals:
        return None
    edge = 1 + margin if margin else None
    values = [1.0, *(e for e in (edge,) if e)]
    values += [v for i in intervals for v in (i.mid, i.low, i.high) if v is not None]
    low, high = min(values), max(values)
    pad = max(0.08 * (high - low), 0.002)
    low, high = low - pad, high + pad

    def at(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    bars = tuple(Bar(i, at(i.mid), at(i.mid if i.low is None else i.low), at(i.mid if i.high is None else i.high)) for i in intervals)
    form = "+.0%" if high - low >= 0.08 else "+.1%"
    ticks = tuple((at(v), "0 %" if abs(v - 1) < 1e-9 else format(v - 1, form)) for v in _round_steps(low, high))
    text = f"margin {margin:.1%}" if margin else ""
    ticks = tuple(t for t in ticks if t[0] <= 96)  # the last one's words would run into the values
    return Chart(bars, at(1.0), at(edge) if edge else None, text, ticks)


def _round_steps(low: float, high: float) -> list[float]:
    """Four to eight round numbers around 1.0."""
    step = next((s for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / s <= 8), 10.0)
    first = round((low - 1) / step)
    found = [1 + step * k for k in range(first, first + 12)]
    return [v for v in found if low <= v <= high]


def traces(entry: Entry, run_dir: Path | None) -> list[TraceFile]:
    """Every trace that the entry cites, and whether the very file is here."""
    return [_trace(label, sha, run_dir) for label, sha in entry.evidence.traces.items()]


def _trace(label: str, sha: str, run_dir: Path | None) -> TraceFile:
    when, _, name = label.partition(": ")
    if when not in (BEFORE, AFTER):
        when, name = "", label
    inside = _inside(run_dir, name)
    if inside is not None:
        same = _sha256(str(inside), inside.stat().st_size, inside.stat().st_mtime_ns) == sha
        return TraceFile(label, sha, "as recorded" if same else "differs", inside if same else None, when)
    bundled = _bundled().get(sha)
    if bundled is not None and _sha256(str(bundled), bundled.stat().st_size, bundled.stat().st_mtime_ns) == sha:
        return TraceFile(label, sha, "as recorded", bundled, when)
    return TraceFile(label, sha, "not on this machine", None, when)


def _inside(run_dir: Path | None, name: str) -> Path | None:
    """A file below the run's traces folder; an entry may name anything."""
    if run_dir is None:
        return None
    root = (run_dir / "traces").resolve()
    try:
        path = (run_dir / name).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except (OSError, ValueError):  # a name with NUL, or far too long
        return None


@lru_cache(maxsize=512)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    """Of a file as it is now: size and time are there to notice a change."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def _bundled() -> dict[str, Path]:
    try:
        sets = baselines.load_index(check=False)
    except (baselines.BaselineError, KeyError):
        return {}
    return {sha: path for s in sets for path, sha in zip(s.paths, s.sha256, strict=True) if path.is_file()}


def timelines(run_dir: Path | None, before: Iterable[Path], after: Iterable[Path]) -> tuple[timeline.Timeline | None, tuple[str, ...]]:
    """The step before and after on one axis, and notes on what could not be read."""
    key = tuple((when, str(p), p.stat().st_mtime_ns) for when, files in ((BEFORE, before), (AFTER, after)) for p in files)
    return _timelines(str(run_dir) if run_dir else None, key)


@lru_cache(maxsize=32)
def _timelines(run_dir: str | None, key: tuple[tuple[str, str, int], ...]) -> tuple[timeline.Timeline | None, tuple[str, ...]]:
    from trace_diff import api
    from trace_diff.ingest import TraceError

    run = run_data.read(Path(run_dir)) if run_dir else None
    found, notes = [], []
    for when in (BEFORE, AFTER):
        files: list[str | Path] = [path for w, path, _ in key if w == when]
        if not files:
            continue
        try:
            if run is not None and Path(files[0]).resolve().is_relative_to(run.directory.resolve()):
                found.append(run_traces.analysis(run, Path(files[0]).parent, when))
            else:
                found.append(api.analyse(api.load(files, when)))
        except (TraceError, ValueError, OSError) as error:
            notes.append(f"{when}: {error}")
    return (timeline.build(found, {a.label for a in found}) if found else None), tuple(notes)


def parked_traces(run_dir: Path, incumbent: str, attempt: int) -> tuple[list[Path], list[Path]]:
    """Trace files of the incumbent that a parked patch was judged against, and of the patch itself."""
    run = run_data.read(run_dir)
    said = state.captured_as(run.lines, incumbent)
    label = str(said.get("label")) if said else "baseline"
    return _folder(run_dir, label), _folder(run_dir, str(attempt))


def _folder(run_dir: Path, name: str) -> list[Path]:
    folder = run_dir / "traces" / Path(name).name
    return sorted(p for p in folder.glob("*") if p.name.endswith((".json", ".json.gz")))
