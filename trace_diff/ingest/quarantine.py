"""Which rows cannot be believed. They are kept, counted and left out of every sum. Not for: repairing text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff.ingest.notes import NoteBook
from trace_diff.types import Kind

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_LONG_NS = 1_000_000  # a row that runs over its followers by less is parallel work, not a broken counter
_TIMES_TYPICAL = 20


@dataclass(slots=True)
class Rows:
    """Columns that the rules look at."""

    ts: Ints
    dur: Ints
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    stream: Ints
    device: Ints
    bad: npt.NDArray[np.int8]  # 1: no start, 2: no duration


def judge(rows: Rows, notes: NoteBook) -> Mask:
    """True for the rows to keep out."""
    work = (rows.kind == Kind.KERNEL) | (rows.kind == Kind.MEMCPY) | (rows.kind == Kind.MEMSET)
    out = np.zeros(len(rows.ts), bool)
    _apply(out, rows.bad == 1, notes, "have no start time")
    _apply(out, rows.bad == 2, notes, "have no duration")
    _apply(out, rows.dur < 0, notes, "have a negative duration")
    _apply(out, work & (rows.ts == 0) & (rows.dur == 0), notes, "are device rows without timing (start 0, duration 0)")
    _apply(out, _absurd_ends(rows, work, out), notes, "have a duration that runs past the whole recording")
    _apply(out, _overrun(rows, work, out), notes, "run over later work of their own stream")
    notes.quarantined = int(out.sum())
    return out


def _apply(out: Mask, hit: Mask, notes: NoteBook, why: str) -> None:
    new = hit & ~out
    if new.any():
        out |= new
        notes.say(f"{int(new.sum())} events {why}; kept out of every sum")


def _absurd_ends(rows: Rows, work: Mask, out: Mask) -> Mask:
    """Rows longer than 20 times the span of all starts, and over a second: no recording holds them."""
    good = ~out
    if good.sum() < 3:
        return np.zeros(len(out), bool)
    starts = rows.ts[good]
    span = int(starts.max()) - int(starts.min())
    return good & (rows.dur > max(1_000_000_000, _TIMES_TYPICAL * span)) & (work | (rows.kind != Kind.PROFILER))


def _overrun(rows: Rows, work: Mask, out: Mask) -> Mask:
    """Device rows that still run when work behind them on their own stream has begun and ended.

    A stream runs in order. Programmatic dependent launch lets the next kernel begin early and branches of a graph
    share a stream's number, so a small overlap is legitimate; swallowing a follower by over a millisecond and being
    20 times as long as kernels of that name (or of that stream) usually are is a broken end time.
    """
    hit = np.zeros(len(out), bool)
    index = np.flatnonzero(work & ~out)
    if len(index) < 3:
        return hit
    order = index[np.lexsort((rows.dur[index], rows.ts[index], rows.stream[index], rows.device[index]))]
    ts, end = rows.ts[order], rows.ts[order] + rows.dur[order]
    same = (rows.stream[order][1:] == rows.stream[order][:-1]) & (rows.device[order][1:] == rows.device[order][:-1])
    over = np.zeros(len(order), bool)
    over[:-1] = same & (end[:-1] > end[1:]) & (end[:-1] - ts[1:] > 0)
    if not over.any():
        return hit
    for k in np.flatnonzero(over).tolist():
        row = order[k]
        typical = _typical(rows, index, row)
        late = int(end[k] - ts[k + 1])
        if rows.dur[row] > _TIMES_TYPICAL * max(typical, 1) and late > min(_LONG_NS, _TIMES_TYPICAL * max(typical, 1)):
            hit[row] = True
    return hit


def _typical(rows: Rows, index: Ints, row: int) -> int:
    """Median duration of the other rows of the same name, else of the same stream."""
    same = index[(rows.name[index] == rows.name[row]) & (index != row)]
    if len(same) < 2:
        same = index[(rows.stream[index] == rows.stream[row]) & (index != row)]
    return int(np.median(rows.dur[same])) if len(same) else 0
