"""Match split chains of small kernels against the table of fusion families (`fusion_families.json`).

A family matches adjacent items only, longest match first, and each item is claimed once, so one kernel is
never counted in two fusions. Not for: what a match would save (findings/unfused_chains).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("fusion_families.json")


@dataclass(frozen=True, slots=True)
class Family:
    """One fusion: a chain of tokens that other engines run as one kernel."""

    name: str
    chain: re.Pattern[str]
    fused: re.Pattern[str]  # names of kernels that do it in one
    where: dict[str, str]  # engine -> source of the fused kernel
    conditions: str
    skills: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Items [first, last] of a stretch form one chain of a family."""

    family: Family
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Table:
    """The fusion table as data; `version` changes with its content."""

    version: int
    tokens: tuple[tuple[str, re.Pattern[str]], ...]
    families: tuple[Family, ...]


@cache
def table() -> Table:
    """The table that ships with the package."""
    data = json.loads(TABLE.read_text())
    return Table(
        version=data["version"],
        tokens=tuple((name, re.compile(pattern)) for name, pattern in data["tokens"]),
        families=tuple(
            Family(
                name=f["name"],
                chain=re.compile(rf"(?:{f['chain']})(?![^ ])"),
                fused=re.compile("|".join(f["fused"])),
                where=f["where"],
                conditions=f["conditions"],
                skills=tuple(f["skills"]),
            )
            for f in data["families"]
        ),
    )


@cache
def token(name: str, cls: str) -> str:
    """The token of an item: by name, else its class (spaces never occur in a token)."""
    return next((t for t, pattern in table().tokens if pattern.search(name)), cls.replace(" ", "_"))


def match(items: Seq[tuple[str, str]]) -> list[Match]:
    """Chains in one stretch of adjacent (name, class) items, in order; longest first where two overlap.

    Of equally long matches the family that stands first in the table wins.
    """
    tokens = [token(name, cls) for name, cls in items]
    text = " ".join(tokens)
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    at = 0
    for i, t in enumerate(tokens):
        starts[at] = i
        ends[at + len(t)] = i
        at += len(t) + 1
    candidates: list[tuple[int, int, Match]] = []
    for rank, family in enumerate(table().families):
        for begin, i in starts.items():
            found = family.chain.match(text, begin)
            last = ends.get(len(text[: found.end()].rstrip())) if found else None
            if last is not None and last > i:
                candidates.append((-(last - i), rank, Match(family, i, last)))
    taken = [False] * len(tokens)
    out: list[Match] = []
    for _, _, m in sorted(candidates, key=lambda c: (c[0], c[1], c[2].first)):
        if not any(taken[m.first : m.last + 1]):
            taken[m.first : m.last + 1] = [True] * len(m)
            out.append(m)
    return sorted(out, key=lambda m: m.first)
