"""How findings are ordered and worded, the same in terminal, Markdown and HTML. Not for: finding anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from reports.text import micro

if TYPE_CHECKING:
    from trace_diff.types import Finding


def order(findings: Iterable[Finding]) -> list[Finding]:
    """Found first, dearest first; then what could not be looked at; then what is not there."""
    rank = {"found": 0, "could_not_look": 1, "not_found": 2}
    return sorted(findings, key=lambda f: (rank[str(f.status)], -(f.bound_us or 0.0)))  # else in find()'s order


def bound(f: Finding) -> str:
    """What fixing it could save at most, in words."""
    if f.bound_us is None:
        return "no bound"
    return f"at most {micro(f.bound_us)} per {f.per}" if f.bound_us >= 0.5 else "no saving of its own"


def evidence_keys(rows: Sequence[dict[str, Any]], limit: int = 6) -> list[str]:
    """Columns of an evidence table: the keys that occur, in order of appearance."""
    return list(dict.fromkeys(k for row in rows[:20] for k in row))[:limit]


def evidence_value(value: object) -> str:
    """One evidence value as text; numbers with few digits."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {evidence_value(v)}" for k, v in list(value.items())[:6])
    if isinstance(value, list | tuple):
        return ", ".join(evidence_value(v) for v in value[:8])
    return str(value)
