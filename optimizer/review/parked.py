"""Patches that a run parked for a person (numeric drift, a win that nothing explains), and what the person says.

Admitted, it is judged again when the run is resumed (admit.py); dropped, it is not. Either way the decision is a
`reviewed` line in the ledger and a commit with the reviewer's name in the run's own repository, on branch
`reviewed/<attempt>`: with the patch when it was admitted, without any change when it was dropped.
Not for: knowledge entries (queue.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optimizer import ledger
from optimizer import run as runs
from optimizer.patching import EditMismatch, apply_edits
from optimizer.review import admit
from optimizer.review.diff_view import between
from optimizer.review.queue import ReviewError, whoami
from optimizer.runrepo import GitError
from optimizer.serial import build
from optimizer.state import attempts
from optimizer.types import Patch
from reports import run_data

ADMIT, DROP = "admit", "drop"  # `decision` of the ledger's line


@dataclass(frozen=True, slots=True)
class Parked:
    """One parked attempt. `detail` and `reason` are the ledger's words."""

    run: Path
    attempt: int
    stage: str
    reason: str
    detail: str
    mechanism: str
    title: str
    incumbent: str  # commit that it was judged against
    when: str

    @property
    def id(self) -> str:
        return f"{self.run.name}/{self.attempt}"


def waiting(folder: Path) -> list[Parked]:
    """Every parked attempt that nobody has decided on, newest run first. Runs that cannot be read are left out."""
    found: list[Parked] = []
    for place in sorted((p.parent for p in folder.glob("*/run.json")), reverse=True):
        found += _of_run(place)
    return found


def _of_run(place: Path) -> Iterator[Parked]:
    try:
        lines, _ = ledger.read(place / "ledger.jsonl")
    except (OSError, ledger.LedgerBroken):
        return
    decided = {x["attempt"] for x in lines if x["kind"] == "reviewed" and x["data"].get("decision") in (ADMIT, DROP)}
    for attempt in attempts(lines):
        end = attempt.end
        if end is None or end["kind"] != "parked" or attempt.number in decided:
            continue
        proposed, data = attempt.data("proposed")[-1], end["data"]
        yield Parked(
            run=place,
            attempt=attempt.number,
            stage=str(data.get("stage") or ""),
            reason=str(data.get("reason") or ""),
            detail=str(data.get("detail") or ""),
            mechanism=str(proposed.get("mechanism") or ""),
            title=str(proposed.get("title") or ""),
            incumbent=str(end["incumbent_commit"] or ""),
            when=str(end["t_utc"]),
        )


def diff(item: Parked) -> str:
    """The whole series as one unified diff against its incumbent. Raises ReviewError."""
    before, after = _sources(item)
    return between({p: before[p] for p in before if after.get(p) != before[p]}, {p: t for p, t in after.items() if before.get(p) != t})


def _sources(item: Parked) -> tuple[dict[str, str], dict[str, str]]:
    try:
        run = runs.load(item.run)
        before = run.repo.sources(item.incumbent, run.target.editable)
        after = dict(before)
        for patch in _patches(item):
            after = apply_edits(after, patch)
    except (runs.RunError, GitError, EditMismatch, ValueError) as error:
        raise ReviewError(f"run {item.run.name}, attempt {item.attempt}: {error}") from error
    return before, after


def _patches(item: Parked) -> list[Patch]:
    found = next((a.patches for a in run_data.read(item.run).attempts if a.number == item.attempt), [])
    if not found:
        raise ReviewError(f"{item.run}/attempts/{item.attempt}/patch.json is missing or empty")
    known = Patch.__slots__
    return [build(Patch, {k: v for k, v in patch.items() if k in known}) for patch in found]


def decide(item: Parked, keep: bool, reason: str, reviewer: str | None = None) -> str:
    """Enter a person's decision; returns the commit. Raises ReviewError, LedgerBusy while the run is working."""
    if not reason.strip():
        raise ReviewError("a decision on a parked patch needs a reason")
    who = reviewer or whoami(item.run)
    changed: dict[str, str | None] = {}
    if keep:
        before, after = _sources(item)
        changed = {p: t for p, t in after.items() if before.get(p) != t}
    try:
        run = runs.load(item.run)
        title = f"{'Admit' if keep else 'Drop'}: {item.title or item.mechanism}"
        trailers = {"Attempt": item.attempt, "Parked-for": f"{item.reason} {item.detail}", "Reviewed-by": who}
        commit = run.repo.commit_sources(item.incumbent, changed, title, reason, trailers)
        run.ledger.context.incumbent_commit = item.incumbent
        try:
            if keep:
                admit.admit(run, item.attempt, who, reason)
            else:
                data = {"decision": DROP, "reviewer": who, "reason": reason, "commit": commit}
                run.ledger.append("reviewed", item.attempt, data)
        finally:
            run.ledger.close()
        run.repo.git("update-ref", f"refs/heads/{branch(item)}", commit)
    except (runs.RunError, GitError) as error:
        raise ReviewError(f"run {item.run.name}, attempt {item.attempt}: {error}") from error
    return commit


def branch(item: Parked) -> str:
    return f"reviewed/{item.attempt}"
