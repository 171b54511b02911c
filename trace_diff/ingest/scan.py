"""Where the elements of a JSON array of objects begin and end: an exact, vectorised tokenizer.

Exact for well-formed text, strings and escapes included. Not for: damaged text (repair), values (decode).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STEP = np.zeros(256, np.int8)
_STEP[[ord("{"), ord("[")]] = 1
_STEP[[ord("}"), ord("]")]] = -1
_MARK = _STEP != 0
_MARK[ord('"')] = True


class Spans(NamedTuple):
    """Offsets of the objects at depth one, and where the enclosing array closes (-1: not in this text)."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    array_end: int


def spans(text: bytes) -> Spans:
    """Objects of `text`, which starts between two elements of an array."""
    if b"\\" in text:
        text = _ESCAPE.sub(b"__", text)
    codes = np.frombuffer(text, np.uint8)
    at = np.flatnonzero(_MARK[codes])
    mark = codes[at]
    quote = mark == 34
    outside = (np.cumsum(quote) & 1 == 0) & ~quote
    at, step = at[outside], _STEP[mark[outside]]
    depth = np.cumsum(step, dtype=np.int64)
    closed = np.flatnonzero(depth < 0)
    array_end = -1
    if len(closed):
        array_end = int(at[closed[0]])
        at, step, depth = at[: closed[0]], step[: closed[0]], depth[: closed[0]]
    starts = at[(step == 1) & (depth == 1)]
    ends = at[(step == -1) & (depth == 0)] + 1
    return Spans(starts, ends, array_end)


_SPACE = b" \t\r\n"


def last_boundary(text: bytes, tries: int = 64) -> tuple[int, int]:
    """A likely place between two elements near the end of `text`: (end of one, start of the next), else (-1, -1).

    Only a guess: it may lie inside a string or an argument. Whoever uses it checks that the text before it
    parses, which is a proof, because a prefix that ends anywhere else is not valid JSON.
    """
    stop = len(text)
    for _ in range(tries):
        start = text.rfind(b"{", 0, stop)
        if start < 0:
            break
        stop = start
        comma = start - 1
        while comma >= 0 and text[comma] in _SPACE:
            comma -= 1
        if comma < 0 or text[comma] != 44:
            continue
        brace = comma - 1
        while brace >= 0 and text[brace] in _SPACE:
            brace -= 1
        if brace >= 0 and text[brace] == 125:
            return brace + 1, start
    return -1, -1
