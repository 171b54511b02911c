"""Python lines for work that has none of its own, such as kernels inside CUDA graphs.

A second trace of the same engine, eager and with Python stacks, is aligned to the first by layers and products
(groups); what lies between two products is matched by name, then by class and order, and a kernel that is
several kernels there (a compiled, fused one) gets all their lines. Joins by position, not by name alone, so two
kernels of one name at two places keep two lines. Not for: traces with stacks of their own (their rows have
`syncs.site`), other engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trace_diff import classify, groups, syncs
from trace_diff.analysis import Analysis
from trace_diff.ingest import Trace
from trace_diff.links import links
from trace_diff.nesting import nesting
from trace_diff.types import Kind

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Mapped:
    """One item of the target's typical step with the lines that caused its counterpart in the map."""

    item: int  # position in the target's sequence
    name: str
    us: float
    sites: tuple[str, ...]  # "file.py(123): function"; empty: not mapped
    by: str  # "own stack", "product", "name", "class", "group" or "" when not mapped


@dataclass(frozen=True, slots=True)
class StackMap:
    """Sites of all items of a target's typical step; `coverage` is the mapped share of its item time."""

    target: str
    source: str
    rows: tuple[Mapped, ...]
    coverage: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def site_of(self, event_row: int, analysis: Analysis) -> tuple[str, ...]:
        """Sites of one event row of the target's representative step; empty when it is not mapped."""
        if analysis.sequence is None:
            return ()
        found = (self.rows[i].sites for i, r in enumerate(analysis.sequence.rows.tolist()) if r == event_row)
        return next(found, ())

    def frame(self) -> pd.DataFrame:
        """One row per item: item, name, us, by, site (first of its sites)."""
        import pandas as pd  # half a second: only for those who ask for a frame

        rows = [(m.item, m.name, m.us, m.by, m.sites[0] if m.sites else None) for m in self.rows]
        return pd.DataFrame(rows, columns=pd.Index(["item", "name", "us", "by", "site"]))


class NoStacks(ValueError):
    """The map's trace has no Python frames."""


def build(target: Analysis, source: Analysis) -> StackMap:
    """Map the target's typical step onto the source's stacks.

    Batch and mode may differ; the engine should be the same. Raises NoStacks, and ValueError for traces
    without device work.
    """
    if target.sequence is None or source.sequence is None:
        raise ValueError("a stack map needs work in both traces")
    trace = source.traceset.traces[source.slowest]
    if not len(trace.rows(Kind.PYTHON)):
        raise NoStacks(f"{source.label}: no Python frames; record it with_stack=True")
    sites = _sites(trace)
    found: dict[int, tuple[tuple[str, ...], str]] = _own_sites(target)
    position = {int(r): i for i, r in enumerate(target.sequence.rows)}
    for row in groups.aligned([target, source])[0]:
        if row.where == "not aligned":
            continue
        here = [position[r] for r in row.cells[0].rows]
        there = [(trace.name(r), sites(r)) for r in row.cells[1].rows]
        for item, answer in _within(target, here, there, row.anchor).items():
            found.setdefault(item, answer)
    _by_name_anywhere(target, source, sites, found)
    seq = target.sequence
    rows = tuple(
        Mapped(i, n, float(seq.dur_ns[i]) / 1000, *found.get(i, ((), ""))) for i, n in enumerate(seq.names)
    )
    whole = float(seq.dur_ns.sum())
    got = sum(float(seq.dur_ns[m.item]) for m in rows if m.sites)
    return StackMap(target.label, source.label, rows, got / whole if whole else 0.0)


# Frames that carry a call but do not say where in the engine it stands.
_CARRIERS = re.compile(
    r"(^|/)(torch|triton|functools|contextlib|importlib|typing|dataclasses|weakref)(/|\.py)|^<|__torch_function__"
)
DEPTH = 3  # frames of one site


def _sites(trace: Trace) -> Callable[[int], str | None]:
    """Looks up "innermost < caller < its caller" of the engine's own frames around an event's launch; cached."""
    launch = links(trace).launch_of(len(trace.events))
    parent = nesting(trace).parent
    kinds = trace.events.kind
    cache: dict[int, str | None] = {}

    def lookup(row: int) -> str | None:
        if row not in cache:
            frames: list[str] = []
            up = int(launch[row]) if int(launch[row]) >= 0 else row
            while up >= 0 and len(frames) < DEPTH:
                if kinds[up] == Kind.PYTHON:
                    name = trace.name(up)
                    if ".py(" in name and not _CARRIERS.search(name):
                        frames.append(name)
                up = int(parent[up])
            cache[row] = " < ".join(frames) or syncs.site(trace, row)
        return cache[row]

    return lookup


def _own_sites(target: Analysis) -> dict[int, tuple[tuple[str, ...], str]]:
    trace = target.traceset.traces[target.slowest]
    if target.sequence is None or not len(trace.rows(Kind.PYTHON)):
        return {}
    lookup = _sites(trace)
    own = {i: lookup(int(r)) for i, r in enumerate(target.sequence.rows)}
    return {i: ((s,), "own stack") for i, s in own.items() if s}


def _within(
    target: Analysis, here: Seq[int], there: Seq[tuple[str, str | None]], anchor: bool
) -> dict[int, tuple[tuple[str, ...], str]]:
    """Sites for the items of one aligned group; products go by position, the rest by name, then class, then group."""
    seq = target.sequence
    assert seq is not None
    everything = tuple(dict.fromkeys(s for _, s in there if s))
    if not everything:
        return {}
    named = {seq.names[i] for i in here}
    rest = tuple(dict.fromkeys(s for n, s in there if s and n not in named)) or everything
    out: dict[int, tuple[tuple[str, ...], str]] = {}
    for k, item in enumerate(here):
        same = [s for n, s in there if n == seq.names[item] and s]
        if anchor:
            main = there[min(len(there) - 1, k * len(there) // max(1, len(here)))][1]
            out[item] = ((main,) if main else everything, "product")
        elif same:
            at = sum(1 for j in here[:k] if seq.names[j] == seq.names[item])
            out[item] = ((same[min(at, len(same) - 1)],), "name")
        else:
            kin = tuple(dict.fromkeys(s for n, s in there if s and classify.kernel_class(n) == seq.classes[item]))
            out[item] = (kin, "class") if kin else (rest, "group")
    return out


def _by_name_anywhere(
    target: Analysis, source: Analysis, sites: Callable[[int], str | None], found: dict[int, tuple[tuple[str, ...], str]]
) -> None:
    """Items of groups that the source does not have: the same kernel elsewhere in its step, else left unmapped."""
    seq, other = target.sequence, source.sequence
    assert seq is not None and other is not None
    for i, name in enumerate(seq.names):
        if i in found:
            continue
        rows = [int(r) for r, n in zip(other.rows, other.names, strict=True) if n == name]
        near = [s for s in (sites(r) for r in rows) if s]
        if near:
            out = tuple(dict.fromkeys(near))
            found[i] = (out, "name")
