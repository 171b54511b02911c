"""Bytes of a trace file in bounded chunks, decompressed, as far as the file is good.

Knows plain text, gzip (several members, cut, trailing garbage) and byte-order marks. Not for: JSON.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from isal import igzip_lib, isal_zlib

from trace_diff.ingest.notes import NoteBook

CHUNK = 1 << 19  # of decompressed text: objects made from one chunk stay in cache and their memory is used again
_READ = 1 << 18
_GZIP = b"\x1f\x8b"
_MARKS = (
    (codecs.BOM_UTF8, None),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

Progress = Callable[[int, int], None]  # (bytes of the file read, bytes of the file)


class TraceError(Exception):
    """A file that holds no readable trace. The text names the file and the byte."""

    def __init__(self, path: Path | str, byte: int, why: str) -> None:
        super().__init__(f"{path}: byte {byte}: {why}")
        self.path = str(path)
        self.byte = byte
        self.why = why

    def __reduce__(self):
        return type(self), (self.path, self.byte, self.why)


def chunks(path: Path, notes: NoteBook, progress: Progress | None = None) -> Iterator[bytes]:
    """Yield the UTF-8 text of `path` in chunks of about CHUNK bytes.

    Raises TraceError where the file cannot be opened. A cut or corrupt gzip stream ends the text early and
    sets `notes.truncated`.
    """
    yield from _gathered(_decoded(_plain(path, notes, progress), notes))


def _plain(path: Path, notes: NoteBook, progress: Progress | None) -> Iterator[bytes]:
    """Decompressed bytes as they come."""
    try:
        total = path.stat().st_size
        file = path.open("rb")
    except OSError as error:
        raise TraceError(path, 0, error.strerror or str(error)) from error
    done = 0
    with file:

        def read() -> bytes:
            nonlocal done
            data = file.read(_READ)
            done += len(data)
            if progress is not None and data:
                progress(done, total)
            return data

        first = read()
        if first.startswith(_GZIP):
            yield from _gunzip(path, first, read, notes)
            return
        while first:
            yield first
            first = read()


def _gunzip(path: Path, data: bytes, read: Callable[[], bytes], notes: NoteBook) -> Iterator[bytes]:
    """All members of a gzip stream. What follows the last member and is not gzip is named and left out."""
    seen = 0
    while True:
        machine = isal_zlib.decompressobj(wbits=31)
        while not machine.eof:
            if not data:
                notes.cut(f"the gzip stream ends early, after {seen} bytes of text")
                return
            try:
                text = machine.decompress(data, CHUNK)
            except igzip_lib.IsalError as error:  # pyright: ignore[reportGeneralTypeIssues]  (stub lacks its base)
                notes.cut(f"the gzip stream is damaged after about {seen} bytes of text ({error})")
                yield from _up_to_the_damage(path, seen)
                return
            seen += len(text)
            if text:
                yield text
            data = machine.unused_data if machine.eof else (machine.unconsumed_tail or read())
        data = (data or read()).lstrip(b"\0") or read()  # padding between members is allowed
        if not data:
            return
        if not (data[:2] == _GZIP or data == _GZIP[:1]):
            notes.say("bytes after the gzip stream were left out")
            return


def _up_to_the_damage(path: Path, seen: int) -> Iterator[bytes]:
    """The text after `seen` bytes that a decoder still gives when it is asked for little at a time and does not
    check sums."""
    skip = seen
    data = path.read_bytes()
    while data[:2] == _GZIP:
        data = data[_header_length(data) :]
        machine = zlib.decompressobj(wbits=-15)
        while not machine.eof and data:
            try:
                text = machine.decompress(data, 512)
            except zlib.error:
                return
            if len(text) > skip:
                yield text[skip:]
            skip = max(0, skip - len(text))
            data = machine.unused_data if machine.eof else machine.unconsumed_tail
        data = data[8:].lstrip(b"\0")  # check sum and length


def _header_length(data: bytes) -> int:
    """Bytes of a gzip member's header (RFC 1952)."""
    flags, at = data[3], 10
    if flags & 4:
        at += 2 + int.from_bytes(data[at : at + 2], "little")
    for bit in (8, 16):  # name, comment: zero-terminated
        if flags & bit:
            at = data.find(b"\0", at) + 1
    return at + (2 if flags & 2 else 0)


def _decoded(parts: Iterator[bytes], notes: NoteBook) -> Iterator[bytes]:
    """Strip a UTF-8 mark; turn UTF-16 and UTF-32 with a mark into UTF-8."""
    first = b""
    for part in parts:
        first += part
        if len(first) >= 4:
            break
    for mark, encoding in _MARKS:
        if first.startswith(mark):
            rest = first[len(mark) :]
            if encoding is None:
                yield rest
                yield from parts
                return
            notes.say(f"text was {encoding}")
            machine = codecs.getincrementaldecoder(encoding)(errors="replace")
            yield machine.decode(rest).encode()
            for part in parts:
                yield machine.decode(part).encode()
            yield machine.decode(b"", final=True).encode()
            return
    yield first
    yield from parts


def _gathered(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Parts joined to chunks of at least CHUNK bytes (the last may be shorter)."""
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= CHUNK:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)
