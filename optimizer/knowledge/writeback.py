"""What a run taught, as proposed knowledge entries: filled from the ledger and the run's repository alone.

An accepted series gives one entry per patch (enablers as such); an attempt whose measurement rules out a gain that is
worth having gives one that says so. Where the interval leaves room for such a gain nothing was learned: that a loud machine
could not resolve an effect is no knowledge about the patch. Entries lie in the run's own folder until a person decides (review/). Not for: deciding, or
anything that a running proposer reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer import run as runs
from optimizer import state
from optimizer.knowledge import learning
from optimizer.knowledge.blueprint import (
    Blueprint,
    BlueprintError,
    Detection,
    Entry,
    Evidence,
    Gain,
    Gains,
    Scope,
    Status,
    Variant,
)
from optimizer.ledger import Line
from optimizer.run import Run
from optimizer.runrepo import GitError
from optimizer.state import Attempt
from optimizer.types import RejectReason, Stage, Verdict

FOLDER = "knowledge"  # in the run's folder
# Reasons for which it is of no use here, whatever the target metric said: what the entry's title and its rule say of it.
NO_USE: dict[str, tuple[str, str]] = {
    RejectReason.GUARD: ("Made something else worse", "before what it made worse is mended"),
    RejectReason.NOT_ACTIVATED: ("Did not do what it was to do", "before its patch does what it is to do"),
}
NO_EFFECT = {*NO_USE, RejectReason.NO_GAIN}
WORTH_HAVING = 0.9  # of the incumbent's time: an interval that reaches it leaves the question open
SAYS_NOTHING = {RejectReason.INFRASTRUCTURE, RejectReason.NO_BUDGET, RejectReason.DECLINED, RejectReason.SEAL}


def propose_entries(run_dir: Path, number: int | None = None) -> list[Entry]:
    """Entries of one attempt, or of all, written to runs/<id>/knowledge; those already decided on stay as they are.

    Called again at the end of a run, entries gain what only then is known (leave-one-out, failed variants).
    """
    run = runs.load(run_dir)
    lines = run.ledger.lines()
    found = [e for a in state.attempts(lines) if number in (None, a.number) for e in entries_of(run, lines, a)]
    book = proposals(run_dir)
    decided = {e.id for e in book.entries() if e.status is not Status.PROPOSED}
    new = [e for e in found if e.id not in decided]
    for entry in new:
        book.put(entry)
    for topic in sorted({e.topic for e in new}):
        book.save(topic)
    return new


def ship(run_dir: Path, folder: Path, name: str | None = None) -> list[Entry]:
    """Put what a run taught into a blueprint, as `proposed`, whose reviewers need not have the run. Returns the new ones.

    `name` stands for the run in the entries' ids. What was put there before is filled again, unless it was decided on.
    The run's folder is only read. Raises BlueprintError where an id is already that of something else.
    """
    run = runs.load(run_dir)
    lines = run.ledger.lines()
    book = Blueprint.load(folder) if folder.is_dir() else Blueprint((), folder)
    done = []
    for entry in (e for a in state.attempts(lines) for e in entries_of(run, lines, a)):
        if name is not None:
            entry = entry.model_copy(update={"id": name + entry.id.removeprefix(run.request.id)})
        old = next((e for e in book.entries() if e.id == entry.id), None)
        if old is not None and not same_origin(old, entry):
            raise BlueprintError(f"{entry.id} is already another entry (ledger line {old.evidence.ledger_hash}): ids are never reused; give another --name")
        if old is None or old.status is Status.PROPOSED:
            done.append(entry)
    for entry in done:
        book.put(entry)
    for topic in sorted({e.topic for e in done}):
        book.save(topic, folder)
    return done


def same_origin(one: Entry, two: Entry) -> bool:
    """Whether both were filled from one ledger line and one patch, whatever they are called."""
    a, b = one.evidence, two.evidence
    return a.ledger_hash is not None and (a.ledger_hash, a.patch_sha) == (b.ledger_hash, b.patch_sha)


def proposals(run_dir: Path) -> Blueprint:
    """The entries in a run's folder; empty when there are none yet."""
    folder = run_dir / FOLDER
    return Blueprint.load(folder) if folder.is_dir() else Blueprint((), folder)


