"""Arguments on demand: remembers where in the file events stand and reads them again when asked.

Keeping the text would double the memory of a load for something that most analyses ask of a few hundred rows only.
Not for: columns.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from trace_diff.ingest.columns import ORDINAL_BITS
from trace_diff.ingest.notes import NoteBook
from trace_diff.ingest.reader import TraceError, chunks
from trace_diff.ingest.scan import spans
from trace_diff.ingest.split import Batch

_MASK = (1 << ORDINAL_BITS) - 1
_CACHED = 64


class ArgStore:
    """Blocks of event text; `get(at)` gives the arguments of the event at (block, ordinal)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._texts: list[bytes | None] = []  # None: still in the file only
        self._places: list[tuple[int, int]] = []  # (offset, length) in the file's text
        self._spans: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()

    def add(self, batch: Batch) -> None:
        """Remember one batch; mended text is kept, because the file does not have it."""
        self._texts.append(bytes(batch.text) if batch.offset < 0 else None)
        self._places.append((batch.offset, len(batch.text)))

    def blocks(self) -> list[bytes]:
        """All text, in order of reading."""
        return [self._text(i) for i in range(len(self._texts))]

    def event(self, at: int) -> dict[str, Any]:
        """The whole event as written. Raises IndexError for a place that is none, TraceError where the file has
        changed since it was loaded."""
        block, ordinal = at >> ORDINAL_BITS, at & _MASK
        starts, ends = self._offsets(block)
        return msgspec.json.decode(self._text(block)[starts[ordinal] : ends[ordinal]])

    def get(self, at: int) -> dict[str, Any]:
        """Arguments; empty where there are none."""
        if at < 0:
            return {}
        try:
            args = self.event(at).get("args")
        except RecursionError:
            return {}
        return args if isinstance(args, dict) else {}

    def _text(self, block: int) -> bytes:
        text = self._texts[block]
        if text is None:
            self._read()
            text = self._texts[block]
        assert text is not None
        return text

    def _read(self) -> None:
        """One pass over the file for all blocks that are still in it only."""
        if _stamp(self._path) != self._stamp:
            raise TraceError(self._path, 0, "the file has changed since it was loaded")
        wanted = [(place, i) for i, place in enumerate(self._places) if self._texts[i] is None]
        wanted.sort()
        held, begin = b"", 0
        source = chunks(self._path, NoteBook())
        for (offset, length), i in wanted:
            while begin + len(held) < offset + length:
                chunk = next(source, None)
                if chunk is None:
                    raise TraceError(self._path, offset, "the text is no longer there")
                skip = min(len(held), max(0, offset - begin))
                held, begin = held[skip:] + chunk, begin + skip
            self._texts[i] = held[offset - begin : offset - begin + length]

    def _offsets(self, block: int) -> tuple[list[int], list[int]]:
        known = self._spans.get(block)
        if known is None:
            found = spans(self._text(block))
            known = (found.starts.tolist(), found.ends.tolist())
            self._spans[block] = known
            if len(self._spans) > _CACHED:
                self._spans.popitem(last=False)
        else:
            self._spans.move_to_end(block)
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Sent to another process, only what the file does not have travels."""
        texts = [t if p[0] < 0 else None for t, p in zip(self._texts, self._places, strict=True)]
        return {"_path": self._path, "_stamp": self._stamp, "_texts": texts, "_places": self._places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._spans = OrderedDict()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns
