"""The queue of knowledge entries that wait for a person, and what happens when one decides.

`proposed` entries of runs and `imported` or `proposed` ones of the blueprint are shown with their evidence; a
decision writes the entry with reviewer and date, commits it where the blueprint lies in a git repository, and adds
a `reviewed` line to the run's ledger. Not for: making entries (writeback.py), or drawing web pages.
"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from optimizer import seal
from optimizer.knowledge import check as blueprint_check
from optimizer.knowledge import writeback
from optimizer.knowledge.blueprint import BLUEPRINT, Blueprint, Entry, Gain, Scope, Status
from optimizer.knowledge.check import Kind, Problem
from optimizer.ledger import Ledger, LedgerBusy

WAITING = (Status.PROPOSED, Status.IMPORTED)


class ReviewError(Exception):
    """A decision that cannot be made; one clear line."""


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of the queue. `run` is its run's folder, None for entries that already lie in the blueprint."""

    entry: Entry
    run: Path | None


def queue(runs: Path, folder: Path = BLUEPRINT) -> list[Item]:
    """Everything that waits: entries of runs first, newest run first, then the blueprint's proposed ones, then imported ones.

    Entries of runs are filled again from their ledgers. A run that cannot be read is left out; `optimize status`
    says what is wrong with it.
    """
    found: list[Item] = []
    book = Blueprint.load(folder) if folder.is_dir() else Blueprint((), folder)
    there = book.entries()
    for place in sorted((p.parent for p in runs.glob("*/run.json")), reverse=True):
        mine = [e for e in _of_run(place) if e.status in WAITING]
        found += [Item(e, place) for e in mine if not any(writeback.same_origin(e, other) for other in there)]
    order = sorted((e for e in there if e.status in WAITING), key=lambda e: (WAITING.index(e.status), e.id))
    return found + [Item(e, None) for e in order]


def _of_run(place: Path) -> list[Entry]:
    try:
        writeback.propose_entries(place)
    except Exception:  # noqa: BLE001  (one broken run must not hide the queue of all others)
        return []
    return sorted(writeback.proposals(place).entries(), key=lambda e: (e.evidence.attempt or 0, e.id))


def find(items: list[Item], name: str) -> Item:
    """The item with this id, or the only one whose id begins so. Raises ReviewError."""
    exact = [i for i in items if i.entry.id == name]
    found = exact or [i for i in items if i.entry.id.startswith(name)]
    if len(found) != 1:
        what = "no entry in the queue begins" if not found else f"{len(found)} entries in the queue begin"
        raise ReviewError(f"{what} with {name!r}; there are: {', '.join(i.entry.id for i in items) or 'none'}")
    return found[0]


def problems(item: Item, folder: Path = BLUEPRINT, as_accepted: bool = True) -> list[Problem]:
    """What the validator says of the entry beside the accepted ones."""
    book = Blueprint.load(folder) if folder.is_dir() else Blueprint((), folder)
    entry = item.entry.model_copy(update={"status": Status.ACCEPTED}) if as_accepted else item.entry
    others = [e for e in book.entries() if e.status is Status.ACCEPTED and e.id != entry.id]
    found = blueprint_check.check([*others, entry], gates_digest=seal.digest(), files=present([item]))
    return [*_taken(item, book), *(p for p in found if entry.id in p.entries)]


def present(items: Iterable[Item]) -> set[str]:
    """sha256 of the traces that these entries cite and that are here, in their run, a shipped record or the baselines."""
    from optimizer.review import evidence  # draws in the reading of traces, which listing needs only here

    files = (f for i in items for f in evidence.traces(i.entry, i.run or evidence.record(i.entry)))
    return {f.sha256 for f in files if f.path is not None}


def _taken(item: Item, book: Blueprint) -> list[Problem]:
    """An entry of a run whose id the blueprint knows as that of something else: a decision would overwrite that."""
    other = next((e for e in book.entries() if e.id == item.entry.id), None) if item.run is not None else None
    if item.run is None or other is None or writeback.same_origin(other, item.entry):
        return []
    hint = f"`optimize knowledge propose {item.run} --name OTHER` gives it an id of its own"
    return [Problem(Kind.DUPLICATE_ID, (item.entry.id,), f"the blueprint has another entry of this id, and ids are never reused; {hint}")]


