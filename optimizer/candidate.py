"""A proposed series becomes commits and checked-out trees: one commit per patch, the series at their end.

Not for: judging what the patches touch (gates), or the user's own tree (apply.py).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.ledger import canonical
from optimizer.patching import NOT_PYTHON, EditMismatch, ast_hash
from optimizer.run import Run
from optimizer.runrepo import GitError
from optimizer.serial import plain
from optimizer.services import Proposal, Services, Stop
from optimizer.types import LaunchSpec, Patch, RejectReason, Series, Verdict


@dataclass(frozen=True, slots=True)
class Member:
    """One patch of a series, applied."""

    patch: Patch
    parent: str
    commit: str
    key: str  # AST hash of its program
    spec: LaunchSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is judged: the end of the series against the incumbent, every member under the gates."""

    number: int
    series: Series
    incumbent: LaunchSpec
    members: tuple[Member, ...]
    admitted: bool = False  # by a person, after it had been parked

    @property
    def end(self) -> Member:
        return self.members[-1]

    @property
    def predicted_us(self) -> float:
        return sum(member.patch.predicted_us for member in self.members)


def patch_sha(patch: Patch) -> str:
    """sha256 of the patch's canonical form."""
    return hashlib.sha256(canonical(plain(patch))).hexdigest()


def keys(do: Services, sources: Mapping[str, str], series: Series) -> list[str]:
    """AST hash of the program after each patch; from the first that does not apply on, the hash of the patch."""
    found: list[str] = []
    texts: Mapping[str, str] | None = sources
    for patch in series.patches:
        if texts is not None:
            try:
                texts = do.apply_edits(texts, patch)
            except EditMismatch:
                texts = None
        found.append(patch_sha(patch) if texts is None else ast_hash(texts))
    return found


def build(run: Run, do: Services, proposal: Proposal) -> Candidate:
    """Apply every patch as a commit of its own. Raises Stop when an edit does not match or leaves no Python."""
    parent = start = run.repo.incumbent()
    members: list[Member] = []
    for at, patch in enumerate(proposal.series.patches):
        sources = run.repo.sources(parent, run.target.editable)
        try:
            after = do.apply_edits(sources, patch)
        except EditMismatch as error:
            raise Stop(Verdict.REJECT, "apply", RejectReason.DECLINED, str(error)) from None
        changed = {path: text for path, text in after.items() if sources.get(path) != text}
        if not changed:
            raise Stop(Verdict.REJECT, "apply", RejectReason.DECLINED, "the edits change nothing")
        _parses(changed)
        trailers = {
            "Attempt": proposal.number,
            "Finding": ", ".join(patch.finding_ids),
            "Mechanism": patch.mechanism,
            "Predicted-us": f"{patch.predicted_us:g} per {patch.per}",
        }
        try:
            commit = run.repo.commit_sources(parent, changed, patch.title or patch.mechanism, _words(patch), trailers)
        except (GitError, UnicodeError) as error:  # a path or a word that git cannot hold
            raise Stop(Verdict.REJECT, "apply", RejectReason.DECLINED, str(error)) from None
        name = str(proposal.number) if at == len(proposal.series.patches) - 1 else f"{proposal.number}.{at + 1}"
        members.append(Member(patch, parent, commit, ast_hash(after), run.spec(commit, name, "candidate")))
        parent = commit
    incumbent = run.spec(start, incumbent_name(start), "incumbent")
    return Candidate(proposal.number, proposal.series, incumbent, tuple(members), proposal.admitted)


def _words(patch: Patch) -> str:
    """The body of a patch's commit: what must stay true, and what could go wrong."""
    parts = [f"Must stay true: {'; '.join(patch.invariants)}." if patch.invariants else "", patch.risk]
    return "\n\n".join(part for part in parts if part)


def incumbent_name(commit: str) -> str:
    """Folder of the incumbent's tree; its own, so that no attempt's clean-up takes it away."""
    return f"incumbent-{commit[:12]}"


def _parses(changed: Mapping[str, str]) -> None:
    for path, text in changed.items():
        if path.endswith(".py"):
            try:
                ast.parse(text)
            except NOT_PYTHON as error:
                why = str(error) or type(error).__name__
                raise Stop(Verdict.REJECT, "apply", RejectReason.DECLINED, f"{path} does not parse: {why}") from None
