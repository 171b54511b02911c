"""`trace-diff explain`: what each finding rule looks for, from its own docstring. Not for: its answer (the rule's)."""

from __future__ import annotations

import inspect


def _table() -> dict[str, str]:
    """Rule name -> docstring, in the order in which rules run."""
    from trace_diff import findings

    return {m.__name__.rsplit(".", 1)[-1].replace("_", "-"): inspect.getdoc(m) or "" for m in findings.RULES}


def rules() -> list[tuple[str, str]]:
    """(name, first line) of every rule."""
    return [(name, text.split("\n")[0]) for name, text in _table().items()]


def rule(name: str) -> str | None:
    """The whole explanation of one rule, or None when there is no such rule."""
    text = _table().get(name.replace("_", "-"))
    return None if text is None else f"{name}\n\n{text}"
