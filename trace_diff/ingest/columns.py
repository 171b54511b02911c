"""Batches of events to numpy columns: names interned, times exact, devices and streams made uniform.

Not for: text (split), judging the values (quarantine), ranks (load).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_diff.ingest.decode import Args, Event
from trace_diff.ingest.notes import NoteBook
from trace_diff.ingest.numbers import to_ns
from trace_diff.ingest.paired import pair
from trace_diff.ingest.schema import DEVICE_KINDS, kind_of
from trace_diff.types import Kind

Ints = npt.NDArray[np.int64]
_NO_ARGS = Args()
_KNOWN = ("X", "s", "f", "t")
_HALVES = ("B", "E", "b", "e")
_NO_DURATION = {
    "i": "instant", "I": "instant (old form)", "R": "mark", "C": "counter", "P": "sample", "async": "asynchronous",
    "n": "asynchronous instant", "N": "object", "O": "object", "D": "object", "c": "clock", "None": "without a phase",
}  # fmt: skip
_OF_EVERY_FILE = 2  # instants: Kineto marks the iteration's start and the end of the recording
ORDINAL_BITS = 24  # args_at = block << ORDINAL_BITS | ordinal of the event in its block's text
_CORRELATED = np.ones(256, bool)  # operators and annotations have an external id only
_CORRELATED[[Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON]] = False
_ON_DEVICE = np.zeros(256, bool)
_ON_DEVICE[list(DEVICE_KINDS)] = True


class Interner(dict[Any, int]):
    """Numbers for values, in order of first sight."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number

    def of(self, values: list[Any]) -> npt.NDArray[np.int32]:
        """Numbers of many values; values that cannot be keys (lists) count by their text."""
        try:
            return np.fromiter(map(self.__getitem__, values), np.int32, len(values))
        except TypeError:
            return np.array([self[v if isinstance(v, (str, int)) else str(v)] for v in values], np.int32)

    def of_few(self, values: list[Any]) -> npt.NDArray[np.int32]:
        """The same, faster where all values are one, as the thread ids of a stretch of a file mostly are."""
        if values.count(values[0]) == len(values) and isinstance(values[0], (int, str)):
            return np.full(len(values), self[values[0]], np.int32)
        return self.of(values)


