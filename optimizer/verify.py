"""`optimize verify`: check offline that a run's accepted patches were judged by the sealed gates.

The ledger's chain must be whole, every line under one seal that is this checkout's, run.json as the run was started, the
commits, their programs and their trailers as the ledger has them, every accepted attempt with all its stages, its patches
those that were proposed, and the weights unchanged. What cannot be looked at
here (an older seal that the run kept, random weights that are on another machine) is said and is no failure. Not for:
judging anything again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizer import seal, state
from optimizer.candidate import patch_sha
from optimizer.ledger import Ledger, LedgerBroken, Line
from optimizer.patching import ast_hash
from optimizer.run import Run, load
from optimizer.runrepo import GitError
from optimizer.serial import build, plain
from optimizer.truth import weights
from optimizer.types import Series


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
    found += [_ended(lines), _request(run, lines), _seal(run), _one_seal(run, lines), _weights(run)]
    found += _commits(run, lines)
    return found


def _ended(lines: Sequence[Line]) -> Check:
    """Lines that were cut off at the end leave a whole chain: only the missing last word shows them."""
    last = lines[-1]["kind"] if lines else "nothing"
    if any(line["kind"] == "finished" for line in lines):
        return Check("end of the ledger", True)
    return Check("end of the ledger", None, f"the run has no `finished` line (its last is {last}): it goes on, or the end was cut off")


def _request(run: Run, lines: Sequence[Line]) -> Check:
    """What was asked for is in run.json, and in the ledger's first line."""
    started = next((line["data"] for line in lines if line["kind"] == "run_started"), None)
    if started is None:
        return Check("run.json", False, "the ledger has no `run_started` line")
    now = plain(run.request)
    moved = {"model_dir", "target_dir", "python", "knowledge"}  # a run may be looked at on another machine
    other = sorted(k for k, v in now.items() if k in started and k not in moved and started[k] != v)
    detail = "; ".join(f"{name} is {str(now[name])[:60]!r}, the run was started with {str(started[name])[:60]!r}" for name in other)
    return Check("run.json", not other, detail)


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
        problems = [*_stages(attempt), *_trailers(run, attempt, by_hash), *_patches(run, attempt)]
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


def _same_python(run: Run) -> bool:
    """Syntax trees, and so their hashes, are comparable only under the Python that the run was made with."""
    recorded = str(run.request.environment.get("python") or "").split(".")[:2]
    return len(recorded) < 2 or recorded == [str(part) for part in sys.version_info[:2]]


def _patches(run: Run, attempt: state.Attempt) -> list[str]:
    """The patches on disk and the programs in the repository are those that were proposed."""
    assert attempt.end is not None
    proposed, problems = attempt.data("proposed"), []
    for commit, line in zip(attempt.end["data"]["commits"], proposed, strict=False):
        if _same_python(run) and run.repo.has(commit) and ast_hash(run.repo.sources(commit, run.target.editable)) != line["ast_hash"]:
            problems.append(f"commit {commit[:12]} holds another program than was proposed (ast_hash)")
    place = run.attempt_dir(attempt.number) / "patch.json"
    if not place.is_file():
        return problems
    try:
        kept = [patch_sha(patch) for patch in build(Series, json.loads(place.read_text("utf-8"))).patches]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [*problems, f"patch.json cannot be read: {error}"]
    if kept != [line["patch_sha"] for line in proposed]:
        problems.append("patch.json holds other patches than were proposed (patch_sha)")
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
