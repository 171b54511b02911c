"""A trace file to a Trace: reads, splits, decodes, sorts, judges. Not for: several ranks (many)."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trace_diff.ingest import merged, ranks
from trace_diff.ingest.columns import Columns
from trace_diff.ingest.link import fill_from_flows
from trace_diff.ingest.notes import NoteBook
from trace_diff.ingest.numbers import plain_id
from trace_diff.ingest.quarantine import Rows, judge
from trace_diff.ingest.reader import Progress, TraceError, chunks
from trace_diff.ingest.schema import DEVICE_KINDS, LEGACY_PROCESSES, WORK_KINDS, kind_of, mask_of
from trace_diff.ingest.split import Splitter
from trace_diff.ingest.store import ArgStore
from trace_diff.ingest.trace import Trace, zero_ns
from trace_diff.types import Events, Kind


def load(path: str | Path, label: str | None = None, progress: Progress | None = None) -> Trace:
    """Load one rank's trace (.json or .json.gz), as far as the file is good.

    `progress` is called with (bytes read, bytes of the file). Raises TraceError, which names the file and the
    byte, where there is no trace at all; damage is told in `Trace.notes` instead.
    """
    path = Path(path)
    notes = NoteBook()
    columns, store = Columns(), ArgStore(path)
    splitter = Splitter(notes, lambda byte, why: TraceError(path, byte, why))
    with _collector_off():
        for chunk in chunks(path, notes, progress):
            for batch in splitter.feed(chunk):
                columns.add(batch.events)
                store.add(batch)
        for batch in splitter.close():
            columns.add(batch.events)
            store.add(batch)
        return _build(path, label, columns, store, splitter.meta, notes)


@contextmanager
def _collector_off():
    """The garbage collector walks every object that parsing makes, and finds nothing: 2 to 3 times the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _build(
    path: Path, label: str | None, columns: Columns, store: ArgStore, meta: dict[str, Any], notes: NoteBook
) -> Trace:
    columns.close(notes)
    if columns.quoted:
        notes.repaired += columns.quoted
        notes.say(f"times of {columns.quoted} events were written as text")
    table = _table(columns, store, notes)
    unknown = _unknown(columns, table, notes)
    out = judge(table.rows, notes)
    base = int(table.rows.ts[~out].min()) if (~out).any() else 0
    good, bad = _events(table, ~out, base), _events(table, out, base)
    if notes.truncated and len(good):
        last = base + int((good.ts_ns + good.dur_ns).max())
        notes.say(f"last good time: {last // 1000}.{last % 1000:03d} us")
    rank, world, known = _rank(path, meta, notes)
    return Trace(
        path=str(path),
        label=label or path.name.split(".")[0],
        rank=rank,
        world_size=world,
        events=good,
        names=[n if isinstance(n, str) else str(n) for n in columns.names],
        tracks=table.tracks,
        base_ns=base + zero_ns(meta),
        notes=notes.freeze(),
        meta=meta,
        quarantine=bad,
        store=store,
        collectives=columns.collectives,
        rank_known=known,
        unknown=unknown,
        process_at={plain_id(e.pid): at for e, at in columns.meta_events if e.name == "process_name"},
    )


class _Table(NamedTuple):
    """All complete events of the file, in its order."""

    rows: Rows
    track: np.ndarray
    tracks: list[tuple[Any, Any]]
    correlation: np.ndarray
    external: np.ndarray
    at: np.ndarray


def _table(columns: Columns, store: ArgStore, notes: NoteBook) -> _Table:
    kind = columns.column("kind", np.int8)
    track, tracks = _tracks(columns, columns.column("pid", np.int32), columns.column("tid", np.int32))
    _legacy(kind, track, tracks)
    stream, device = _places(columns, mask_of(DEVICE_KINDS)[kind], track, tracks)
    rows = Rows(
        ts=columns.column("ts"),
        dur=columns.column("dur"),
        kind=kind,
        name=columns.column("name", np.int32),
        stream=stream,
        device=device,
        bad=columns.column("bad", np.int8),
    )
    correlation, external = columns.column("correlation"), columns.column("external")
    group, labels = merged.groups(tracks)
    if labels:
        correlation, external = (merged.separate(ids, group[track]) for ids in (correlation, external))
        notes.say(f"{len(labels)} ranks are merged in this file: {', '.join(label.strip() for label in labels)}")
    if columns.flows and (correlation[mask_of(WORK_KINDS)[kind]] == -1).any():
        fill_from_flows(correlation, rows, track, tracks, store, notes)
    return _Table(rows, track, tracks, correlation, external, columns.column("at"))


