"""Whether two cells may be compared in time: model, device class, TP, phase, batch and context must agree.

A known difference makes a trace context. A value that is unknown on one side is taken as equal, and said so,
unless the known side makes that unlikely (a batch above one). Not for: the comparison itself (compare).
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_diff.analysis import Cell
from trace_diff.types import Phase

_SHORT = 512  # tokens: below it the cache is a small part of what a step reads
_LONGER = 1.25
_WORDS = {"layers": "model layers", "hidden": "hidden size", "tp": "TP", "device": "device class"}


@dataclass(frozen=True, slots=True)
class Comparability:
    """`reasons` empty: comparable. `assumed` names what was taken as equal without being known on both sides."""

    reasons: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons


def compare_cells(base: Cell, other: Cell) -> Comparability:
    """Judge `other` against `base`."""
    reasons: list[str] = []
    assumed: list[str] = []
    for name in ("device", "tp", "layers", "hidden", "batch", "tokens"):
        a, b = getattr(base, name), getattr(other, name)
        word = _WORDS.get(name, name)
        if a is None or b is None:
            known = a if b is None else b
            if name in ("batch", "tokens") and known not in (None, 1):
                reasons.append(f"{word}: {_text(a)} here, {_text(b)} there")
            elif (a is None) != (b is None):
                assumed.append(word)
        elif a != b:
            if name == "tokens" and base.batch != other.batch:
                continue  # said once, as batch
            reasons.append(f"{word}: {a} here, {b} there")
    longer, near = _context(base, other)
    reasons += _phase(base, other) + _products(base, other) + longer
    assumed += near
    return Comparability(tuple(reasons), tuple(assumed))


def _phase(base: Cell, other: Cell) -> list[str]:
    if Phase.UNKNOWN in (base.phase, other.phase) or base.phase == other.phase:
        return []
    return [f"phase: {base.phase} here, {other.phase} there"]


def _products(base: Cell, other: Cell) -> list[str]:
    """Equal models have equal weight elements per layer, however their products are merged."""
    if not base.products or not other.products:
        return []
    a = sum(k * n for k, n in base.products)
    b = sum(k * n for k, n in other.products)
    return [] if a == b else [f"weights of one layer: {a} elements here, {b} there"]


def _context(base: Cell, other: Cell) -> tuple[list[str], list[str]]:
    """(reasons, assumed): attention reads the whole cache, so clearly longer contexts are other work. Small differences,
    and a long context beside an unknown one, are named."""
    a, b = base.context, other.context
    if a is None or b is None:
        return [], ["context"] if (a or b or 0) >= _SHORT else []
    if max(a, b) < _SHORT or a == b:
        return [], []
    said = f"{a} tokens here, {b} there"
    if max(a, b) > _LONGER * min(a, b):
        return [f"context: {said}"], []
    return [], [f"context ({said})"]


def _text(value: object) -> str:
    return "not known" if value is None else str(value)