def entries_of(run: Run, lines: Sequence[Line], attempt: Attempt) -> list[Entry]:
    """What one attempt taught: [] while it is open, or when it failed for reasons that say nothing of the idea."""
    end = attempt.end
    if end is None:
        return []
    members = attempt.data("proposed")
    if attempt.verdict is Verdict.ACCEPT:
        return [_accepted(run, lines, attempt, at) for at in range(len(members))]
    reason = RejectReason(end["data"]["reason"]) if end["data"].get("reason") else None
    if attempt.verdict is Verdict.PARKED or reason in SAYS_NOTHING:
        return []
    unresolved = attempt.verdict is Verdict.UNDECIDED or reason is RejectReason.NO_GAIN
    if reason in NO_USE or (unresolved and _ruled_out(attempt)):
        return [_without_effect(run, lines, attempt)]
    return []  # a faulty patch is a failed variant of its mechanism, not knowledge about it


def _accepted(run: Run, lines: Sequence[Line], attempt: Attempt, at: int) -> Entry:
    assert attempt.end is not None
    data, members = attempt.end["data"], attempt.data("proposed")
    proposed, last = members[at], at == len(members) - 1
    gain = Gain(ratio=data["ratio"], ci95=tuple(data["ci95"]), pairs=data["pairs"])
    rows = data.get("rows") or {}
    commit = _commit(run, attempt.number, at, data)
    return Entry(
        id=f"{run.request.id}.{attempt.number}" + (f".{at + 1}" if len(members) > 1 else ""),
        topic=proposed["mechanism"],
        mechanism=proposed["mechanism"],
        title=proposed.get("title") or proposed["mechanism"],
        rule=f"Where the signature is there, apply {proposed['mechanism']}: {proposed.get('title') or ''}".rstrip(": "),
        why=f"{gain.ratio:.3f} of the incumbent's time per token [{gain.ci95[0]:.3f}, {gain.ci95[1]:.3f}] in {gain.pairs} pairs",
        role="win" if last else "enabler",
        detection=_detection(proposed, rows),
        scope=_scope(run, attempt),
        params=proposed.get("params") or {},
        gain=Gains(
            marginal=gain if len(members) == 1 else None,
            series=gain if len(members) > 1 else None,
            leave_one_out=_left_out(lines, run, commit),
        ),
        evidence=_evidence(run, lines, attempt, proposed),
        patch=_patch(run, commit),
        pitfalls=_pitfalls(lines, attempt, proposed["mechanism"]),
        failed_variants=_failed(lines, attempt, proposed["mechanism"]),
        remaining_gaps=[f"{name}: {b:.0f} us of its bound are left" for name, (_, b) in sorted(rows.items()) if b],
        proposed_on=attempt.end["t_utc"],
    )


def _measured(attempt: Attempt) -> dict[str, Any] | None:
    """What the last stage that was reached says of the whole series."""
    return next((d for kind in ("confirmed", "decided", "screened") for d in attempt.data(kind) if d.get("member") is None), None)


def _ruled_out(attempt: Attempt) -> bool:
    """Whether the measurement excludes a gain that is worth having."""
    measured = _measured(attempt)
    return measured is not None and bool(measured.get("pairs")) and measured["ci95"][0] > WORTH_HAVING


def _without_effect(run: Run, lines: Sequence[Line], attempt: Attempt) -> Entry:
    assert attempt.end is not None
    proposed, data = attempt.data("proposed")[-1], attempt.end["data"]
    measured = _measured(attempt)
    gain = None
    what, until = NO_USE.get(data.get("reason") or "", ("No effect shown", "before the step has become much faster"))
    if measured is not None and measured.get("pairs"):
        gain = Gain(ratio=measured["ratio"], ci95=tuple(measured["ci95"]), pairs=measured["pairs"])
    return Entry(
        id=f"{run.request.id}.{attempt.number}",
        topic=proposed["mechanism"],
        mechanism=proposed["mechanism"],
        title=f"{what}: {proposed.get('title') or proposed['mechanism']}",
        rule=f"Here, do not spend an attempt on {proposed['mechanism']} {until}",
        why=f"{attempt.verdict} at {data.get('stage')}: {data.get('reason') or 'effect below what could be resolved'}; {data.get('detail') or ''}".rstrip("; "),
        helps=False,
        detection=_detection(proposed, {}),
        scope=_scope(run, attempt),
        params=proposed.get("params") or {},
        gain=Gains(marginal=gain),
        evidence=_evidence(run, lines, attempt, proposed),
        failed_variants=_failed(lines, attempt, proposed["mechanism"]),
        proposed_on=attempt.end["t_utc"],
    )


def _scope(run: Run, attempt: Attempt) -> Scope:
    """Exactly this run, and the engine that the attempt began from: nothing is widened here."""
    assert attempt.end is not None
    facts = learning.facts(run, attempt.end["incumbent_commit"])
    return Scope(**{name: [facts[name]] if facts.get(name) is not None else [] for name in Scope.model_fields})


