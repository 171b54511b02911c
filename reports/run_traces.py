"""The traces of a run folder as a comparison: the first engine, the last one, and references of the same run.

`traces/<name>/rank<r>.json.gz`, where name is "baseline", an attempt's number or a reference engine's. Damaged
or missing traces become a note, never an error: a report must come out of every run. Not for: the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.run_data import Run

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.compare import Diff
    from trace_diff.types import Finding

BASELINE = "baseline"
MAX_STEPS_SHOWN = 4  # accepted engines between the first and the last


@dataclass(frozen=True, slots=True)
class RunTraces:
    analyses: tuple[Analysis, ...] = ()
    diff: Diff | None = None
    findings: tuple[Finding, ...] = ()  # of the last engine
    notes: tuple[str, ...] = ()


def _folders(run: Run) -> list[tuple[str, Path]]:
    """(label, folder): the first engine, accepted ones in order (the last always), then references."""
    root = run.directory / "traces"
    if not root.is_dir():
        return []
    found = [("first engine", root / BASELINE)] if (root / BASELINE).is_dir() else []
    accepted = [
        (f"after {a.number} {a.mechanism}"[:60], root / str(a.number))
        for a in run.accepted
        if (root / str(a.number)).is_dir()
    ]
    found += accepted[-MAX_STEPS_SHOWN:]
    others = sorted(p for p in root.iterdir() if p.is_dir() and p.name != BASELINE and not p.name.isdigit())
    return found + [(_reference_label(run, p), p) for p in others]


def _said(run: Run, folder: Path) -> dict[str, Any]:
    """The `captured` line of a folder of traces; empty when there is none."""
    want = f"traces/{folder.name}/"
    for data in reversed(run.kinds.get("captured", [])):
        if data.get("label") == folder.name or any(str(t).startswith(want) for t in data.get("traces") or ()):
            return data
    return {}


def _reference_label(run: Run, folder: Path) -> str:
    named = _said(run, folder).get("title")
    return str(named or {"hf": "Hugging Face", "vllm": "vLLM"}.get(folder.name, folder.name))[:60]


def _stated(run: Run, folder: Path) -> tuple[dict[str, Any], float | None]:
    """What the run knows of a capture and a trace may not say: TP, batch, data type; and its unprofiled step."""
    data = _said(run, folder)
    stated = {k: data[k] for k in ("tp", "batch") if isinstance(data.get(k), int)}
    if "batch" in stated:
        stated["tokens"] = stated["batch"]
    dtype = (data.get("metadata") or {}).get("dtype")
    if isinstance(dtype, str):
        stated["dtype"] = dtype
    control = data.get("control_us_per_token")
    return stated, float(control) if isinstance(control, int | float) else None


def analysis(run: Run, folder: Path, label: str) -> Analysis:
    """One engine's traces of the run. Raises TraceError, ValueError (no steps) or OSError; FileNotFoundError without files."""
    from trace_diff import api

    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.json.gz"))
    if not files:
        raise FileNotFoundError("no trace files")
    stated, control = _stated(run, folder)
    return api.analyse(api.load(_as_paths(files), label), **stated).with_control(control)


def load(run: Run) -> RunTraces:
    """Analyse what is there; every failure is a note that names the folder."""
    folders = _folders(run)
    if not folders:
        return RunTraces(notes=("The run folder holds no traces: no timeline and no side-by-side table.",))
    from trace_diff import api
    from trace_diff.ingest import TraceError

    analyses, notes = [], []
    for label, folder in folders:
        try:
            analyses.append(analysis(run, folder, label))
        except (TraceError, ValueError, OSError) as error:
            notes.append(f"traces/{folder.name}: {error}")
    if not analyses:
        return RunTraces(notes=tuple(notes))
    last = max((i for i, a in enumerate(analyses) if a.label.startswith("after")), default=0)
    references = [a for i, a in enumerate(analyses) if i > last]
    answers = api.find(analyses[last], references)
    return RunTraces(tuple(analyses), api.compare(analyses), tuple(answers), tuple(notes))


def _as_paths(files: Sequence[Path]) -> list[str | Path]:
    return list(files)
