"""`optimize verify`: check offline that a run's accepted patches were judged by the sealed gates.

The ledger's chain must be whole, every line under one seal that is this checkout's, the commits and their trailers
as the ledger has them, every accepted attempt with all its stages, and the weights unchanged. What cannot be looked at
here (an older seal that the run kept, random weights that are on another machine) is said and is no failure. Not for:
judging anything again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizer import seal, state
from optimizer.ledger import Ledger, LedgerBroken, Line
from optimizer.run import Run, load
from optimizer.runrepo import GitError
from optimizer.truth import weights


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    ok: bool | None  # None: could not be looked at here, see `detail`
    detail: str = ""


def verify(place: Path) -> list[Check]:
    """Every check with its outcome; none may have failed. Raises RunError when there is no run to look at."""
    try:
        run = load(place)
        notes = Ledger(place / "ledger.jsonl").verify()
    except LedgerBroken as error:
        return [Check("ledger chain", False, str(error))]
    lines = run.ledger.lines()
    found = [Check("ledger chain", True, "; ".join([f"{len(lines)} lines", *notes]))]
    found += [_seal(run), _one_seal(run, lines), _weights(run)]
    found += _commits(run, lines)
    return found


def _seal(run: Run) -> Check:
    try:
        seal.verify()
        now = seal.digest()
    except seal.SealBroken as error:
        return Check("seal of this checkout", False, str(error))
    had, kept = run.request.gates_digest, run.dir / "seal" / "SEAL"
    if now == had:
        return Check("seal of this checkout", True, now)
    if kept.is_file() and seal.digest(kept) == had:
        why = f"the run was judged by gates version {seal.version(kept)} (its SEAL is kept with it), here is version {seal.version()}"
        return Check("seal of this checkout", None, why)
    return Check("seal of this checkout", False, f"{now} here, the run had {had}")


def _one_seal(run: Run, lines: Sequence[Line]) -> Check:
    others = sorted({str(line["gates_digest"]) for line in lines} - {str(run.request.gates_digest)})
    return Check("one seal throughout", not others, "" if not others else f"lines under {', '.join(others)}")


def _weights(run: Run) -> Check:
    try:
        now = weights.digest(run.request.model_dir)
    except OSError as error:
        seed = run.request.weights_seed
        if seed is not None and not run.request.model_dir.exists():
            return Check("weights", None, f"not on this machine; random ones of seed {seed}, sha256 {run.request.weights_sha256}")
        return Check("weights", False, str(error))
    same = now == run.request.weights_sha256
    return Check("weights", same, now if same else f"{now} now, the run had {run.request.weights_sha256}")


def _commits(run: Run, lines: Sequence[Line]) -> Iterator[Check]:
    """Accepted attempts one by one, then that nothing else lies on the incumbent's branch."""
    by_hash = {line["hash"]: line for line in lines}
    known: set[str] = set()
    for attempt in state.attempts(lines):
        if attempt.end is None or attempt.end["kind"] != "accepted":
            continue
        problems = [*_stages(attempt), *_trailers(run, attempt, by_hash)]
        known.update(attempt.end["data"]["commits"])
        yield Check(f"attempt {attempt.number}", not problems, "; ".join(problems))
    final = state.incumbent(lines, run.base)
    try:
        trees = {run.repo.tree_of(c): c for c in known}
        titles = {run.repo.message(c) for c in known}
        extra = [c[:12] for c in run.repo.log(run.base, final) if c not in known and run.repo.message(c) not in titles]
        same = run.repo.incumbent() == final
    except GitError as error:
        yield Check("repository", False, str(error))
        return
    why = f"not in the ledger: {', '.join(extra)}" if extra else "" if same else "the incumbent is not the last accepted"
    yield Check("repository", not extra and same, why or f"{len(trees)} commits")


def _stages(attempt: state.Attempt) -> list[str]:
    """An acceptance without its gates or stages."""
    problems = []
    members = len(attempt.data("proposed"))
    for stage in ("quick", "full"):
        for at in range(members):
            if not attempt.gates_passed(stage, at):
                problems.append(f"{stage} gates of patch {at + 1} are not in the ledger")
    looked = state.admitted(attempt)  # a person admitted what was parked
    failed = [g["gate"] for g in attempt.data("gate") if not g["passed"] and not (looked and g.get("parked"))]
    problems += [f"gate {name} did not pass" for name in failed]
    for kind in ("screened", "decided", "confirmed"):
        ends = [d for d in attempt.data(kind) if d.get("member") is None]
        if not any(d["passed"] or (looked and d.get("parked")) for d in ends):
            problems.append(f"not {kind}")
    return problems


def _trailers(run: Run, attempt: state.Attempt, by_hash: dict[str, Line]) -> list[str]:
    assert attempt.end is not None
    problems = []
    for commit in attempt.end["data"]["commits"]:
        name = commit[:12]
        if not run.repo.has(commit):
            problems.append(f"commit {name} is not in the repository")
            continue
        found = run.repo.trailers(commit)
        if found.get("Gates-digest") != attempt.end["gates_digest"]:
            problems.append(f"{name}: Gates-digest is {found.get('Gates-digest')!r}")
        if found.get("Attempt") != str(attempt.number):
            problems.append(f"{name}: Attempt is {found.get('Attempt')!r}")
        line = by_hash.get(found.get("Ledger-hash", ""))
        if line is None or line["kind"] != "confirmed" or line["attempt"] != attempt.number:
            problems.append(f"{name}: Ledger-hash does not name this attempt's confirmation")
    return problems
