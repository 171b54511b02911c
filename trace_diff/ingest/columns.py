"""Batches of events to numpy columns: names interned, times exact, devices and streams made uniform.

Not for: text (split), judging the values (quarantine), ranks (load).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trace_diff.ingest.decode import Args, Event
from trace_diff.ingest.numbers import to_ns

Ints = npt.NDArray[np.int64]
_NO_ARGS = Args()
ORDINAL_BITS = 24  # args_at = block << ORDINAL_BITS | ordinal of the event in its block's text
_columns = msgspec.structs.astuple
_args_columns = attrgetter("correlation", "external", "external_old", "stream", "device")


class Interner(dict[Any, int]):
    """Numbers for values, in order of first sight."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number

    def of(self, values: Iterable[Any]) -> npt.NDArray[np.int32]:
        """Numbers of many values; values that cannot be keys (lists) count by their text."""
        values = list(values)
        try:
            return np.array(list(map(self.__getitem__, values)), np.int32)
        except TypeError:
            return np.array([self[v if isinstance(v, (str, int)) else str(v)] for v in values], np.int32)


class Big(dict[Any, int]):
    """Identifiers that fit no column (over 64 bits, text): each gets a negative number below -1 of its own."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = -2 - len(self)
        return number


def whole(values: list[Any], big: Big) -> Ints:
    """Identifiers as int64; None and nonsense become -1."""
    try:
        return np.array(values, np.int64) if values else np.zeros(0, np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_whole(v, big) for v in values], np.int64)


def _whole(value: Any, big: Big) -> int:
    if isinstance(value, str):
        text = value.strip()
        if not text.lstrip("-").isdigit():
            return -1 if not text else big[text]
        value = int(text)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        return -1
    return value if -(1 << 63) <= value < 1 << 63 else big[value]


class Columns:
    """Grows with `add`; holds one array per column and batch until `build` joins them."""

    def __init__(self) -> None:
        self.names = Interner()
        self.cats = Interner()
        self.pids = Interner()
        self.tids = Interner()
        self.big = Big()
        self.parts: dict[str, list[npt.NDArray[Any]]] = {}
        self.flows = 0
        self.meta_events: list[tuple[Event, int]] = []  # with the place of their text
        self.phases: dict[str, int] = {}
        self._blocks = 0

    def add(self, events: list[Event]) -> None:
        """Take the complete events of one batch; count flows and keep process names on the way."""
        block = self._blocks
        self._blocks += 1
        if not events:
            return
        phases, cats, names, pids, tids, ts, dur, _ids, args = zip(*map(_columns, events), strict=True)
        is_complete = np.array([p == "X" for p in phases])
        keep = np.flatnonzero(is_complete)
        if len(keep) < len(events):
            self._others(events, phases, np.flatnonzero(~is_complete))
            chosen = keep.tolist()
            cats, names, pids, tids, ts, dur, args = (
                [column[i] for i in chosen] for column in (cats, names, pids, tids, ts, dur, args)
            )
        if len(keep) == 0:
            return
        ts_ns, bad_ts = to_ns(ts)
        dur_ns, bad_dur = to_ns(dur)
        bad = np.zeros(len(keep), np.int8)
        if bad_ts is not None:
            bad[bad_ts] = 1
        if bad_dur is not None:
            bad[bad_dur & (bad == 0)] = 2
        correlation, external, old, stream, device = zip(
            *map(_args_columns, [a or _NO_ARGS for a in args]), strict=True
        )
        self._put("ts", ts_ns)
        self._put("dur", dur_ns)
        self._put("bad", bad)
        self._put("cat", self.cats.of(cats))
        self._put("name", self.names.of(names))
        self._put("pid", self.pids.of(pids))
        self._put("tid", self.tids.of(tids))
        self._put("correlation", whole(list(correlation), self.big))
        ext, ext_old = whole(list(external), self.big), whole(list(old), self.big)
        self._put("external", np.where(ext == -1, ext_old, ext))
        self._put("stream", whole(list(stream), self.big))
        self._put("device", whole(list(device), self.big))
        self._put("at", (block << ORDINAL_BITS) | keep)

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        self.parts.setdefault(name, []).append(values)

    def _others(self, events: list[Event], phases: tuple[Any, ...], rows: npt.NDArray[np.int64]) -> None:
        for i in rows.tolist():
            phase = phases[i]
            if phase in ("s", "f", "t"):
                self.flows += 1
            elif phase == "M":
                self.meta_events.append((events[i], (self._blocks - 1) << ORDINAL_BITS | i))
            else:
                key = str(phase)
                self.phases[key] = self.phases.get(key, 0) + 1

    def column(self, name: str, dtype: Any = np.int64) -> npt.NDArray[Any]:
        """One whole column; its parts are given up."""
        parts = self.parts.pop(name, [])
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

