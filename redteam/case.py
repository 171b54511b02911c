"""What a red-team case is, and the tools to write one that survives refactoring of the engine.

Not for: judging (`__main__.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

Sources = Mapping[str, str]
Changed = dict[str, str | None]


class Stale(Exception):
    """The engine no longer has what a case changes: the case must be written anew."""


@dataclass(frozen=True, slots=True)
class Case:
    """A patch and what must become of it. `expected`: checks of which one must stop it; empty: it must pass."""

    id: str
    idea: str
    make: Callable[[Sources], Changed]
    expected: frozenset[str] = frozenset()
    tp: int = 1
    fast: bool = False  # also in the test suite
    note: str = ""  # what this case cannot show on a CPU
    without: tuple[str, ...] = ()  # gates that are switched off, to show that another defence holds too


def cheat(id: str, idea: str, checks: str, make: Callable[[Sources], Changed], **options: object) -> Case:
    return Case(id, idea, make, frozenset(checks.split()), **options)  # type: ignore[arg-type]


def control(id: str, idea: str, make: Callable[[Sources], Changed], **options: object) -> Case:
    return Case(id, idea, make, **options)  # type: ignore[arg-type]


def home(sources: Sources, name: str) -> str:
    """The file that defines a class or function at its top level."""
    for path in sorted(sources):
        if name in _defined(sources[path]):
            return path
    raise Stale(f"nothing at top level is called {name}")


@lru_cache(maxsize=256)
def _defined(text: str) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef))


def append(name: str, code: str, *needs: str) -> Callable[[Sources], Changed]:
    """Code at the end of the file that defines `name` (before a main guard); `needs`: methods that must exist there."""

    def make(sources: Sources) -> Changed:
        path = home(sources, name)
        for need in needs:
            if f"def {need}(" not in sources[path]:
                raise Stale(f"{path} has no {need}")
        text = sources[path]
        guard = text.find("\nif __name__ ==")
        head, tail = (text, "") if guard < 0 else (text[:guard], text[guard:])
        return {path: head.rstrip("\n") + "\n\n\n" + code.strip("\n") + "\n" + tail}

    return make


def replace(name: str, *pairs: tuple[str, str]) -> Callable[[Sources], Changed]:
    """Exact replacements, each of text that stands once in the file that defines `name`."""

    def make(sources: Sources) -> Changed:
        path = home(sources, name)
        text = sources[path]
        for old, new in pairs:
            if text.count(old) != 1:
                raise Stale(f"{path}: {text.count(old)} times {old[:60]!r}")
            text = text.replace(old, new)
        return {path: text}

    return make


def together(*makers: Callable[[Sources], Changed]) -> Callable[[Sources], Changed]:
    """Several changes, one after the other."""

    def make(sources: Sources) -> Changed:
        now, changed = dict(sources), {}
        for maker in makers:
            step = maker(now)
            changed |= step
            now |= {path: text for path, text in step.items() if text is not None}
        return changed

    return make


def new_file(path: str, text: str) -> Callable[[Sources], Changed]:
    return lambda sources: {path: text}