class Big(dict[Any, int]):
    """Identifiers that fit no column (over 64 bits, text): each gets a negative number below -1 of its own."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = -2 - len(self)
        return number


def whole(values: list[Any], big: Big) -> Ints:
    """Identifiers as int64; None and nonsense become -1."""
    try:
        found: Ints = np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):  # text, numbers over 64 bits
        found = np.zeros((), np.int64)
    if found.ndim != 1:  # and lists
        return np.array([_whole(v, big) for v in values], np.int64)
    return found


def _whole(value: Any, big: Big) -> int:
    if isinstance(value, str):
        text = value.strip()
        if not (text.isascii() and text.lstrip("-").isdigit()):
            return -1 if not text else big[text]
        value = int(text)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        return -1
    return value if -(1 << 63) <= value < 1 << 63 else big[value]


class CollectiveArgs(NamedTuple):
    """What identifies a collective across ranks, as the framework wrote it; None where it did not."""

    operation: Any
    group: Any
    seq: Any
    size: Any


class Columns:
    """Grows with `add`; holds one array per column and batch until `column` joins them."""

    def __init__(self) -> None:
        self.names = Interner()
        self.cats = Interner()
        self.pids = Interner()
        self.tids = Interner()
        self.big = Big()
        self.parts: dict[str, list[npt.NDArray[Any]]] = {}
        self.flows = 0
        self.quoted = 0  # events with times written as strings
        self.meta_events: list[tuple[Event, int]] = []  # with the place of their text
        self.collectives: dict[int, CollectiveArgs] = {}  # by the place of their text
        self.halves: list[tuple[Event, int]] = []  # begins and ends, until `close` pairs them
        self.phases: dict[str, int] = {}  # events that are neither durations nor flows nor names
        self._kinds = np.zeros(0, np.int8)
        self._blocks = 0

    def add(self, events: list[Event]) -> None:
        """Take the complete events of one batch; count flows and keep process names on the way."""
        block = self._blocks << ORDINAL_BITS
        self._blocks += 1
        phases = [e.ph for e in events]
        complete = phases.count("X")
        if complete == len(events):
            rows, ordinals = events, np.arange(len(events))
        else:
            chosen = [i for i, phase in enumerate(phases) if phase == "X"]
            rows, ordinals = [events[i] for i in chosen], np.array(chosen, np.int64)
            self._others(events, phases, complete, block)
        if rows:
            self._complete(rows, ordinals | block)

    def close(self, notes: NoteBook) -> None:
        """Complete what was written as begin and end, and say which events are no durations."""
        if self.halves:
            found = pair(self.halves)
            if found.rows:
                self._complete(found.rows, np.array(found.at, np.int64))
                notes.say(f"{len(found.rows)} events were written as begin and end")
            if found.alone:
                notes.say(f"{found.alone} begin or end events without their other half were left out")
            if found.foreign:
                self.phases["async"] = found.foreign
            self.halves = []
        if self.phases != {"i": self.phases.get("i")} or self.phases["i"] > _OF_EVERY_FILE:
            counts = ", ".join(f"{n} {_NO_DURATION.get(k, k)}" for k, n in sorted(self.phases.items()))
            if counts:
                notes.say(f"events that are no durations, not counted: {counts}")

    def _complete(self, rows: list[Event], at: Ints) -> None:
        n = len(rows)
        times = to_ns([e.ts for e in rows] + [e.dur for e in rows])
        if times.quoted:
            self.quoted += sum(b'"' in bytes(e.ts) or b'"' in bytes(e.dur) for e in rows)
        bad = np.zeros(n, np.int8)
        if times.bad is not None:
            bad[times.bad[n:]] = 2
            bad[times.bad[:n]] = 1
        ts_ns, dur_ns = times.values[:n], times.values[n:]
        kind = self._kind(self.cats.of([e.cat for e in rows]))
        self._put("ts", ts_ns)
        self._put("dur", dur_ns)
        self._put("bad", bad)
        self._put("kind", kind)
        self._put("name", self.names.of([e.name for e in rows]))
        self._put("pid", self.pids.of_few([e.pid for e in rows]))
        self._put("tid", self.tids.of_few([e.tid for e in rows]))
        self._put("at", at)
        self._arguments(rows, kind, at)

    def _kind(self, cat: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
        if len(self._kinds) < len(self.cats):
            self._kinds = np.array([int(kind_of(c)) for c in self.cats], np.int8)
        return self._kinds[cat]

    def _arguments(self, rows: list[Event], kind: npt.NDArray[np.int8], at: Ints) -> None:
        """Identifiers, only from the rows that have them: Python frames have none, host rows no stream."""
        tied = np.flatnonzero(kind != Kind.PYTHON)
        args = [rows[i].args or _NO_ARGS for i in tied.tolist()]
        correlation = np.full(len(rows), -1, np.int64)
        external = np.full(len(rows), -1, np.int64)
        calls = np.flatnonzero(_CORRELATED[kind[tied]])
        correlation[tied[calls]] = whole([args[i].correlation for i in calls.tolist()], self.big)
        found = whole([a.external for a in args], self.big)
        old = np.flatnonzero(found == -1)
        found[old] = whole([args[i].external_old for i in old.tolist()], self.big)
        external[tied] = found
        placed = np.flatnonzero(_ON_DEVICE[kind])
        args = [rows[i].args or _NO_ARGS for i in placed.tolist()]
        stream = np.full(len(rows), -1, np.int64)
        device = np.full(len(rows), -1, np.int64)
        stream[placed] = whole([a.stream for a in args], self.big)
        device[placed] = whole([a.device for a in args], self.big)
        for i, a in zip(placed.tolist(), args, strict=True):
            if a.collective is not None or a.seq is not None:
                self.collectives[int(at[i])] = CollectiveArgs(a.collective, a.group, a.seq, a.size)
        self._put("correlation", correlation)
        self._put("external", external)
        self._put("stream", stream)
        self._put("device", device)

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        self.parts.setdefault(name, []).append(values)

    def _others(self, events: list[Event], phases: list[Any], complete: int, block: int) -> None:
        """Everything but complete events."""
        flows = phases.count("s") + phases.count("f") + phases.count("t")
        self.flows += flows
        if complete + flows == len(events):
            return
        for i, phase in enumerate(phases):
            if phase == "M":
                self.meta_events.append((events[i], block | i))
            elif phase in _HALVES:
                self.halves.append((events[i], block | i))
            elif phase not in _KNOWN:
                named = str(phase)[:20]
                self.phases[named] = self.phases.get(named, 0) + 1

    def column(self, name: str, dtype: Any = np.int64) -> npt.NDArray[Any]:
        """One whole column; its parts are given up."""
        parts = self.parts.pop(name, [])
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

