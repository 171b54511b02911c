"""What the pages of the review show, as plain values: the queue, one entry, one parked patch.

Not for: deciding, or looking evidence up (evidence.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.knowledge.blueprint import Blueprint, Entry, Scope, Status
from optimizer.knowledge.check import Problem
from optimizer.review import diff_view
from optimizer.review import evidence as review_evidence
from optimizer.review import parked as parking
from optimizer.review import queue as review
from optimizer.review.diff_view import Diff
from optimizer.review.evidence import AFTER, BEFORE, Chart, Judged, TraceFile
from optimizer.review.parked import Parked
from optimizer.review.queue import Item, ReviewError
from reports.text import micro
from reports.timeline import Timeline

# Fields that have a place of their own on the page; every other one that is set is listed under its name.
_PLACED = {
    *("id", "topic", "title", "rule", "why", "helps", "role", "detection", "scope", "gain", "evidence", "patch"),
    *("status", "failed_variants", "pitfalls", "mechanism"),
}
_REASONS = {
    "drift": "numeric drift",
    "physics": "faster than the machine should allow",
    "not_activated": "a gain that the trace does not explain",
    "policy": "source that only a person can judge",
}


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One line of the queue."""

    path: str
    id: str
    title: str
    tag: str
    kind: str  # style of the tag
    mechanism: str
    gain: str
    where: str
    blocks: int
    notes: int
    origin: str


