"""Words and numbers as every report prints them: microseconds, clipped names. Imports nothing heavy."""

from __future__ import annotations

import re


def three(value: float) -> str:
    """Three significant digits, trailing zeros kept: 1.00, 13.0, 958."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def micro(value: float) -> str:
    """Microseconds with a unit that suits: 8.20 us, 1.35 ms, 2.50 s."""
    size = abs(value)
    if size >= 999_500:
        return f"{three(value / 1_000_000)} s"
    if size >= 999.5:
        return f"{three(value / 1000)} ms"
    return f"{three(value)} us" if size >= 0.005 else "0 us"


def tick(value: float) -> str:
    """A round number of microseconds on an axis: 15 ms, not 15.0 ms."""
    size = abs(value)
    if size >= 1_000_000:
        return f"{value / 1_000_000:g} s"
    return f"{value / 1000:g} ms" if size >= 1000 else f"{value:g} us"


def short(text: str, limit: int) -> str:
    """One line of at most `limit` characters without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * limit]).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def clip(text: object, limit: int) -> str:
    """At most `limit` characters, control characters made harmless, with what was left out counted."""
    raw = str(text)
    line = "".join(c if c.isprintable() or c == "\n" else " " for c in raw[:limit])
    return line if len(raw) <= limit else f"{line} … ({len(raw) - limit:,} more characters)"


def wrap(text: str, width: int, lines: int = 2) -> str:
    """At most `lines` lines of about `width`, broken at hyphens and spaces: for tick labels."""
    out: list[str] = []
    line = ""
    for word in re.split(r"(?<=[-\s_+])", short(text, width * lines)):
        if line and len(line) + len(word) > width:
            out.append(line.rstrip())
            line = ""
        line += word
    return "\n".join([*out, line][:lines])
