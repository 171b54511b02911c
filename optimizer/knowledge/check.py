"""Contradictions, stale evidence and forbidden advice in the knowledge blueprint.

Checks what entries say of themselves (ids, terms that they demand or forbid, constants, scopes, audits, evidence);
it does not read prose. Prose of another format becomes such statements on import. Not for: deciding (review/),
or judging patches: gates never come here.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from optimizer.knowledge.blueprint import ANY, Audit, Entry, Scope, Status
from optimizer.knowledge.loosening import loosens, touches


class Kind(StrEnum):
    DUPLICATE_ID = "duplicate-id"
    DEMANDS_WHAT_IS_FORBIDDEN = "demands-what-is-forbidden"
    CONSTANT_DISAGREES = "constant-disagrees"
    CONSTANT_NEEDS_NARROWER_SCOPE = "constant-needs-narrower-scope"
    AUDIT_FAILS_ON_ITS_EVIDENCE = "audit-fails-on-its-evidence"
    AUDIT_MISSES_FILES = "audit-misses-files"
    UNKNOWN_REFERENCE = "unknown-reference"
    SELF_CONFLICT = "self-conflict"
    OPPOSITE_VERDICTS = "opposite-verdicts"
    STALE_GATES = "stale-gates"
    MISSING_EVIDENCE = "missing-evidence"
    LOOSENS_A_GATE = "loosens-a-gate"
    EMPTY_SCOPE = "empty-scope"
    COUNT_DISAGREES = "count-disagrees"
    COMPARES_UNLIKE = "compares-unlike"
    DISOWNED_EVIDENCE = "disowned-evidence"
    FAULTY_CODE = "faulty-code"


BLOCKING = {  # an entry with one of these cannot be accepted
    Kind.DUPLICATE_ID,
    Kind.DEMANDS_WHAT_IS_FORBIDDEN,
    Kind.CONSTANT_DISAGREES,
    Kind.CONSTANT_NEEDS_NARROWER_SCOPE,
    Kind.AUDIT_FAILS_ON_ITS_EVIDENCE,
    Kind.UNKNOWN_REFERENCE,
    Kind.SELF_CONFLICT,
    Kind.OPPOSITE_VERDICTS,
    Kind.LOOSENS_A_GATE,
    Kind.EMPTY_SCOPE,
    Kind.DISOWNED_EVIDENCE,
    Kind.FAULTY_CODE,
}
_DEAD = {Status.REJECTED, Status.SUPERSEDED}


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of the validator; `entries` are the ids it concerns."""

    kind: Kind
    entries: tuple[str, ...]
    detail: str

    @property
    def blocking(self) -> bool:
        return self.kind in BLOCKING

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.entries)}: {self.detail}"


def check(
    entries: Iterable[Entry],
    gates_digest: str | None = None,
    evidence: Mapping[str, Mapping[str, str]] | None = None,
    files: Iterable[str] | None = None,
) -> list[Problem]:
    """Every problem among the entries that are not rejected or superseded.

    gates_digest: of the gates as they are now; entries judged under others are stale. evidence: entry id -> source
    texts of the engine that the entry was earned on, for its code audits. files: sha256 of trace files that exist;
    None means that nobody looked.
    """
    every = list(entries)
    living = [e for e in every if e.status not in _DEAD]
    known = {e.id for e in every} | {e.legacy.key for e in every if e.legacy}
    hashes = None if files is None else set(files)
    found = list(_duplicates(every))
    for entry in living:
        found += _alone(entry, known)
        found += _evidence(entry, gates_digest, hashes)
        found += _audits(entry, (evidence or {}).get(entry.id))
    for one, two in itertools.combinations(living, 2):
        if one.id != two.id and overlap(one.scope, two.scope) and not _settled(one, two):
            found += _between(one, two)
    return found


def overlap(one: Scope, two: Scope) -> bool:
    """Whether some run could be in both scopes. An unknown field may be anything here: doubt is a conflict."""
    for name in Scope.model_fields:
        a, b = getattr(one, name), getattr(two, name)
        if a and b and ANY not in a and ANY not in b and not set(a) & set(b):
            return False
    return True


def _settled(one: Entry, two: Entry) -> bool:
    """One supersedes the other, or they are said not to go together."""
    return two.id in one.supersedes + one.conflicts_with or one.id in two.supersedes + two.conflicts_with


def _duplicates(every: Sequence[Entry]) -> Iterable[Problem]:
    for name, count in Counter(e.id for e in every).items():
        if count > 1:
            yield Problem(Kind.DUPLICATE_ID, (name,), f"{count} entries have this id")
    keys = Counter((e.legacy.key, e.topic) for e in every if e.legacy)
    for (key, _), count in keys.items():
        if count > 1:
            yield Problem(Kind.DUPLICATE_ID, (key,), f"{count} imported nodes have this key; which one is meant?")


