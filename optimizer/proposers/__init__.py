"""Where patches come from: playbook (default, offline), claude, mcp (external agents), replay.

`get` is the only door; each proposer is imported when it is asked for, so the offline path never loads an
SDK. Not for: judging, timing or applying patches.
"""

from __future__ import annotations

from typing import Any

from .base import Budget, Declined, ProposeContext, Proposer, Refusal

NAMES = ("playbook", "claude", "mcp", "replay")

__all__ = ["NAMES", "Budget", "Declined", "ProposeContext", "Proposer", "Refusal", "get"]


def get(name: str, **options: Any) -> Proposer:
    """The proposer called `name`. Raises ValueError for an unknown name, naming the known ones."""
    if name == "playbook":
        from .playbook import Playbook

        return Playbook(**options)
    if name == "replay":
        from .replay import Replay

        return Replay(**options)
    if name == "claude":
        from .claude import Claude

        return Claude(**options)
    if name == "mcp":
        from .external import External

        return External(**options)
    raise ValueError(f"unknown agent {name!r}; known: {', '.join(NAMES)}")
