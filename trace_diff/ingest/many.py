"""Several ranks: files and folders to a TraceSet, loaded side by side. Not for: one file (load)."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from trace_diff.ingest.load import load
from trace_diff.ingest.merged import split
from trace_diff.ingest.reader import Progress, TraceError
from trace_diff.ingest.trace import Trace, TraceSet

_SUFFIXES = (".json", ".json.gz")
_WORTH_FORKING = 4_000_000  # bytes of files: below, starting processes takes longer than loading


def load_many(
    paths: str | Path | Iterable[str | Path],
    label: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> TraceSet:
    """Load every trace among `paths` (files, or folders of them) as the ranks of one run.

    Missing ranks (by the world size that the files state, else by gaps) and duplicate ranks are named in the
    notes; of duplicates the first by name is used. `workers`: processes (default: one per core for large files).
    Raises TraceError where there is no trace at all.
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    files = _files([Path(p) for p in paths])
    if not files:
        raise TraceError(", ".join(map(str, paths)), 0, "no trace file here")
    label = label or files[0].parent.name
    traces = [part for trace in _load_all(files, label, workers, progress) for part in split(trace)]
    return gather(traces, label)


def _load_all(files: list[Path], label: str, workers: int | None, progress: Progress | None) -> list[Trace]:
    """All files, in their order; large ones in forked processes, where forking is safe (one thread)."""
    sizes = [f.stat().st_size if f.exists() else 0 for f in files]
    if workers is None:
        workers = min(len(files), os.cpu_count() or 1) if sum(sizes) > _WORTH_FORKING else 1
    can_fork = "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1
    if workers < 2 or len(files) < 2 or not can_fork:
        done = 0
        out = []
        for file, size in zip(files, sizes, strict=True):
            out.append(load(file, label, _shifted(progress, done, sum(sizes))))
            done += size
        return out
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        pending = [pool.submit(load, file, label) for file in files]
        out = []
        for job, done in zip(pending, itertools.accumulate(sizes), strict=True):
            out.append(job.result())
            if progress is not None:
                progress(done, sum(sizes))
        return out


def _shifted(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Progress of one file as progress of all."""
    if progress is None:
        return None
    return lambda here, _: progress(done + here, total)


def gather(traces: list[Trace], label: str) -> TraceSet:
    """Sort loaded ranks; name what is missing or double."""
    notes: list[str] = []
    if len(traces) > 1 and not any(t.rank_known for t in traces):
        notes.append("no file says its rank; ranks were numbered in the order of the file names")
        for i, trace in enumerate(traces):
            trace.rank = i
    by_rank: dict[int, Trace] = {}
    double: list[tuple[int, str]] = []
    for trace in sorted(traces, key=lambda t: (t.rank, not t.rank_known)):
        if trace.rank in by_rank:
            double.append((trace.rank, trace.path))
            notes.append(f"rank {trace.rank} is there twice: {by_rank[trace.rank].path} is used, {trace.path} is not")
        else:
            by_rank[trace.rank] = trace
    worlds = {t.world_size for t in traces if t.world_size}
    if len(worlds) > 1:
        notes.append(f"the files disagree about the world size: {sorted(worlds)}")
    devices = {d for t in traces for d in t.device_names()}
    if len(devices) > 1:
        notes.append(f"the files disagree about the device, so they may be of several runs: {', '.join(sorted(devices))}")
    world = max(worlds, default=max(by_rank) + 1)
    missing = tuple(r for r in range(world) if r not in by_rank)
    if missing:
        notes.append(f"{len(missing)} of {world} ranks are missing: {_ranges(missing)}")
    return TraceSet(label, by_rank, tuple(notes), missing, tuple(double))


def _ranges(numbers: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    out: list[list[int]] = []
    for n in numbers:
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _files(paths: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(f for f in path.iterdir() if f.name.endswith(_SUFFIXES) and _is_trace(f))
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _is_trace(path: Path) -> bool:
    """Folders of traces also hold indexes; a trace is a large file, or says so in its first bytes."""
    if path.name.endswith(".gz"):
        return True
    with path.open("rb") as file:
        head = file.read(1 << 16)
    return b'"traceEvents"' in head or b'"ph"' in head
