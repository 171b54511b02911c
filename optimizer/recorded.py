"""A kept record's repository as a copy that can be worked in: a record may leave out blobs that lie in this checkout.

Not for: making such records, or repositories of running runs (`runrepo.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from optimizer.run import Run
from optimizer.runrepo import GitError, RunRepo

CHECKOUT = Path(__file__).resolve().parent.parent


class Incomplete(RuntimeError):
    """The record leaves out a file that is nowhere here; the message names it."""


def whole_copy(record: Run, git_dir: Path, worktrees: Path, places: Sequence[Path] = ()) -> RunRepo:
    """Copy the record's repository to `git_dir` (made anew) and fill in what it leaves out. The record is only read.

    places: roots in which a file left out may lie under its own path; then the target's folder, then this checkout.
    Raises Incomplete.
    """
    shutil.rmtree(git_dir, ignore_errors=True)
    git_dir.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(record.repo.git_dir, git_dir)
    repo = RunRepo(git_dir, worktrees)
    missing = {line[1:] for line in repo.git("rev-list", "--objects", "--all", "--missing=print").splitlines() if line.startswith("?")}
    if not missing:
        return repo
    for row in repo.git("ls-tree", "-r", "-z", record.base).split("\0"):
        about, _, path = row.partition("\t")
        sha = about.split(" ")[-1]
        if sha in missing and _fill(repo, sha, path, (*places, record.target.root, CHECKOUT)):
            missing.discard(sha)
    if missing:
        raise Incomplete(f"the record's repository leaves out {len(missing)} files that are not here, {sorted(missing)[0][:12]} among them")
    return repo


def _fill(repo: RunRepo, sha: str, path: str, places: Sequence[Path]) -> bool:
    for place in places:
        file = place / path
        try:
            if file.is_file() and repo.git("hash-object", "--no-filters", str(file)).strip() == sha:
                repo.git("hash-object", "-w", "--no-filters", str(file))
                return True
        except GitError:
            continue
    return False
