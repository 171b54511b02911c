"""The knowledge blueprint: entries, their scope, and which accepted ones speak about a run.

One JSON file per topic under skills/blueprint/. Only a person moves an entry out of `proposed` or `imported`
(review/). Proposers read accepted entries; gates, measurement and acceptance never do. Not for: finding
contradictions (check.py), filling entries from a run (writeback.py), other formats
(metainfer.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

BLUEPRINT = Path(__file__).resolve().parents[2] / "skills" / "blueprint"
ANY = "any"  # written into a scope by a person only; nothing here ever widens one


class Status(StrEnum):
    PROPOSED = "proposed"
    IMPORTED = "imported"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scope(_Model):
    """Exact values under which the entry was seen to hold. An empty list is unknown, and matches nothing."""

    engine: list[str] = []
    engine_version: list[str] = Field(default=[], description="hash of the engine's sources as the run found them")
    model: list[str] = []
    tp: list[int] | list[Literal["any"]] = []
    batch: list[int] | list[Literal["any"]] = []
    mode: list[str] = Field(default=[], description="eager, graph, compile")
    device: list[str] = Field(default=[], description="device class, e.g. cpu:x86_64 or NVIDIA H200")
    dtype: list[str] = Field(default=[], description="exact precision, e.g. float32")
    torch: list[str] = []

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """True where every field lists the run's own value. Missing facts match nothing but an explicit `any`."""
        for name in type(self).model_fields:
            allowed = getattr(self, name)
            if allowed != [ANY] and facts.get(name) not in allowed:
                return False
        return True


class Gain(_Model):
    """A measured ratio of times, candidate / incumbent: below 1 is faster."""

    metric: str = "us_per_token"
    ratio: float = Field(gt=0)
    ci95: tuple[float, float]
    pairs: int = Field(ge=1)


class Gains(_Model):
    """`marginal`: when it was accepted; `leave_one_out`: from the final ablation; `series`: of a whole series."""

    marginal: Gain | None = None
    leave_one_out: Gain | None = None
    series: Gain | None = None


class Detection(_Model):
    """The trace signature that the entry answers, and what it looked like before and after."""

    signature: str
    rule: str | None = None  # finding rule
    before: dict[str, float] = {}
    after: dict[str, float] = {}


class Evidence(_Model):
    """Where the claim can be checked: sha256 of traces by label, of the patch, of the ledger line, of the gates."""

    run: str | None = None
    attempt: int | None = None
    traces: dict[str, str] = {}
    patch_sha: str | None = None
    ledger_hash: str | None = None
    gates_digest: str | None = None


class Variant(_Model):
    """Something of the same mechanism that failed, and why."""

    what: str
    reason: str
    attempt: int | None = None


class SourceRef(_Model):
    """Code or text elsewhere; a proposer first asks whether this path exists here and why it is off."""

    repository: str
    file: str
    commit: str | None = None


class Audit(_Model):
    """A check that a machine can make: how often `pattern` occurs in code (regex) or per decode step (row glob)."""

    kind: Literal["code", "trace"]
    pattern: str
    files: list[str] = Field(default=[], description="globs; empty means every file")
    least: int = 0
    most: int | None = None


class Legacy(_Model):
    """Fields of a MetaInfer `performance_optimization` node that have no other home; kept for export."""

    key: str
    priority: str | None = None
    real_engine: str | None = None
    apply_to: list[str] = []
    audit_check: str | None = None
    verified_by: str | None = None


