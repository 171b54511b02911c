"""Hunk by hunk at the end of a run: what of an accepted patch buys nothing is taken out of it.

Delta debugging (`minimise.py`) over the hunks of each commit. A smaller commit takes its place when the final engine
is shown to buy less than the margin over the one with the smaller commit, and that one passes every gate: the same
test as leaving out a whole commit. Hunks that change no program (comments, layout) stay with the rest. Taken only as
far as the budget allows. Not for: whole commits (`ablate.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer import budget
from optimizer.ablate import compare, pass_gates
from optimizer.candidate import incumbent_name
from optimizer.judge import failures
from optimizer.minimise import Hunk, apply_hunks, hunks_of, minimise
from optimizer.patching import ast_hash
from optimizer.run import Run
from optimizer.runrepo import Conflict
from optimizer.serial import plain
from optimizer.services import Services, Stop
from optimizer.types import Stage, StageResult
from optimizer.verdicts import follow

MAX_TESTS = 6  # per commit: each costs a stage of pairs


def shrink(run: Run, do: Services) -> None:
    """Try each accepted commit of several hunks, newest first; what a killed run had finished is not repeated."""
    for commit in reversed(run.repo.log(run.base, run.repo.incumbent())):
        title = run.repo.message(commit).partition("\n")[0]
        if commit not in run.repo.log(run.base, run.repo.incumbent()) or title in _done(run):
            continue
        if not do.budget.fits(_cost(do)):
            return
        _Trial(run, do, commit, title).go()


def _cost(do: Services) -> float:
    costs = budget.measured(do.budget.lines())
    return do.protocol.decide_pairs * (costs.pair or 0.0) + (costs.gates or 0.0)


def _done(run: Run) -> set[str]:
    decided = [line["data"] for line in run.ledger.lines() if line["kind"] == "decided"]
    return {d["title"] for d in decided if d["stage"] == Stage.ABLATE and "hunks" in d}


def active(before: Mapping[str, str], hunks: Sequence[Hunk]) -> tuple[list[Hunk], list[Hunk]]:
    """(hunks that change the program, hunks that do not): leaving one of the second kind out keeps every AST."""
    whole = _trees(apply_hunks(before, hunks))
    quiet = [h for h in hunks if _trees(apply_hunks(before, [x for x in hunks if x is not h])) == whole]
    return [h for h in hunks if h not in quiet], quiet


def _trees(sources: Mapping[str, str]) -> dict[str, str] | None:
    """A dump per file; None where one does not parse."""
    try:
        return {name: ast.dump(ast.parse(text)) for name, text in sources.items()}
    except SyntaxError:
        return None


class _Trial:
    """One commit under delta debugging. `best` is the final engine with the smallest commit found so far."""

    def __init__(self, run: Run, do: Services, commit: str, title: str) -> None:
        self.run, self.do, self.commit, self.title = run, do, commit, title
        self.final = run.repo.incumbent()
        self.parent = run.repo.git("rev-parse", f"{commit}^").strip()
        commits = run.repo.log(run.base, self.final)
        self.later = commits[commits.index(commit) + 1 :]
        globs = run.target.editable
        self.before = run.repo.sources(self.parent, globs)
        self.hunks = hunks_of(self.before, run.repo.sources(commit, globs))
        self.best: str | None = None
        self.result = StageResult(Stage.ABLATE, True, None, 1.0, (0.0, 1e9), 0, why="nothing could be left out")
        self.notes: list[str] = []

    def go(self) -> None:
        """Find the smallest commit, put it in place, enter what was done."""
        live, quiet = active(self.before, self.hunks)
        if len(live) < 2:
            return
        kept = minimise(live, lambda subset: self.still_good([*subset, *quiet]), MAX_TESTS)
        data: dict[str, Any] = {
            **plain(self.result), "commit": self.commit, "title": self.title, "passed": self.best is None,
            "hunks": len(self.hunks), "kept": len(kept) + len(quiet), "tried": self.notes,
        }  # fmt: skip
        if self.best is not None:
            data["incumbent"] = self.best
            self.do.view.note(f"“{self.title}”: {len(kept) + len(quiet)} of {len(self.hunks)} hunks do all the work; the rest is dropped")
        self.run.ledger.append("decided", None, data)
        follow(self.run)

    def still_good(self, subset: Sequence[Hunk]) -> bool:
        """Whether the final engine with only these hunks of the commit is as fast and passes every gate."""
        sources = apply_hunks(self.before, subset)
        if _trees(sources) is None or not self.do.budget.fits(_cost(self.do)):
            return False
        try:
            smaller = self.smaller(sources)
        except Conflict:
            return False
        arm = self.run.spec(smaller, f"smaller-{smaller[:12]}", "smaller")
        try:
            with failures(self.run, Stage.ABLATE):
                good = self.judged(arm, smaller)
        except Stop as stop:
            good = False
            self.notes.append(f"{len(subset)} hunks: {stop.reason}: {stop.detail}"[:300])
        finally:
            self.run.repo.drop_tree(arm.tree.name)
        if good:
            self.best = smaller
        return good

    def judged(self, arm: Any, smaller: str) -> bool:
        """Cheapest first: quick gates are part of `pass_gates`, timing of a broken engine fails by itself."""
        last = self.run.spec(self.final, incumbent_name(self.final), "final")
        key = ast_hash(self.run.repo.sources(smaller, self.run.target.editable))
        attempt = int(self.run.repo.trailers(self.commit).get("Attempt", "0"))
        result = compare(self.run, self.do, arm, last, key, attempt)
        self.notes.append(result.why)
        if result.passed:
            return False
        pass_gates(self.do, arm, last, self.final, smaller)
        self.result = result
        return True

    def smaller(self, sources: Mapping[str, str]) -> str:
        """The final engine in which this commit has only these changes. Raises Conflict."""
        changed: dict[str, str | None] = {n: t for n, t in sources.items() if t != self.before.get(n)}
        draft = self.run.repo.commit_sources(self.parent, changed, self.title, "", {})
        words = self.run.repo.message(self.commit)
        commit = self.run.repo.git("commit-tree", self.run.repo.tree_of(draft), "-p", self.parent, "-F", "-", stdin=words + "\n").strip()
        return self.run.repo.replay(self.later, commit)
