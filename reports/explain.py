"""`trace-diff explain`: what each finding rule looks for, from its own docstring. Not for: its answer (the rule's)."""

from __future__ import annotations


def _table() -> dict[str, str]:
    """Rule name -> what it looks for, its bound and skills; in the order in which rules run."""
    from trace_diff import findings

    return {m.RULE: findings.explain(m.RULE) for m in findings.RULES}


def rules() -> list[tuple[str, str]]:
    """(name, first line) of every rule."""
    return [(name, text.split("\n")[0]) for name, text in _table().items()]


def rule(name: str) -> str | None:
    """The whole explanation of one rule (or of a finding's id, `rule:detail`), or None when there is no such rule."""
    name = name.split(":")[0].replace("_", "-")
    text = _table().get(name)
    return None if text is None else f"{name}\n\n{text}"