def _events(table: _Table, mask: np.ndarray, base: int) -> Events:
    rows = table.rows
    order = by_start(rows.ts, rows.dur, np.flatnonzero(mask))
    return Events(
        ts_ns=rows.ts[order] - base,
        dur_ns=np.maximum(rows.dur[order], 0),
        kind=rows.kind[order],
        name=rows.name[order],
        track=table.track[order],
        stream=rows.stream[order].astype(np.int32),
        device=rows.device[order].astype(np.int32),
        correlation=table.correlation[order],
        external_id=table.external[order],
        args_at=table.at[order],
    )


def _rank(path: Path, meta: dict[str, Any], notes: NoteBook) -> tuple[int, int | None, bool]:
    """(rank, world size, whether anything told the rank)."""
    rank, world = ranks.from_meta(meta)
    if rank is not None:
        return rank, world, True
    rank = ranks.from_name(str(path))
    if rank is not None:
        notes.say(f"rank {rank} taken from the file name")
        return rank, world, True
    notes.say("no rank in the file or its name; taken as 0")
    return 0, world, False


def by_start(ts: np.ndarray, dur: np.ndarray, index: np.ndarray) -> np.ndarray:
    """`index` by start, the longest first among equals (a parent before its children), then as in the file."""
    order = index[np.argsort(ts[index], kind="stable")]  # files are in order for long stretches, which this sort uses
    starts = ts[order]
    same = starts[1:] == starts[:-1]
    tied = np.zeros(len(order), bool)
    tied[1:] |= same
    tied[:-1] |= same
    places = np.flatnonzero(tied)
    if len(places):
        rows = order[places]
        order[places] = rows[np.lexsort((rows, -dur[rows], ts[rows]))]
    return order


def _legacy(kind: np.ndarray, track: np.ndarray, tracks: list[tuple[Any, Any]]) -> None:
    """Kinds of rows without a category by the name of their process, as the profiler before Kineto wrote; in place."""
    told = np.array([LEGACY_PROCESSES.get(p, Kind.OTHER) if isinstance(p, str) else Kind.OTHER for p, _ in tracks], np.int8)
    if told.any():
        kind[:] = np.where(kind == Kind.OTHER, told[track], kind)


def _unknown(columns: Columns, table: _Table, notes: NoteBook) -> tuple[str, ...]:
    """Categories that no table knows, as far as rows of them are left."""
    count = int((table.rows.kind == Kind.OTHER).sum())
    names = sorted(str(c)[:40] if c is not None else "(none)" for c in columns.cats if kind_of(c) == Kind.OTHER)
    if not count:
        return ()
    notes.say(f"{count} events of categories unknown to this tool, not counted: {', '.join(names[:20])}")
    return tuple(names)


def _tracks(columns: Columns, pid: np.ndarray, tid: np.ndarray) -> tuple[np.ndarray, list[tuple[Any, Any]]]:
    pids, tids = list(columns.pids), list(columns.tids)
    width = len(tids) + 1
    key = pid.astype(np.int64) * width + tid
    if len(pids) * width < 1 << 22:  # no sort: mark the pairs that occur
        present = np.zeros(len(pids) * width + 1, bool)
        present[key] = True
        pairs = np.flatnonzero(present)
        number = np.cumsum(present) - 1
        track = number[key]
    else:
        pairs, track = np.unique(key, return_inverse=True)
    unique: dict[tuple[Any, Any], int] = {}
    named = [(plain_id(pids[p // width]), plain_id(tids[p % width])) for p in pairs.tolist()]
    remap = np.array([unique.setdefault(pair, len(unique)) for pair in named] or [0], np.int32)
    return remap[track], list(unique)


def _places(
    columns: Columns, on_device: np.ndarray, track: np.ndarray, tracks: list[tuple[Any, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Stream and device of device rows, from the arguments, else from tid and pid; -1 on host rows."""
    stream, device = columns.column("stream"), columns.column("device")
    from_tid = np.array([_digits(t) for _, t in tracks], np.int64) if tracks else np.zeros(0, np.int64)
    from_pid = np.array([_digits(p) for p, _ in tracks], np.int64) if tracks else np.zeros(0, np.int64)
    limit = 1 << 31
    stream = np.where((stream < 0) | (stream >= limit), from_tid[track], stream)
    device = np.where((device < 0) | (device >= limit), from_pid[track], device)
    return np.where(on_device, stream, -1), np.where(on_device, device, -1)


def _digits(value: int | str) -> int:
    """7 of 7, "7", "stream 7"; -1 where there is no number that a column holds."""
    if isinstance(value, int):
        return value if abs(value) < 1 << 31 else -1
    tail = value.rstrip()
    k = len(tail)
    while k and "0" <= tail[k - 1] <= "9":
        k -= 1
    return int(tail[k:]) if 0 < len(tail) - k < 10 else -1
