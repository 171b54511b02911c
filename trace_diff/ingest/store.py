"""Arguments on demand: keeps the text that events came from and decodes one event when asked. Not for: columns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from trace_diff.ingest.columns import ORDINAL_BITS
from trace_diff.ingest.scan import spans

_MASK = (1 << ORDINAL_BITS) - 1
_CACHED_BLOCKS = 16


class ArgStore:
    """Blocks of event text; `get(at)` gives the arguments of the event at (block, ordinal)."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._spans: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()

    def add(self, text: bytes) -> None:
        """Keep the text of one batch."""
        self._blocks.append(text)

    def blocks(self) -> list[bytes]:
        """All text, in order of reading."""
        return self._blocks

    def event(self, at: int) -> dict[str, Any]:
        """The whole event as written. Raises IndexError for an offset that is none."""
        block, ordinal = at >> ORDINAL_BITS, at & _MASK
        starts, ends = self._offsets(block)
        return msgspec.json.decode(self._blocks[block][starts[ordinal] : ends[ordinal]])

    def get(self, at: int) -> dict[str, Any]:
        """Arguments; empty where there are none."""
        if at < 0:
            return {}
        args = self.event(at).get("args")
        return args if isinstance(args, dict) else {}

    def _offsets(self, block: int) -> tuple[list[int], list[int]]:
        known = self._spans.get(block)
        if known is None:
            found = spans(self._blocks[block])
            known = (found.starts.tolist(), found.ends.tolist())
            self._spans[block] = known
            if len(self._spans) > _CACHED_BLOCKS:
                self._spans.popitem(last=False)
        else:
            self._spans.move_to_end(block)
        return known