def accept(
    item: Item,
    reviewer: str | None = None,
    reason: str | None = None,
    scope: Mapping[str, list[Any]] | None = None,
    folder: Path = BLUEPRINT,
) -> Entry:
    """Admit the entry, with fields of its scope replaced as given. Raises ReviewError on a blocking problem."""
    entry = item.entry
    if scope:
        try:
            entry = entry.model_copy(update={"scope": Scope.model_validate({**entry.scope.model_dump(), **scope})})
        except ValidationError as error:
            first = error.errors()[0]
            raise ReviewError(f"scope: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    blocking = [p for p in problems(Item(entry, item.run), folder) if p.blocking]
    if blocking:
        raise ReviewError("cannot be accepted: " + "; ".join(map(str, blocking)))
    return _decide(Item(entry, item.run), Status.ACCEPTED, reviewer, reason, folder)


def reject(item: Item, reason: str, reviewer: str | None = None, folder: Path = BLUEPRINT) -> Entry:
    """Keep the entry out; it stays on file with the reason, so that nobody proposes it again unasked."""
    if not reason.strip():
        raise ReviewError("a rejection needs a reason")
    return _decide(item, Status.REJECTED, reviewer, reason, folder)


def _decide(item: Item, status: Status, reviewer: str | None, reason: str | None, folder: Path) -> Entry:
    if taken := _taken(item, Blueprint.load(folder) if folder.is_dir() else Blueprint()):
        raise ReviewError(f"nothing was decided: {taken[0].detail}")
    who = reviewer or whoami(folder)
    entry = item.entry.model_copy(
        update={"status": status, "reviewer": who, "reason": reason, "decided_on": datetime.now(UTC).date().isoformat()}
    )
    line = _enter(item, entry)  # first: a run that is still going refuses, and then nothing was decided
    book = Blueprint.load(folder) if folder.is_dir() else Blueprint((), folder)
    book.put(entry)
    file = book.save(entry.topic, folder)
    if status is Status.ACCEPTED:
        _supersede(book, entry, folder)
    _commit(folder, file, entry, line)
    if item.run is not None:
        mine = writeback.proposals(item.run)
        mine.put(entry)
        mine.save(entry.topic)
    return entry


def _enter(item: Item, entry: Entry) -> str | None:
    """The decision as a line of the run's ledger; returns the line's hash. Raises ReviewError while the run goes on."""
    if item.run is None:
        return None
    ledger = Ledger(item.run / "ledger.jsonl")
    data = {"entry": entry.id, "decision": entry.status.value, "reviewer": entry.reviewer, "reason": entry.reason}
    try:
        return ledger.append("reviewed", entry.evidence.attempt, data)["hash"]
    except LedgerBusy:
        raise ReviewError(f"run {item.run.name} is still going; decide when it has ended") from None
    finally:
        ledger.close()


def _supersede(book: Blueprint, entry: Entry, folder: Path) -> None:
    for old in [e for e in book.entries() if e.id in entry.supersedes and e.status is Status.ACCEPTED]:
        book.put(old.model_copy(update={"status": Status.SUPERSEDED, "reason": f"superseded by {entry.id}"}))
        book.save(old.topic, folder)


def whoami(folder: Path) -> str:
    """The reviewer's name: git's user.name, else the login name."""
    name = _git(folder, "config", "user.name")
    return name or os.environ.get("USER") or getpass.getuser()


def _git(folder: Path, *args: str) -> str | None:
    """Output of git in the blueprint's repository; None when it is in none, or git fails."""
    try:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit(folder: Path, file: Path, entry: Entry, line: str | None) -> str | None:
    """Commit exactly the blueprint's folder; None outside a repository, or when git would not."""
    if _git(folder, "rev-parse", "--show-toplevel") is None or _git(folder, "check-ignore", "-q", str(file)) is not None:
        return None
    verb = "Accept" if entry.status is Status.ACCEPTED else "Reject"
    message = f"{verb} knowledge {entry.id}\n\n{entry.title}\n\nReviewed-by: {entry.reviewer}\nReason: {entry.reason or '-'}"
    if line is not None:
        message += f"\nLedger-hash: {line}"
    name = ("-c", f"user.name={entry.reviewer}") if _git(folder, "config", "user.name") is None else ()
    mail = ("-c", "user.email=reviewer@localhost") if _git(folder, "config", "user.email") is None else ()
    if _git(folder, "add", "--", ".") is None:
        return None
    if _git(folder, *name, *mail, "commit", "-q", "-m", message, "--", ".") is None:
        return None
    return _git(folder, "rev-parse", "HEAD")


# -- what the terminal shows ------------------------------------------------------------------------------------


def table(items: list[Item]) -> Table:
    """The queue, one row an entry."""
    shown = Table(title=f"{len(items)} entries wait for a person", title_justify="left")
    for name in ("id", "status", "mechanism", "gain", "where"):
        shown.add_column(name, overflow="fold")
    for item in items:
        entry = item.entry
        where = ", ".join(f"{k} {v[0]}" for k in ("engine", "tp", "device") if (v := getattr(entry.scope, k))) or "unknown"
        shown.add_row(escape(entry.id), entry.status.value, escape(entry.mechanism), effect(entry), escape(where))
    return shown


def effect(entry: Entry) -> str:
    """What was measured, in one line; an entry may advise against what was faster (a guard that got worse)."""
    gain = entry.gain.marginal or entry.gain.series
    measured = percent(gain) if gain else "not measured here"
    return measured if entry.helps else f"advises against: {measured}"


def percent(gain: Gain) -> str:
    """A ratio of times as a speed-up with its interval: in per cent, or from twice as fast as a factor."""
    low, high = sorted(1 / r - 1 for r in gain.ci95)
    if 1 / gain.ratio >= 2:
        return f"{1 / gain.ratio:.1f}x [{low + 1:.1f}x, {high + 1:.1f}x]"
    return f"{1 / gain.ratio - 1:+.1%} [{low:+.1%}, {high:+.1%}]"


def show(item: Item, folder: Path = BLUEPRINT) -> Group:
    """One entry with everything a decision needs: rule, scope, gains, evidence, problems, patch."""
    entry = item.entry
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(entry):
        if value:
            facts.add_row(name, escape(str(value)))
    parts: list[Any] = [Panel(facts, title=escape(f"{entry.id}: {entry.title}"), title_align="left")]
    found = problems(item, folder)
    if found:
        lines = "\n".join(f"{'blocks' if p.blocking else 'note'}: {p}" for p in found)
        parts.append(Panel(escape(lines), title="what the validator says", title_align="left", style="yellow"))
    if entry.patch:
        parts.append(Syntax(entry.patch[:20_000], "diff", word_wrap=True, background_color="default"))
    return Group(*parts)


def _facts(entry: Entry) -> Iterator[tuple[str, Any]]:
    yield "rule", entry.rule
    yield "why", entry.why
    yield "role", entry.role if entry.helps else "does not help here"
    yield "signature", entry.detection.signature
    for name, value in entry.detection.before.items():
        after = entry.detection.after.get(name)
        yield f"  {name}", f"bound {value:.0f} us before, {'gone' if after is None else f'{after:.0f} us'} after"
    yield "scope", "; ".join(f"{k} {', '.join(map(str, v))}" for k, v in entry.scope.model_dump().items() if v) or "unknown"
    for name in ("marginal", "leave_one_out", "series"):
        gain = getattr(entry.gain, name)
        yield f"gain ({name.replace('_', '-')})", f"{percent(gain)} in {gain.pairs} pairs" if gain else None
    yield "parameters", json.dumps(entry.params) if entry.params else None
    for name in ("preconditions", "pitfalls", "remaining_gaps", "conflicts_with", "supersedes"):
        yield name.replace("_", " "), "; ".join(getattr(entry, name))
    yield "failed variants", "; ".join(f"{v.what} ({v.reason})" for v in entry.failed_variants)
    proof = entry.evidence
    yield "evidence", "; ".join(f"{k} {str(v)[:16]}" for k, v in proof.model_dump(exclude={"traces"}).items() if v)
    yield "traces", "; ".join(f"{k} {v[:12]}" for k, v in proof.traces.items())
    yield "sources", "; ".join(f"{r.repository} {r.file}" for r in entry.source_refs)
    if entry.legacy is not None:
        yield "imported from", "; ".join(f"{k} {v}" for k, v in entry.legacy.model_dump().items() if v)
