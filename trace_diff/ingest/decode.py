"""The typed shape of one trace event, and its decoder. Not for: damaged text (repair), columns (columns)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct, field

# What decoding raises for text that is not well formed, nested deeper than any profiler writes, or not UTF-8.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Args(Struct, gc=False):
    """The few arguments that become columns; all others stay in the text."""

    correlation: Any = -1
    external: Any = field(name="External id", default=-1)
    external_old: Any = field(name="external id", default=-1)
    stream: Any = -1
    device: Any = -1
    collective: Any = field(name="Collective name", default=None)
    group: Any = field(name="Process Group Name", default=None)
    seq: Any = field(name="Seq", default=None)
    size: Any = field(name="Group size", default=None)


class Event(Struct, gc=False):
    """One trace event. Types are loose where writers disagree; ts and dur stay text (see numbers)."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")
    id: Any = None
    args: Args | None = None


class Flow(Struct, gc=False):
    """One event as far as flow arrows need it."""

    ph: Any = None
    cat: Any = None
    pid: Any = None
    tid: Any = None
    ts: Raw = Raw(b"")
    id: Any = None


_events = msgspec.json.Decoder(list[Event])
_flows = msgspec.json.Decoder(list[Flow])
_event = msgspec.json.Decoder(Event)


def decode_events(text: bytes | memoryview) -> list[Event]:
    """Events of `text`, the inside of an array. Raises UNREADABLE unless all of it is well formed."""
    whole = b"".join((b"[", text, b"]"))
    events = _events.decode(whole)
    if not whole.isascii():
        whole.decode()  # skipped fields are not checked by the decoder; UnicodeDecodeError is a ValueError
    return events


def decode_flows(text: bytes) -> list[Flow]:
    """Flow arrows (and all else, as far as Flow goes) of `text`, which has been decoded before; `args` are not looked
    at, so that one which is no object does no harm."""
    return _flows.decode(b"[" + text + b"]")


def decode_event(text: bytes) -> Event:
    """One event; loose about the types of its fields. Raises UNREADABLE."""
    if not text.isascii():
        text.decode()
    try:
        return _event.decode(text)
    except msgspec.ValidationError:
        return _loosely(text)


def _loosely(text: bytes) -> Event:
    """An event whose `args` is no object, or that is no object itself."""
    value = msgspec.json.decode(text)
    if not isinstance(value, dict):
        return Event()
    value["args"] = None
    return _event.decode(msgspec.json.encode(value))
