"""Tables as plain values, and how their numbers are written. Not for: what stands in them, or drawing them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of one engine: `text`, a smaller `sub`, and its share of the engine's wall."""

    text: str
    sub: str = ""
    share: float | None = None
    best: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    cells: tuple[Cell, ...]
    colour: str = ""
    role: str = ""  # "sum", "group" or ""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    note: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    first: str = ""  # head of the first column


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def count(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"
