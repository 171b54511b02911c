"""N engines side by side: categories, and layers aligned by their products; comparable traces only.

The first analysis is the base ("here"). Others that measured another cell become `context`: counts per step
under "structure only", no time and no difference. Every row carries per-step figures of every engine, and
`coverage` says how much of each engine's work time the aligned rows hold. Not for: what to do about a
difference (findings), drawing (reports).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trace_diff import groups
from trace_diff.analysis import Analysis
from trace_diff.comparable import compare_cells
from trace_diff.groups import GroupRow

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class EngineColumn:
    """One engine of the comparison. Times are means per step of the rank that sets the pace."""

    label: str
    cell: dict[str, Any]
    rank: int
    ranks: int
    steps: int
    wall_us: float
    wall_us_per_token: float
    gpu_busy_us: float | None
    counts: dict[str, float]
    observer: dict[str, Any]
    assumed: tuple[str, ...]  # parts of the cell that are taken as equal to the base's
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category across engines. `kind`: "wall" rows sum to the wall, "gpu" and "cpu" rows overlap with them."""

    kind: str
    category: str
    us: tuple[float | None, ...]  # per step; None: the engine has no such account
    per_token_us: tuple[float | None, ...]
    difference_us: tuple[float | None, ...]  # that engine minus the base
    count: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextRow:
    """A trace of another cell: why it is not compared, and what can be told without times."""

    label: str
    reasons: tuple[str, ...]
    cell: dict[str, Any]
    counts: dict[str, float]  # per step, structure only


@dataclass(frozen=True, slots=True)
class Diff:
    """The whole comparison; `layers` rows are in execution order, `rows` by size of the largest difference."""

    base: str
    engines: tuple[EngineColumn, ...]
    rows: tuple[CategoryRow, ...]
    layers: tuple[GroupRow, ...]
    context: tuple[ContextRow, ...]
    coverage: dict[str, float]  # label -> share of its item time that aligned rows hold, 0..1
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "engines": [asdict(e) for e in self.engines],
            "rows": [asdict(r) for r in self.rows],
            "layers": [r.to_json() for r in self.layers],
            "context": [asdict(c) for c in self.context],
            "coverage": self.coverage,
            "notes": list(self.notes),
        }

    def frame(self) -> pd.DataFrame:
        """Categories as rows, engines as columns, microseconds per step."""
        import pandas as pd  # half a second: only for those who ask for a frame

        columns = ["kind", "category", *(e.label for e in self.engines)]
        return pd.DataFrame([[r.kind, r.category, *r.us] for r in self.rows], columns=pd.Index(columns))

    def layer_frame(self) -> pd.DataFrame:
        """Aligned groups as rows; per engine its kernels and microseconds per step."""
        import pandas as pd

        rows = [
            {
                "where": r.where,
                "group": r.label,
                **{f"{e.label} kernels": c.count for e, c in zip(self.engines, r.cells, strict=True)},
                **{f"{e.label} us": c.us for e, c in zip(self.engines, r.cells, strict=True)},
            }
            for r in self.layers
        ]
        return pd.DataFrame(rows)


def compare(analyses: Seq[Analysis]) -> Diff:
    """Compare any number of analyses with the first. Raises ValueError when there is none."""
    if not analyses:
        raise ValueError("nothing to compare: give at least one analysis")
    analyses = _distinct(analyses)
    base = analyses[0]
    kept: list[tuple[Analysis, tuple[str, ...]]] = [(base, ())]
    context: list[ContextRow] = []
    for other in analyses[1:]:
        verdict = compare_cells(base.cell, other.cell)
        if verdict.ok:
            kept.append((other, verdict.assumed))
        else:
            context.append(
                ContextRow(other.label, verdict.reasons, other.cell.to_json(), dict(other.breakdown.counts))
            )
    engines = [a for a, _ in kept]
    layers, coverage, notes = groups.aligned(engines)
    notes += [f"{c.label}: context only ({'; '.join(c.reasons)})" for c in context]
    return Diff(
        base=base.label,
        engines=tuple(_column(a, assumed) for a, assumed in kept),
        rows=_category_rows(engines),
        layers=layers,
        context=tuple(context),
        coverage=coverage,
        notes=tuple(notes),
    )


def _distinct(analyses: Seq[Analysis]) -> list[Analysis]:
    """Labels made unique: a second "vllm" becomes "vllm #2"."""
    seen: dict[str, int] = {}
    out: list[Analysis] = []
    for a in analyses:
        seen[a.label] = seen.get(a.label, 0) + 1
        out.append(a if seen[a.label] == 1 else replace(a, label=f"{a.label} #{seen[a.label]}"))
    return out


def _column(a: Analysis, assumed: tuple[str, ...]) -> EngineColumn:
    b = a.breakdown
    return EngineColumn(
        label=a.label,
        cell=a.cell.to_json(),
        rank=b.rank,
        ranks=len(a.breakdowns),
        steps=b.steps,
        wall_us=b.wall_ns / 1000,
        wall_us_per_token=b.wall_ns / 1000 / a.tokens_per_step,
        gpu_busy_us=None if b.gpu_busy_ns is None else b.gpu_busy_ns / 1000,
        counts=dict(b.counts),
        observer=a.observer.to_json(),
        assumed=assumed,
        notes=a.notes,
    )


def _category_rows(engines: list[Analysis]) -> tuple[CategoryRow, ...]:
    rows: list[CategoryRow] = []
    for kind, pick in (("wall", "parts"), ("gpu", "gpu_ns"), ("cpu", "cpu_self_ns")):
        tables: list[dict[str, int]] = [getattr(a.breakdown, pick) for a in engines]
        names = dict.fromkeys(name for t in tables for name in t)
        some = [_category(kind, name, tables, engines) for name in names]
        rows += sorted(some, key=_size, reverse=True)
    return tuple(rows)


def _category(kind: str, name: str, tables: list[dict[str, int]], engines: list[Analysis]) -> CategoryRow:
    us = tuple(t.get(name, 0) / 1000 if t else None for t in tables)
    per_token = tuple(
        None if v is None else v / a.tokens_per_step for v, a in zip(us, engines, strict=True)
    )
    base = us[0]
    difference = tuple(None if v is None or base is None else v - base for v in us)
    return CategoryRow(kind, name, us, per_token, difference)


def _size(row: CategoryRow) -> float:
    deltas = [abs(d) for d in row.difference_us[1:] if d is not None]
    return max(deltas, default=row.us[0] or 0.0)