@dataclass(frozen=True, slots=True)
class QueueView:
    parked: tuple[QueueRow, ...]
    entries: tuple[QueueRow, ...]
    imported: tuple[QueueRow, ...]
    decided: tuple[Entry, ...]

    @property
    def waiting(self) -> int:
        return len(self.parked) + len(self.entries) + len(self.imported)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a scope as the form shows it."""

    name: str
    value: str
    hint: str


@dataclass(frozen=True, slots=True)
class EntryView:
    entry: Entry
    origin: str
    in_run: bool  # else it lies in the blueprint, and no ledger hears of a decision
    effect: str
    problems: tuple[Problem, ...]
    gains: Chart | None
    stages: Chart | None
    judged: Judged
    signature: tuple[tuple[str, str, str], ...]  # trace row, bound before, after
    timeline: Timeline | None
    notes: tuple[str, ...]
    diff: Diff | None
    scope: tuple[Field, ...]
    traces: tuple[TraceFile, ...]
    hashes: tuple[tuple[str, str], ...]
    more: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class ParkedView:
    item: Parked
    why: str
    judged: Judged
    stages: Chart | None
    timeline: Timeline | None
    notes: tuple[str, ...]
    diff: Diff | None
    broken: str  # why there is no diff


def queue(
    items: Sequence[Item], waiting: Sequence[Parked], folder: Path, path_of: Callable[[Item], str], path_of_parked: Callable[[Parked], str]
) -> QueueView:
    """The rows of the queue, and what was decided before, newest first."""
    rows = [(item, _row(item, folder, path_of(item))) for item in items]
    book = Blueprint.load(folder) if folder.is_dir() else Blueprint()
    decided = [e for e in book.entries() if e.status not in review.WAITING]
    return QueueView(
        parked=tuple(_parked_row(item, path_of_parked(item)) for item in waiting),
        entries=tuple(row for item, row in rows if item.entry.status is not Status.IMPORTED),
        imported=tuple(row for item, row in rows if item.entry.status is Status.IMPORTED),
        decided=tuple(sorted(decided, key=lambda e: (e.decided_on or "", e.id), reverse=True)),
    )


def _row(item: Item, folder: Path, path: str) -> QueueRow:
    entry = item.entry
    found = review.problems(item, folder)
    return QueueRow(
        path=path,
        id=entry.id,
        title=entry.title,
        tag=entry.status.value if entry.helps else f"{entry.status.value}: advises against",
        kind="parked" if entry.status is Status.IMPORTED else "undecided",
        mechanism=entry.mechanism,
        gain=review.effect(entry),
        where=_where(entry.scope),
        blocks=sum(p.blocking for p in found),
        notes=sum(not p.blocking for p in found),
        origin=_origin(item),
    )


def _parked_row(item: Parked, path: str) -> QueueRow:
    return QueueRow(
        path=path,
        id=f"attempt {item.attempt}",
        title=item.title or item.mechanism,
        tag="parked",
        kind="rejected",
        mechanism=item.mechanism,
        gain=_REASONS.get(item.reason, item.reason),
        where=item.detail,
        blocks=0,
        notes=0,
        origin=f"run {item.run.name}",
    )


def _origin(item: Item) -> str:
    if item.run is not None:
        return f"run {item.run.name}"
    refs, place = item.entry.source_refs, review_evidence.record(item.entry)
    if place is not None:
        return f"record {place.name}"
    return refs[0].repository if refs else "blueprint"


def _where(scope: Scope) -> str:
    parts = [f"{name} {', '.join(map(str, getattr(scope, name)))}" for name in ("engine", "tp", "device") if getattr(scope, name)]
    return "; ".join(parts) or "not stated"


def entry(item: Item, folder: Path) -> EntryView:
    """Everything that a decision on one entry needs."""
    found = item.entry
    place = item.run or review_evidence.record(found)
    files = review_evidence.traces(found, place)
    before = [f.path for f in files if f.when == BEFORE and f.path]
    after = [f.path for f in files if f.when == AFTER and f.path]
    drawn, notes = review_evidence.timelines(place, before, after)
    about = review_evidence.judged(place, found.evidence.attempt)
    return EntryView(
        entry=found,
        origin=_origin(item),
        in_run=item.run is not None,
        effect=review.effect(found),
        problems=tuple(sorted(review.problems(item, folder), key=lambda p: not p.blocking)),
        gains=review_evidence.chart(review_evidence.gains(found), about.margin),
        stages=review_evidence.chart(about.stages, about.margin),
        judged=about,
        signature=_signature(found),
        timeline=drawn,
        notes=notes,
        diff=diff_view.view(found.patch) if found.patch else None,
        scope=tuple(_field(name, found.scope) for name in Scope.model_fields),
        traces=tuple(files),
        hashes=_hashes(found),
        more=_more(found),
    )


def _signature(found: Entry) -> tuple[tuple[str, str, str], ...]:
    before, after = found.detection.before, found.detection.after
    names = [*before, *(n for n in after if n not in before)]
    return tuple((n, micro(before[n]) if n in before else "n/a", micro(after[n]) if n in after else "gone") for n in names)


def _field(name: str, scope: Scope) -> Field:
    about = Scope.model_fields[name]
    return Field(name, ", ".join(map(str, getattr(scope, name))), about.description or "")


def _hashes(found: Entry) -> tuple[tuple[str, str], ...]:
    proof = found.evidence.model_dump(exclude={"traces"})
    return tuple((name.replace("_", " "), str(value)) for name, value in proof.items() if value is not None)


def _more(found: Entry) -> tuple[tuple[str, tuple[str, ...]], ...]:
    rows = found.model_dump(mode="json", exclude_defaults=True)
    return tuple((name.replace("_", " "), _lines(value)) for name, value in rows.items() if name not in _PLACED)


def _lines(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(line for v in value for line in _lines(v))
    if isinstance(value, dict):
        return ("; ".join(f"{k} {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in value.items()),)
    return (str(value),)


def parked(item: Parked) -> ParkedView:
    """Everything that a decision on a parked patch needs."""
    about = review_evidence.judged(item.run, item.attempt)
    before, after = review_evidence.parked_traces(item.run, item.incumbent, item.attempt)
    drawn, notes = review_evidence.timelines(item.run, before, after)
    shown, broken = None, ""
    try:
        shown = diff_view.view(parking.diff(item))
    except ReviewError as error:
        broken = str(error)
    return ParkedView(
        item=item,
        why=_REASONS.get(item.reason, item.reason),
        judged=about,
        stages=review_evidence.chart(about.stages, about.margin),
        timeline=drawn,
        notes=notes,
        diff=shown,
        broken=broken,
    )
