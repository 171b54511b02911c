"""Damaged JSON text of events to events, as far as it can be read, with a count of what was mended and lost.

The damage that writers really produce: unescaped backslashes and quotes, raw control characters, bytes that are
not UTF-8, NaN and inf, values left out, stray commas, a cut in the middle. Not for: well-formed text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

from trace_diff.ingest.decode import UNREADABLE, Event, decode_event, decode_events
from trace_diff.ingest.mend import Unmendable, escape_backslashes, mend

_KEYS = rb"ph|cat|name|pid|tid|ts|dur|args|id|bp|s|cname|tts|tdur|sf"
_START = re.compile(rb'[,\[}]\s*(\{)\s*"(?:' + _KEYS + rb')"\s*:')
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_ARRAY_END = re.compile(rb'\}\s*,?\s*(\])\s*(?:,\s*"[^"\\]+"\s*:|\}\s*$|$)')
_GROUP = 64
_FAR = 1 << 23  # bytes: an event that is not complete within them is damaged


@dataclass(slots=True)
class Salvage:
    """What came out of a damaged stretch of the array."""

    events: list[Event] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)  # well-formed text of each event
    repaired: int = 0
    lost: int = 0
    used: int = 0  # bytes of the stretch that are dealt with
    array_end: int = -1  # offset of the array's closing bracket
    cut: bool = False  # the last event is incomplete


def salvage(text: bytes, final: bool) -> Salvage:
    """Read the events of `text`, which starts between two elements. Unless `final`, the last one waits for more."""
    out = Salvage()
    first = text.find(b"{")
    closing = text.find(b"]")
    if first < 0 or (0 <= closing < first and text[:closing].strip(b" \t\r\n,") == b""):
        out.array_end = closing
        out.used = len(text) if first < 0 and closing < 0 else max(closing, 0)
        return out
    starts = [first] + [m.start(1) for m in _START.finditer(text, first + 1)]
    limit = len(starts) if final else len(starts) - 1
    bounds = [*starts, len(text)]
    i = 0
    while i < limit:
        j = min(i + _GROUP, limit)
        if not _group(text[bounds[i] : bounds[j]], out):
            while i < j and out.array_end < 0 and not out.cut:
                following = _segment(text, bounds, i, final, out)
                if following == i:  # its end is not here yet
                    out.used = bounds[i]
                    return out
                i = following
            if out.array_end >= 0 or out.cut:
                return out
        i = max(i, j)
        out.used = bounds[i]
    return out


def _group(text: bytes, out: Salvage) -> bool:
    """A whole group at once: between two faults, the text is as good as any. Unescaped backslashes, of which a trace
    may have one in every event, are mended here."""
    text = text.rstrip(b" \t\r\n,")
    for mended, count in ((text, 0), escape_backslashes(text)):
        if mended is not None:
            try:
                events = decode_events(mended)
            except UNREADABLE:
                continue
            out.events.extend(events)
            out.texts.append(mended)
            out.repaired += count
            return True
    return False


def _segment(text: bytes, bounds: list[int], i: int, final: bool, out: Salvage) -> int:
    """Read the element that starts at bounds[i]; return the index of the next one, or i where more text is needed."""
    base, reach = bounds[i], 1
    while True:
        stop = bounds[min(i + reach, len(bounds) - 1)]
        end, problem = _try(text[base:stop].rstrip(b" \t\r\n,"), base, out)
        if problem is None:
            return bisect_left(bounds, base + end, i + 1)
        if "truncated" not in problem or stop - base > _FAR:
            break
        if stop == len(text):
            if not final:
                return i
            if _mend(text, base, stop, out) < 0:
                out.lost += 1
                out.cut = True
            return len(bounds) - 1
        reach *= 2  # starts were guessed inside a string or an argument: the event is longer
    for limit in (i + 1, i + _GROUP):
        end = _mend(text, base, bounds[min(limit, len(bounds) - 1)], out)
        if end >= 0:
            return bisect_left(bounds, base + end, i + 1)
    _give_up(text[base : bounds[i + 1]], base, final and i + 2 == len(bounds), out)
    return i + 1


def _mend(text: bytes, base: int, stop: int, out: Salvage) -> int:
    """Read the element at `base` with the tolerant scanner; its length, or -1 where that fails too."""
    segment = text[base:stop].rstrip(b" \t\r\n,")
    try:
        mended, end, count = mend(segment)
        event = decode_event(mended)
    except (Unmendable, *UNREADABLE):
        return -1
    _keep(event, mended, out)
    out.repaired += count
    _after(segment, end, base, out)
    return end


def _try(segment: bytes, base: int, out: Salvage) -> tuple[int, str | None]:
    """Strict reading: (length of the event, None) when it was kept, else (0, the decoder's complaint)."""
    try:
        event, end = _first(segment)
    except UNREADABLE as error:
        return 0, str(error)
    _keep(event, segment[:end], out)
    if end < len(segment):
        _after(segment, end, base, out)
    return end, None


def _first(segment: bytes) -> tuple[Event, int]:
    """The event at the start of `segment`, and where it ends."""
    try:
        return decode_event(segment), len(segment)
    except msgspec.DecodeError as error:
        trailing = _TRAILING.search(str(error))
        if trailing is None:
            raise
        end = segment.rfind(b"}", 0, int(trailing.group(1)) - 1) + 1  # the decoder counts the byte itself
        return decode_event(segment[:end]), end


def _keep(event: Event, text: bytes, out: Salvage) -> None:
    out.events.append(event)
    out.texts.append(text)


def _after(segment: bytes, end: int, base: int, out: Salvage) -> None:
    """What follows the event in its segment: the array's end, or nothing that matters."""
    rest = segment[end:].lstrip(b" \t\r\n,")
    if rest.startswith(b"]"):
        out.array_end = base + len(segment) - len(rest)


def _give_up(segment: bytes, base: int, is_last: bool, out: Salvage) -> None:
    """An event that cannot be read: cut off at the end of the file, or lost."""
    out.lost += 1
    ends = _ARRAY_END.search(segment)
    if ends:
        out.array_end = base + ends.start(1)
    elif is_last:
        out.cut = True
