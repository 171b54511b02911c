"""The bundled reference traces and published tables: what there is, where it came from, and that it is whole.

Every file is checked against its sha256 before it is handed out, so a report never shows a baseline that was
edited. Published rows were measured by others on other hardware: context, never a threshold. A user's folder has the
same form; `add` writes into either. Not for: starting engines (`optimizer/baseline.py`), reading traces
(`trace_diff.ingest`).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "baseline_traces"
_NOTE = (
    "Reference traces. Every file is checked against its sha256 at load; 'clean' timings were taken without the profiler "
    "on the same machine."
)


class BaselineError(ValueError):
    """The index or a file of it cannot be trusted; the message names the file."""


@dataclass(frozen=True, slots=True)
class BaselineTrace:
    """One recorded workload of one engine: one trace file per rank."""

    id: str
    label: str  # short, for table heads: "vLLM eager"
    engine: str
    version: str
    mode: str  # "eager", "cuda graph", "torch.compile"
    device: str  # "NVIDIA H200", "cpu"
    model: str
    dtype: str
    tp: int
    batch: int | None
    phases: tuple[str, ...]  # of the kept steps
    workload: str
    profiler: str  # options that change the timing
    licence: str
    paths: tuple[Path, ...]  # by rank
    sha256: tuple[str, ...]
    clean: dict[str, Any] = field(default_factory=dict)  # timings without the profiler, same machine
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def control_us(self) -> float | None:
        """Microseconds per decode step without the profiler, or None where it was not measured.

        For engines that were timed over a whole answer only, the mean over its tokens, prefill included;
        `clean.note` says which it is.
        """
        return self.clean.get("step_us")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One engine in one published table. A field that the source does not give is None."""

    id: str
    engine: str
    mode: str
    source: str
    hardware: str
    tok_s: float | None
    wall_ms: float | None
    values: dict[str, Any]  # the whole row


def load_index(root: Path = ROOT, *, check: bool = True) -> list[BaselineTrace]:
    """All bundled traces, checked against their sha256 unless `check` is False.

    Raises BaselineError naming the index or the file that is missing or differs.
    """
    index = root / "index.json"
    try:
        data = json.loads(index.read_text("utf-8"))
    except FileNotFoundError:
        raise BaselineError(f"{index}: no such file") from None
    except json.JSONDecodeError as error:
        raise BaselineError(f"{index}: not JSON at byte {error.pos}: {error.msg}") from None
    found = [_trace(root, entry) for entry in data["sets"]]
    if check:
        for trace in found:
            verify(trace)
    return found


def _trace(root: Path, entry: dict[str, Any]) -> BaselineTrace:
    files = sorted(entry["files"], key=lambda f: f["rank"])
    same = {k: entry[k] for k in ("id", "label", "engine", "version", "mode", "device", "model", "dtype", "tp")}
    return BaselineTrace(
        **same,
        batch=entry.get("batch"),
        phases=tuple(entry["phases"]),
        workload=entry["workload"],
        profiler=entry["profiler"],
        licence=entry["licence"],
        paths=tuple(root / f["file"] for f in files),
        sha256=tuple(f["sha256"] for f in files),
        clean=entry.get("clean", {}),
        provenance=entry["provenance"] | {"files": files},
    )


def verify(trace: BaselineTrace) -> None:
    """Raise BaselineError unless every file of `trace` is there and has the recorded sha256."""
    for path, wanted in zip(trace.paths, trace.sha256, strict=True):
        try:
            got = hashlib.sha256(path.read_bytes()).hexdigest()
        except FileNotFoundError:
            raise BaselineError(f"{path}: missing, though the index lists it") from None
        if got != wanted:
            raise BaselineError(f"{path}: sha256 is {got[:16]}..., the index says {wanted[:16]}...")


def get(baseline_id: str, root: Path = ROOT) -> BaselineTrace:
    """One checked baseline by id; BaselineError names the valid ids."""
    traces = {t.id: t for t in load_index(root, check=False)}
    if baseline_id not in traces:
        raise BaselineError(f"no baseline '{baseline_id}'; there are: {', '.join(sorted(traces))}")
    verify(traces[baseline_id])
    return traces[baseline_id]


def add(root: Path, entry: Mapping[str, Any], files: Sequence[tuple[Path, Mapping[str, Any]]], *, replace: bool = False) -> BaselineTrace:
    """Copy trace files into `root` and enter them in its index, which is made where there is none.

    entry: every field of the index but `files`; files: (path, what its cut says) by rank. The index names a file only
    once it is there. Raises BaselineError for an id that is there already, unless `replace`.
    """
    index = root / "index.json"
    known = json.loads(index.read_text("utf-8")) if index.is_file() else {"schema": 1, "note": _NOTE, "sets": []}
    name = str(entry["id"])
    there = [old for old in known["sets"] if old["id"] == name]
    if there and not replace:
        raise BaselineError(f"{index} has a baseline '{name}' already; give another id, or say that it is to be replaced")
    rows = []
    for rank, (source, about) in enumerate(files):
        suffix = ".json.gz" if source.name.endswith(".gz") else ".json"
        place = root / _folder(entry) / f"{name}{f'-rank{rank}' if len(files) > 1 else ''}{suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
        data = place.read_bytes()
        rows.append({"file": place.relative_to(root).as_posix(), "rank": rank, **about, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)})
    made = {**entry, "files": rows}
    known["sets"] = [old for old in known["sets"] if old["id"] != name] + [made]
    draft = index.with_name(".index.json.new")
    draft.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    draft.replace(index)
    return _trace(root, made)


def _folder(entry: Mapping[str, Any]) -> str:
    """`h200_tp1`: the device's last word and the ranks."""
    return f"{re.sub('[^a-z0-9]+', '', str(entry['device']).lower().split()[-1])}_tp{entry['tp']}"


def published(root: Path = ROOT) -> list[PublishedRow]:
    """Rows that the MetaInfer project published, with source and hardware; context only."""
    data = json.loads((root / "published.json").read_text("utf-8"))
    names = ("id", "engine", "mode", "source", "hardware", "tok_s", "wall_ms")
    return [PublishedRow(**{n: row[n] for n in names}, values=row) for row in data["rows"]]