def _alone(entry: Entry, known: set[str]) -> Iterable[Problem]:
    for word in sorted(set(entry.demands) & set(entry.forbids)):
        yield Problem(Kind.SELF_CONFLICT, (entry.id,), f"demands and forbids {word!r}")
    if entry.id in entry.conflicts_with + entry.supersedes:
        yield Problem(Kind.SELF_CONFLICT, (entry.id,), "conflicts with or supersedes itself")
    for other in sorted(set(entry.conflicts_with + entry.supersedes) - known):
        yield Problem(Kind.UNKNOWN_REFERENCE, (entry.id,), f"names {other!r}, which does not exist")
    advice = [entry.title, entry.rule, *entry.preconditions, *entry.demands, *(f"{k} {v}" for k, v in entry.params.items())]
    if words := next((found for text in advice if (found := loosens(text))), None):
        yield Problem(Kind.LOOSENS_A_GATE, (entry.id,), f"{words!r}: knowledge never loosens a gate")
    if file := touches(entry.patch):
        yield Problem(Kind.LOOSENS_A_GATE, (entry.id,), f"its patch changes {file}, which judges patches")
    if entry.status is Status.ACCEPTED and not all(getattr(entry.scope, n) for n in Scope.model_fields):
        empty = [n for n in Scope.model_fields if not getattr(entry.scope, n)]
        yield Problem(Kind.EMPTY_SCOPE, (entry.id,), f"accepted, but scope says nothing of {', '.join(empty)}")
    for name in sorted(entry.constants):
        if isinstance(limits := entry.constants[name], dict) and (holds := limits.get("holds_for")):
            wider = [f for f, values in holds.items() if f in Scope.model_fields and not _within(entry.scope, f, values)]
            if wider:
                yield Problem(
                    Kind.CONSTANT_NEEDS_NARROWER_SCOPE,
                    (entry.id,),
                    f"{name} holds only for {', '.join(f'{f} in {holds[f]}' for f in wider)}; the entry's scope is wider",
                )


def _within(scope: Scope, name: str, values: Sequence[object]) -> bool:
    mine = getattr(scope, name)
    return bool(mine) and ANY not in mine and set(mine) <= set(values)


def _evidence(entry: Entry, gates_digest: str | None, hashes: set[str] | None) -> Iterable[Problem]:
    proof = entry.evidence
    if gates_digest is not None and proof.gates_digest is not None and proof.gates_digest != gates_digest:
        yield Problem(Kind.STALE_GATES, (entry.id,), f"judged by gates {proof.gates_digest[:12]}, now {gates_digest[:12]}")
    if hashes is not None:
        for label in sorted(name for name, sha in proof.traces.items() if sha not in hashes):
            yield Problem(Kind.MISSING_EVIDENCE, (entry.id,), f"the trace {label!r} is not there")
    measured = any((entry.gain.marginal, entry.gain.leave_one_out, entry.gain.series))
    if measured and proof.ledger_hash is None:
        yield Problem(Kind.MISSING_EVIDENCE, (entry.id,), "a measured gain without the ledger line that holds it")


def _audits(entry: Entry, sources: Mapping[str, str] | None) -> Iterable[Problem]:
    if sources is None:
        return
    for audit in (a for a in entry.audit if a.kind == "code"):
        hits = {f: n for f, text in sources.items() if (n := len(re.findall(audit.pattern, text)))}
        covered = {f: n for f, n in hits.items() if _covers(audit, f)}
        count = sum(covered.values())
        if count < audit.least or (audit.most is not None and count > audit.most):
            yield Problem(
                Kind.AUDIT_FAILS_ON_ITS_EVIDENCE,
                (entry.id,),
                f"{audit.pattern!r} is there {count} times in the engine that earned it ({', '.join(covered) or 'nowhere'})",
            )
        missed = sorted(set(hits) - set(covered))
        if audit.most == 0 and missed:
            yield Problem(Kind.AUDIT_MISSES_FILES, (entry.id,), f"{audit.pattern!r} is also in {', '.join(missed)}, which the audit does not read")


def _covers(audit: Audit, file: str) -> bool:
    return not audit.files or any(fnmatch.fnmatch(file, g) or file.endswith("/" + g) for g in audit.files)


def _between(one: Entry, two: Entry) -> Iterable[Problem]:
    pair = (one.id, two.id)
    for a, b in ((one, two), (two, one)):
        for word in sorted(set(a.demands) & set(b.forbids)):
            yield Problem(Kind.DEMANDS_WHAT_IS_FORBIDDEN, (a.id, b.id), f"{a.id} demands {word!r}, {b.id} forbids it")
    for name in sorted(set(one.constants) & set(two.constants)):
        a, b = _value(one.constants[name]), _value(two.constants[name])
        if a != b:
            yield Problem(Kind.CONSTANT_DISAGREES, pair, f"{name} is {a} in one and {b} in the other")
    if one.mechanism == two.mechanism and one.helps != two.helps and one.params == two.params and _known_alike(one, two):
        yield Problem(Kind.OPPOSITE_VERDICTS, pair, f"{one.mechanism} helps and does not help in one scope")


def _value(constant: object) -> object:
    return constant.get("value") if isinstance(constant, dict) else constant


def _known_alike(one: Entry, two: Entry) -> bool:
    """Both scopes are stated in full: two vague entries do not contradict each other about an effect."""
    return all(getattr(e.scope, n) for e in (one, two) for n in Scope.model_fields)
