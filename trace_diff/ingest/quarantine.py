"""Which rows cannot be believed. They are kept, counted and left out of every sum. Not for: repairing text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff.ingest.notes import NoteBook
from trace_diff.types import Kind

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_LONG_NS = 1_000_000
_TIMES_TYPICAL = 20  # of the stream's usual duration, where a name has no others to compare with
_TIMES_ALIKE = 5  # of the usual duration of the same kernel


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
    _apply(out, rows.bad == 1, rows, notes, "have no start time")
    _apply(out, rows.bad == 2, rows, notes, "have no duration")
    _apply(out, rows.dur < 0, rows, notes, "have a negative duration")
    _apply(out, work & (rows.ts == 0) & (rows.dur == 0), rows, notes, "are device rows without timing (start 0, duration 0)")
    _apply(out, _absurd_ends(rows, work, out), rows, notes, "have a duration that runs past the whole recording")
    _apply(out, _overrun(rows, work, out), rows, notes, "run over later work of their own stream")
    notes.quarantined = int(out.sum())
    return out


def _apply(out: Mask, hit: Mask, rows: Rows, notes: NoteBook, why: str) -> None:
    new = hit & ~out
    if new.any():
        out |= new
        claimed = int(np.maximum(rows.dur[new], 0).sum())
        total = f" (they claim {claimed // 1000}.{claimed % 1000:03d} us)" if claimed else ""
        notes.say(f"{int(new.sum())} events {why}{total}; kept out of every sum")


def _absurd_ends(rows: Rows, work: Mask, out: Mask) -> Mask:
    """Rows over a second long, and 20 times as long as all starts are apart, that nothing else in the file bears out:
    a kernel that really ran so long was waited for by a host row of that length, a call is inside another."""
    good = ~out
    if good.sum() < 3:
        return np.zeros(len(out), bool)
    starts = rows.ts[good]
    span = int(starts.max()) - int(starts.min())
    long = good & (rows.dur > max(1_000_000_000, _TIMES_TYPICAL * span)) & (rows.kind != Kind.PROFILER)
    if not long.any():
        return long
    end = np.where(good, rows.ts + rows.dur, np.iinfo(np.int64).min)
    by_host = int(end[~work].max(initial=np.iinfo(np.int64).min))
    last = int(end.argmax())
    second = int(np.delete(end, last).max())
    witness = np.where(work, by_host, np.where(np.arange(len(end)) == last, second, end[last]))
    return long & (witness < rows.ts + rows.dur // 10 * 9)


def _overrun(rows: Rows, work: Mask, out: Mask) -> Mask:
    """Device rows that still run when work behind them on their own stream has begun and ended.

    A stream runs in order. Programmatic dependent launch lets the next kernel begin early, and branches of a graph
    share a stream's number, so overlap alone is legitimate; swallowing a follower *and* being far longer than the
    same kernel ever else is (or, for a kernel seen once, than the stream's work usually is) is a broken end time.
    """
    hit = np.zeros(len(out), bool)
    index = np.flatnonzero(work & ~out)
    if len(index) < 3:
        return hit
    order = index[np.lexsort((rows.dur[index], rows.ts[index], rows.stream[index], rows.device[index]))]
    ts, end = rows.ts[order], rows.ts[order] + rows.dur[order]
    same = (rows.stream[order][1:] == rows.stream[order][:-1]) & (rows.device[order][1:] == rows.device[order][:-1])
    for k in np.flatnonzero(same & (end[:-1] > end[1:])).tolist():
        row = order[k]
        late = int(end[k] - ts[k + 1])
        alike = index[(rows.name[index] == rows.name[row]) & (index != row)]
        if len(alike) >= 2:
            usual = max(int(np.median(rows.dur[alike])), 1)
            hit[row] = rows.dur[row] > _TIMES_ALIKE * usual and late > 2 * usual
        else:
            others = index[(rows.stream[index] == rows.stream[row]) & (index != row)]
            usual = max(int(np.median(rows.dur[others])), 1) if len(others) else 1
            hit[row] = rows.dur[row] > _TIMES_TYPICAL * usual and late > _LONG_NS
    return hit
