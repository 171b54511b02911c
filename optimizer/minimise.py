"""Delta debugging: the smallest part of a patch that still does what the whole did. Pure; the test is passed in.

`minimise` is ddmin (Zeller & Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 2002) over
hunks: afterwards no single hunk can be left out (1-minimal). A hunk is one changed region of one file; `hunks_of`
and `apply_hunks` cut a change into them and put any subset together. Not for: measuring whether a subset is still
fast and right (the caller's test does both), or leaving out whole accepted patches (`ablate.py`).
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines [start, end) of the file before, and what stands there after. A new file is one hunk at 0..0."""

    file: str
    start: int
    end: int
    lines: tuple[str, ...]


def hunks_of(before: Mapping[str, str], after: Mapping[str, str]) -> list[Hunk]:
    """Changed regions, by file and line. Errors: ValueError for a file that was removed."""
    if gone := sorted(before.keys() - after.keys()):
        raise ValueError(f"a patch cannot remove files: {', '.join(gone)}")
    found: list[Hunk] = []
    for file in sorted(after):
        old = before.get(file, "").splitlines(keepends=True)
        new = after[file].splitlines(keepends=True)
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag != "equal":
                found.append(Hunk(file, i1, i2, tuple(new[j1:j2])))
    return found


def apply_hunks(before: Mapping[str, str], hunks: Sequence[Hunk]) -> dict[str, str]:
    """`before` with only these hunks. All hunks of a change give its `after`, none gives `before`."""
    result = dict(before)
    for file in {h.file for h in hunks}:
        lines = before.get(file, "").splitlines(keepends=True)
        for h in sorted((h for h in hunks if h.file == file), key=lambda h: h.start, reverse=True):
            lines[h.start : h.end] = h.lines
        result[file] = "".join(lines)
    return result


def minimise(hunks: Sequence[T], test: Callable[[Sequence[T]], bool], budget: int | None = None) -> list[T]:
    """A 1-minimal subset, in the given order, for which `test` holds. `test(hunks)` is taken as given.

    test: dear (gates and timings), so no subset is asked about twice. budget: most calls of it; when spent,
    the smallest subset found so far is returned. Subsets that do not even parse simply fail the test.
    """
    kept = list(range(len(hunks)))
    asked: dict[tuple[int, ...], bool] = {}

    def holds(subset: list[int]) -> bool:
        key = tuple(subset)
        if key not in asked:
            if budget is not None and len(asked) >= budget:
                raise _Spent
            asked[key] = test([hunks[i] for i in subset])
        return asked[key]

    parts = 2
    try:
        while len(kept) >= 2:
            chunks = _split(kept, parts)
            smaller = next((c for c in chunks if holds(c)), None)
            if smaller is not None:
                kept, parts = smaller, 2
                continue
            rests = ([i for i in kept if i not in c] for c in chunks) if parts > 2 else iter(())
            rest = next((r for r in rests if holds(r)), None)
            if rest is not None:
                kept, parts = rest, max(parts - 1, 2)
            elif parts < len(kept):
                parts = min(2 * parts, len(kept))
            else:
                break
    except _Spent:
        pass
    return [hunks[i] for i in kept]


class _Spent(Exception):
    """The budget of tests is used up."""


def _split(items: list[int], parts: int) -> list[list[int]]:
    """`parts` consecutive chunks of nearly equal size, none empty."""
    size, extra = divmod(len(items), parts)
    cuts = [0]
    for i in range(parts):
        cuts.append(cuts[-1] + size + (i < extra))
    return [items[a:b] for a, b in itertools.pairwise(cuts) if a < b]