class Entry(_Model):
    """One piece of knowledge. See DESIGN's section on knowledge for the fields."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="never reused")
    topic: str
    mechanism: str = Field(description="skill folder, or a short slug")
    title: str
    rule: str
    why: str
    helps: bool = True
    role: Literal["win", "enabler"] = "win"
    detection: Detection
    scope: Scope
    preconditions: list[str] = []
    conflicts_with: list[str] = []
    supersedes: list[str] = []
    params: dict[str, Any] = {}
    gain: Gains = Gains()
    evidence: Evidence = Evidence()
    patch: str | None = None
    pitfalls: list[str] = []
    failed_variants: list[Variant] = []
    remaining_gaps: list[str] = []
    demands: list[str] = Field(default=[], description="terms that code following the rule contains")
    forbids: list[str] = Field(default=[], description="terms that it does not contain")
    constants: dict[str, Any] = Field(default={}, description="numbers that the rule fixes, by name")
    audit: list[Audit] = []
    source_refs: list[SourceRef] = []
    legacy: Legacy | None = None
    status: Status = Status.PROPOSED
    reviewer: str | None = None
    reason: str | None = None
    proposed_on: str | None = None
    decided_on: str | None = None

    def expected_saving_us(self, token_us: float | None) -> float | None:
        """Measured saving in us per token at an incumbent of `token_us`; None where nothing was measured."""
        gain = self.gain.marginal or self.gain.series
        if gain is None or token_us is None or not self.helps:
            return None
        return max(0.0, (1.0 - gain.ratio) * token_us)


class Topic(_Model):
    """One file of the blueprint."""

    schema_version: Literal[1] = 1
    topic: str
    entries: list[Entry]


class BlueprintError(Exception):
    """A file that is not a blueprint; the message names file and field."""


class Blueprint:
    """All topics of a folder. Reading is eager and strict; `save` writes one topic file, sorted, atomically."""

    def __init__(self, topics: Iterable[Topic] = (), folder: Path | None = None) -> None:
        self.topics = {t.topic: t for t in topics}
        self.folder = folder

    @classmethod
    def load(cls, folder: Path = BLUEPRINT) -> Blueprint:
        """Every *.json of the folder but the schema. Raises BlueprintError."""
        topics = []
        for file in sorted(folder.glob("*.json")):
            if file.name == "schema.json":
                continue
            try:
                topics.append(Topic.model_validate_json(file.read_bytes()))
            except ValidationError as error:
                first = error.errors()[0]
                raise BlueprintError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
            if topics[-1].topic != file.stem:
                raise BlueprintError(f"{file}: topic is {topics[-1].topic!r}, the file name says {file.stem!r}")
        return cls(topics, folder)

    def entries(self) -> list[Entry]:
        return [e for t in self.topics.values() for e in t.entries]

    def get(self, entry_id: str) -> Entry:
        """Raises KeyError naming the id."""
        for entry in self.entries():
            if entry.id == entry_id:
                return entry
        raise KeyError(f"no entry {entry_id!r}")

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace the one with its id in the same topic."""
        topic = self.topics.get(entry.topic) or Topic(topic=entry.topic, entries=[])
        others = [e for e in topic.entries if e.id != entry.id]
        self.topics[entry.topic] = Topic(topic=entry.topic, entries=sorted([*others, entry], key=lambda e: e.id))

    def save(self, topic: str, folder: Path | None = None) -> Path:
        """Write one topic's file; returns its path."""
        where = folder or self.folder
        if where is None:
            raise ValueError("this blueprint has no folder")
        where.mkdir(parents=True, exist_ok=True)
        file = where / f"{topic}.json"
        data = self.topics[topic].model_dump(mode="json", exclude_defaults=True)
        draft = file.with_suffix(".json.new")
        draft.write_text(json.dumps({"schema_version": 1, **data}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(file)
        return file

    def accepted(self, facts: Mapping[str, Any]) -> list[Entry]:
        """Accepted entries whose scope lists exactly this run's facts, by id."""
        found = [e for e in self.entries() if e.status is Status.ACCEPTED and e.scope.holds(facts)]
        return sorted(found, key=lambda e: e.id)


def accepted(facts: Mapping[str, Any], folder: Path = BLUEPRINT) -> list[Entry]:
    """Accepted entries for a run with these facts; see Scope for the keys."""
    return Blueprint.load(folder).accepted(facts)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a topic file; skills/blueprint/schema.json holds it, and a test compares them."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Topic.model_json_schema()}
