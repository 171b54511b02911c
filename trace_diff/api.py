"""The Python API of trace_diff: load, analyse, compare, find. Data in, data out; reports draw it.

    here = analyse(load(["rank0.json.gz", "rank1.json.gz"], label="mine"))
    vllm = analyse(load("vllm.json.gz", label="vLLM graph"))
    print(compare([here, vllm]).frame())
    print(findings_frame(find(here, references=[vllm])))

Every result has `.to_json()`; tables have `.frame()` (pandas). Not for: command lines and pictures (reports).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_diff import attribute, collectives, sequence, windows
from trace_diff.analysis import Analysis, Cell, Observer
from trace_diff.cells import cell_of
from trace_diff.compare import Diff, compare
from trace_diff.findings import find as _find
from trace_diff.ingest import TraceSet, load_many
from trace_diff.layers import find_layers
from trace_diff.types import Breakdown, Finding, Phase, Step

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Analysis", "Cell", "Diff", "Finding", "NoSteps", "analyse", "compare", "find", "findings_frame", "load"]


class NoSteps(ValueError):
    """A trace set has no complete step of the phase that was asked for; the message says what it has."""


def load(paths: str | Path | Seq[str | Path], label: str | None = None) -> TraceSet:
    """Load one engine's traces: files or folders, one file per rank. Errors name the file and the byte."""
    many = [paths] if isinstance(paths, str | Path) else list(paths)
    return load_many([Path(p) for p in many], label or Path(many[0]).name.split(".")[0])


def analyse(traceset: TraceSet, phase: str = "decode", **stated: Any) -> Analysis:
    """Account for one phase of a trace set and find its typical step.

    `stated` overrides fields of Cell (model, tp, batch, layers ...), which are otherwise read from the trace or
    inferred. Steps with no phase in their name count for any phase. Raises NoSteps.
    """
    wanted = Phase(phase)
    steps, notes = _steady_steps(traceset, wanted)
    by_rank = traceset.traces
    matched = collectives.match(traceset, wanted) if len(traceset) > 1 else None
    means = {r: attribute.mean_breakdown(by_rank[r], list(s), matched) for r, s in steps.items()}
    slowest = _pace_setter(means)
    seq = sequence.extract(by_rank[slowest], steps[slowest])
    layers = find_layers(seq.classes, seq.names) if seq is not None else None
    cell = cell_of(traceset, by_rank[slowest], steps[slowest], wanted, seq, layers, stated)
    traced = float(np.mean([s.wall_ns for s in steps[slowest]])) / 1000
    control = _positive(by_rank[slowest].meta.get("control_step_us"))  # by a capture that also timed without profiler
    return Analysis(
        label=traceset.label,
        cell=cell,
        traceset=traceset,
        phase=wanted,
        steps=steps,
        breakdowns=means,
        slowest=slowest,
        sequence=seq,
        layers=layers,
        collectives=matched,
        observer=Observer(traced, control),
        notes=(*traceset.notes, *_damage(traceset), *notes),
        seen_steps=_seen(windows.steps(by_rank[slowest]), wanted),
    )


def find(
    analysis: Analysis, references: Seq[Analysis] = (), control_step_us: float | None = None
) -> list[Finding]:
    """Every rule's answer, dearest finding first, then what was not found, then what could not be looked at.

    `control_step_us` is the wall of one step of the same cell without the profiler. References that measured
    another cell are left out.
    """
    return _find(analysis.with_control(control_step_us), references)


def findings_frame(findings: Seq[Finding]) -> pd.DataFrame:
    """One row per finding: id, rule, status, bound_us, per, title, skills."""
    import pandas as pd  # half a second: only for those who ask for a frame

    columns = ["id", "rule", "status", "bound_us", "per", "title", "skills"]
    return pd.DataFrame([{c: asdict(f)[c] for c in columns} for f in findings], columns=pd.Index(columns))


def _damage(traceset: TraceSet) -> list[str]:
    """What loading had to mend, set aside or leave out, for every report on these traces."""
    out = []
    for trace in traceset:
        n = trace.notes
        if n.repaired or n.quarantined or n.lost or n.truncated or trace.unknown:
            counts = f"{n.repaired} repaired, {n.quarantined} quarantined, {n.lost} lost{', cut off' * n.truncated}"
            out.append(f"{Path(trace.path).name}: {counts}: {'; '.join(n.messages[:6])}")
    return out


def _positive(value: object) -> float | None:
    """A time that a file states; None where it states none."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15
    return float(value) if good else None  # pyright: ignore[reportArgumentType]


def _steady_steps(traceset: TraceSet, phase: Phase) -> tuple[dict[int, tuple[Step, ...]], list[str]]:
    out: dict[int, tuple[Step, ...]] = {}
    notes: list[str] = []
    seen: dict[str, int] = {}
    for trace in traceset:
        every = windows.steps(trace)
        for s in every:
            seen[str(s.phase)] = seen.get(str(s.phase), 0) + 1
        fits = [s for s in every if s.phase in (phase, Phase.UNKNOWN)]
        good = [s for s in fits if s.complete]
        if not good:
            continue
        ahead = sum("doubled" in s.flags for s in fits)
        if ahead:
            notes.append(f"rank {trace.rank}: the first decode step launches its own work and, ahead, the next one's: left out")
        left = len(fits) - len(good) - ahead
        if left:
            notes.append(f"rank {trace.rank}: {left} of {len(fits)} steps are incomplete and left out")
        out[trace.rank] = tuple(good)
    if not out:
        has = ", ".join(f"{n} {p}" for p, n in sorted(seen.items())) or "no steps at all"
        raise NoSteps(f"{traceset.label}: no complete {phase} step; the traces hold {has}")
    return out, notes


def _seen(steps: Seq[Step], phase: Phase) -> tuple[int, int]:
    """Steps of the phase, and how many of them are not whole; those cut by the trace's ends, and a first one with
    the work of two, do not count."""
    inner = [s for s in steps if s.phase in (phase, Phase.UNKNOWN) and not {"first", "last", "doubled"} & set(s.flags)]
    return len(inner), sum(not s.complete for s in inner)


def _pace_setter(means: dict[int, Breakdown]) -> int:
    """The rank with the most wall that is not waiting for its peers."""

    def own(b: Breakdown) -> int:
        return b.wall_ns - b.parts.get("comm.wait", 0)

    return max(means, key=lambda r: (own(means[r]), -r))

