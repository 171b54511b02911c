"""Chunks of a trace file to batches of events: finds the event array and cuts it at element boundaries.

A cut is guessed and proved by parsing; where that fails an exact tokenizer cuts; where that fails the text is
damaged and goes to repair. Not for: columns, numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from trace_diff.ingest.decode import UNREADABLE, Event, decode_events
from trace_diff.ingest.mend import Unmendable, mend
from trace_diff.ingest.notes import NoteBook
from trace_diff.ingest.repair import salvage
from trace_diff.ingest.scan import last_boundary, spans

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*')
_SPACE = b" \t\r\n\0"
_GAP = b" \t\r\n,"
_HEAD_LIMIT = 1 << 28


class Batch(NamedTuple):
    """Some events and the well-formed text that they came from (the inside of an array).

    `offset` is where that text stands in the file's text, -1 where it was mended.
    """

    text: bytes | memoryview
    events: list[Event]
    offset: int


class Splitter:
    """Feed chunks, take batches; `meta` holds everything of the top-level object but the events, at the end."""

    def __init__(self, notes: NoteBook, fail: Callable[[int, str], Exception]) -> None:
        self.meta: dict[str, Any] = {}
        self._notes = notes
        self._fail = fail
        self._state: Callable[[bool], Iterator[Batch]] = self._head
        self._held: list[bytes] = []
        self._size = 0
        self._wanted = 0
        self._buffer = b""
        self._offset = 0  # of the buffer's first byte in the file's text
        self._is_list = False
        self._seen = 0

    def feed(self, chunk: bytes) -> Iterator[Batch]:
        """Batches that are complete with this chunk."""
        self._held.append(chunk)
        self._size += len(chunk)
        self._seen += len(chunk)
        if self._size < self._wanted:
            return
        yield from self._run(False)

    def close(self) -> Iterator[Batch]:
        """The rest, at the end of the file."""
        yield from self._run(True)
        if self._state == self._events:
            self._notes.events_cut = True
            self._notes.cut(f"the event array does not close before the end of the file at byte {self._seen}")
        elif self._state == self._tail and not self._is_list:
            self._finish_tail()

    def _run(self, final: bool) -> Iterator[Batch]:
        self._buffer = b"".join([self._buffer, *self._held])
        self._held, self._size, self._wanted = [], 0, 0
        before = None
        while before != self._state:  # a state hands over to the next one inside the same text
            before = self._state
            yield from self._state(final)
        if self._state == self._events and len(self._buffer) > 1 << 21:
            self._wanted = len(self._buffer)  # one event longer than a chunk: look again at twice the size

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._offset += count

    # -- before the array -------------------------------------------------------------------------------

    def _head(self, final: bool) -> Iterator[Batch]:
        text = self._buffer.lstrip(_SPACE)
        skipped = len(self._buffer) - len(text)
        if text.startswith(b"["):
            self._is_list = True
            self._start_events(skipped + 1)
        elif text.startswith(b"{"):
            self._drop(skipped)
            self._find_array(text, final)
        elif final and not text:
            self._notes.cut("the file is empty")
        elif text:
            raise self._fail(skipped, f"not a JSON trace: it begins with {text[:20]!r}")
        return iter(())

    def _find_array(self, text: bytes, final: bool) -> None:
        for match in _ARRAY.finditer(text):
            opening = text[match.end() : match.end() + 1]
            if not opening:
                break
            before = text[: match.start()].rstrip(_GAP) + b"}"
            meta = _object(before, self._notes)
            if meta is None:  # inside a string or a nested object
                continue
            self.meta.update(meta)
            if opening == b"[":
                self._start_events(match.end() + 1)
            else:
                self._notes.say("traceEvents is not an array")
                self._state = self._tail
                rest = text[match.end() :]
                self._buffer = b'"traceEvents":' + rest
            return
        if final:
            self._no_array(text)
        elif len(text) > _HEAD_LIMIT:
            raise self._fail(len(text), "no event array in the first 256 MB")

    def _no_array(self, text: bytes) -> None:
        meta = _object(text, self._notes)
        if meta is not None and "traceEvents" not in meta:
            raise self._fail(0, 'no "traceEvents": not a Chrome trace')
        self._notes.cut(f"the file ends at byte {self._seen}, before the first event")
        self._buffer = b""

    def _start_events(self, count: int) -> None:
        self._drop(count)
        self._state = self._events

    # -- inside the array -------------------------------------------------------------------------------

    def _events(self, final: bool) -> Iterator[Batch]:
        if not final:
            end, start = last_boundary(self._buffer)
            if end > 0:
                text = memoryview(self._buffer)[:end]  # no copy of half a megabyte
                events = _strictly(text)
                if events is not None:
                    offset = self._offset
                    self._drop(start)
                    yield Batch(text, events, offset)
                    return
        yield from self._exactly(final)

    def _exactly(self, final: bool) -> Iterator[Batch]:
        found = spans(self._buffer)
        if len(found.ends) == 0 and found.array_end < 0 and not final:
            return
        end = int(found.ends[-1]) if len(found.ends) else 0
        text = self._buffer[:end].lstrip(_GAP)
        rest = self._buffer[end : found.array_end] if found.array_end >= 0 else b""
        events = _strictly(text) if rest.strip(_SPACE) in (b"", b",") else None
        whole = found.array_end >= 0 or not final or self._buffer[end:].strip(_GAP) == b""
        if events is None or not whole:
            yield from self._salvage(final)
            return
        if rest.strip(_SPACE) == b",":
            self._notes.repaired += 1
            self._notes.say("a comma after the last event was left out")
        if events:
            yield Batch(text, events, self._offset + end - len(text))
        if found.array_end >= 0:
            self._end_events(found.array_end + 1)
        else:
            self._drop(len(self._buffer) - len(self._buffer[end:].lstrip(_GAP)))

    def _salvage(self, final: bool) -> Iterator[Batch]:
        out = salvage(self._buffer, final)
        notes = self._notes
        notes.repaired += out.repaired
        notes.lost += out.lost
        if out.repaired:
            notes.say("damaged strings or values were mended")
        if out.cut:
            notes.cut(f"the last event is cut off, at the end of the file at byte {self._seen}")
        elif out.lost:
            notes.say("events that cannot be read were left out")
        if out.events:
            yield Batch(b",".join(out.texts), out.events, -1)
        if out.array_end >= 0:
            self._end_events(out.array_end + 1)
        else:
            self._drop(len(self._buffer) if final or out.cut else out.used)

    def _end_events(self, count: int) -> None:
        self._drop(count)
        self._state = self._tail

    # -- after the array --------------------------------------------------------------------------------

    def _tail(self, final: bool) -> Iterator[Batch]:
        if self._is_list:
            if self._buffer.strip(_SPACE):
                self._notes.say("text after the event array was left out")
            self._buffer = b""
            return
        match = _ARRAY.search(self._buffer)
        if match and self._buffer[match.end() : match.end() + 1] == b"[":
            meta = _object(b"{" + self._buffer[: match.start()].strip(_GAP) + b"}", self._notes)
            if meta is not None:
                self.meta.update(meta)
                self._notes.say("the file has more than one event array; all were read")
                self._start_events(match.end() + 1)
        yield from ()

    def _finish_tail(self) -> None:
        text = b"{" + self._buffer.strip(_GAP + b"\0")
        try:
            fixed, end, count = mend(text)
            value = msgspec.json.decode(fixed)
        except (Unmendable, *UNREADABLE):
            self._notes.cut(f"the file ends at byte {self._seen}, after the events but before its own end")
            return
        self._notes.repaired += count
        value.pop("traceEvents", None)
        self.meta.update(value)
        if text[end:].strip(_SPACE):
            self._notes.say("text after the trace was left out")


def _strictly(text: bytes | memoryview) -> list[Event] | None:
    """Events, or None where the text is not well formed."""
    try:
        return decode_events(text)
    except UNREADABLE:
        return None


def _object(text: bytes, notes: NoteBook) -> dict[str, Any] | None:
    """A top-level object, mended where needed; None where it is not one complete object."""
    try:
        value = msgspec.json.decode(text)
    except UNREADABLE:
        try:
            fixed, end, count = mend(text)
            if text[end:].strip(_SPACE):
                return None
            value = msgspec.json.decode(fixed)
        except (Unmendable, *UNREADABLE):
            return None
        notes.repaired += count
    return value if isinstance(value, dict) else None