def _detection(proposed: dict[str, Any], rows: dict[str, Sequence[float | None]]) -> Detection:
    ids = proposed["finding_ids"]
    return Detection(
        signature=f"finding {', '.join(ids)}" if ids else proposed["mechanism"],
        rule=ids[0].partition(":")[0] if ids else None,
        before={name: a for name, (a, _) in rows.items() if a is not None},
        after={name: b for name, (_, b) in rows.items() if b is not None},
    )


def _evidence(run: Run, lines: Sequence[Line], attempt: Attempt, proposed: dict[str, Any]) -> Evidence:
    assert attempt.end is not None
    before = state.captured_as(lines, attempt.end["incumbent_commit"])
    traces = _hashes(run.dir, before.get("traces", ()), "before") if before else {}
    for data in attempt.data("captured"):
        traces.update(_hashes(run.dir, data.get("traces", ()), "after"))
    return Evidence(
        run=run.request.id,
        attempt=attempt.number,
        traces=traces,
        patch_sha=proposed["patch_sha"],
        ledger_hash=attempt.end["hash"],
        gates_digest=attempt.end["gates_digest"],
    )


def _hashes(folder: Path, names: Sequence[str], when: str) -> dict[str, str]:
    """sha256 of those trace files that are there."""
    files = [folder / name for name in names]
    return {f"{when}: {f.relative_to(folder)}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()}


def _commit(run: Run, number: int, at: int, data: dict[str, Any]) -> str | None:
    """The attempt's commit in the run's final history (it may have been made smaller), else the one accepted."""
    try:
        final = [c for c in run.repo.log(run.base, run.repo.incumbent()) if run.repo.trailers(c).get("Attempt") == str(number)]
    except GitError:
        return None
    commits = data.get("commits") or [data.get("commit")]
    if len(final) == len(commits):
        return final[at]
    return commits[at] if at < len(commits) else None


def _patch(run: Run, commit: str | None) -> str | None:
    if commit is None:
        return None
    try:
        return run.repo.diff(f"{commit}^", commit)
    except GitError:
        return None


def _left_out(lines: Sequence[Line], run: Run, commit: str | None) -> Gain | None:
    """From the ablation: time of the final engine over that of the engine without this commit."""
    if commit is None:
        return None
    title = run.repo.message(commit).partition("\n")[0]
    for data in (line["data"] for line in lines if line["kind"] == "decided"):
        whole = data["stage"] == Stage.ABLATE and data.get("title") == title and "hunks" not in data
        if whole and data.get("pairs"):
            return Gain(ratio=data["ratio"], ci95=tuple(data["ci95"]), pairs=data["pairs"])
    return None


def _pitfalls(lines: Sequence[Line], attempt: Attempt, mechanism: str) -> list[str]:
    """How other attempts of the mechanism went wrong, by the gate's reason alone: its words could tell hidden prompts."""
    found: dict[str, list[int]] = {}
    for other in _others(lines, attempt, mechanism):
        assert other.end is not None
        reason = other.end["data"].get("reason")
        if other.verdict is Verdict.REJECT and reason and RejectReason(reason) not in NO_EFFECT | SAYS_NOTHING:
            found.setdefault(f"Can end in {str(reason).replace('_', ' ')} ({other.end['data'].get('stage')})", []).append(other.number)
    return [f"{what}: attempt {', '.join(map(str, numbers))}." for what, numbers in found.items()]


def _others(lines: Sequence[Line], attempt: Attempt, mechanism: str) -> list[Attempt]:
    """Ended attempts of the same mechanism in this run, but for this one."""
    every = (a for a in state.attempts(lines) if a.number != attempt.number and a.end is not None)
    return [a for a in every if a.data("proposed")[-1]["mechanism"] == mechanism]


def _failed(lines: Sequence[Line], attempt: Attempt, mechanism: str) -> list[Variant]:
    """Other attempts of the same mechanism in this run that did not make it."""
    found = []
    for other in _others(lines, attempt, mechanism):
        assert other.end is not None
        proposed = other.data("proposed")[-1]
        if other.verdict in (Verdict.REJECT, Verdict.UNDECIDED):
            data = other.end["data"]
            reason = f"{other.verdict} at {data.get('stage')}: {data.get('reason') or 'not resolved'}"
            found.append(Variant(what=proposed.get("title") or mechanism, reason=reason, attempt=other.number))
    return found


