"""Decimal text of microseconds to exact integer nanoseconds, and ids of processes and threads to one form.

No float is ever made. Not for: other columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LIMIT = 1 << 61  # of nanoseconds (73 years): beyond it a time is not a time, and sums of times stay within 64 bits
_LONGEST = 20  # characters that surely fit 64 bits, or are seen not to
_NUMBER = re.compile(rb"-?[0-9]{1,15}(?:\.[0-9]{0,18})?")
_POWERS = 10 ** np.arange(19, dtype=np.int64)
Ints = npt.NDArray[np.int64]


class Times(NamedTuple):
    """Nanoseconds; which texts were no time (None: all were); how many were written as strings."""

    values: Ints
    bad: npt.NDArray[np.bool_] | None
    quoted: int


def to_ns(texts: Sequence[bytes]) -> Times:
    """Nanoseconds of each text ("12.345", "\"12.5\"", "1e3"), rounded half up below one nanosecond.

    A text that is no time (null, NaN, absent, too large) gives 0 and is marked bad. `texts` may be anything with the
    buffer protocol.
    """
    joined = b",".join(texts)
    quoted = joined.count(b'"') // 2
    plain = joined.replace(b'"', b"") if quoted else joined
    if plain.translate(None, b"0123456789.,") == b"":
        values = _plain(plain, len(texts))
        if values is not None:
            return Times(values, None, quoted)
    values, bad = _one_by_one(texts)
    return Times(values, bad, quoted)


def _plain(joined: bytes, count: int) -> Ints | None:
    """The vectorised way; None where the text has a form that it does not know."""
    if count == 0:
        return np.zeros(0, np.int64)
    codes = np.frombuffer(joined, np.uint8)
    commas = np.flatnonzero(codes == 44)
    if len(commas) != count - 1:
        return None
    ends = np.append(commas, len(codes))
    lengths = np.diff(ends, prepend=-1) - 1
    points = joined.count(b".")
    if lengths.min() == 0 or lengths.max() > _LONGEST:
        return None
    if points == count and lengths.min() > 4 and (codes[ends - 4] == 46).all():  # the profiler's own form: 123.456
        digits = np.fromstring(joined.replace(b".", b""), np.int64, sep=",")
        return digits if digits.max() < LIMIT else None
    dots = np.flatnonzero(codes == 46)
    owner = np.searchsorted(ends, dots)
    if len(dots) > 1 and (np.diff(owner) == 0).any():
        return None
    digits = np.fromstring(joined.replace(b".", b"") if points else joined, np.int64, sep=",")
    fraction = np.zeros(count, np.int64)
    fraction[owner] = ends[owner] - dots - 1
    if len(digits) != count or fraction.max() > 18:
        return None
    up, down = _POWERS[np.maximum(3 - fraction, 0)], _POWERS[np.maximum(fraction - 3, 0)]
    if (digits >= LIMIT // up).any():
        return None
    return np.where(fraction > 3, (digits + down // 2) // down, digits * up)


def _one_by_one(texts: Sequence[bytes]) -> tuple[Ints, npt.NDArray[np.bool_] | None]:
    """Any text that Decimal can read, with or without quotes; the rest is marked bad."""
    values = np.zeros(len(texts), np.int64)
    bad = np.zeros(len(texts), bool)
    for i, raw in enumerate(texts):
        text = bytes(raw).strip(b'" \t\r\n')
        value = _one(text)
        if value is None:
            bad[i] = True
        else:
            values[i] = value
    return values, bad if bad.any() else None


def _one(text: bytes) -> int | None:
    if _NUMBER.fullmatch(text):
        whole, _, part = text.partition(b".")
        if len(part) <= 3:
            value = int(whole + part.ljust(3, b"0"))
            return value if abs(value) < LIMIT else None
    try:
        value = Decimal(text.decode("ascii"))
        if not value.is_finite() or value.adjusted() > 17:
            return None
        result = int((value * 1000).to_integral_value(rounding=ROUND_HALF_UP))
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return None
    return result if abs(result) < LIMIT else None


def plain_id(value: object) -> int | str:
    """A pid or tid as int where it is one, whatever way it was written."""
    if isinstance(value, bool) or value is None:
        return -1
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text
