"""`optimize apply`: replay a run's accepted commits on the user's tree, or as a branch of the user's repository.

All or nothing: everything is merged in memory first, and a file that changed since the snapshot in a way that does
not merge refuses the whole. On a branch the working tree is untouched and one ref is set at the end; on the tree
every file is replaced by a rename, and what was done is undone when one fails. Not for: making patches to mail
(export.py).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from optimizer.runrepo import GitError, RunRepo, git_env


class NotApplied(Exception):
    """Nothing was changed; the message says why."""


@dataclass(frozen=True, slots=True)
class Applied:
    where: str
    commits: int
    files: tuple[str, ...]


def to_tree(repo: RunRepo, base: str, final: str, root: Path) -> Applied:
    """Write what the accepted commits changed below `root`. Raises NotApplied, and then nothing was written."""
    changed = _merged(repo, base, final, root)
    todo = {path: text for path, text in changed.items() if _read(root / path) != text}
    drafts: dict[str, Path] = {}
    backups: dict[str, bytes | None] = {}
    try:
        for path, text in todo.items():
            drafts[path] = _draft(root / path, text)
        for path, draft in drafts.items():
            place = root / path
            backups[path] = place.read_bytes() if place.exists() else None
            draft.replace(place)
    except OSError as error:
        for path, old in backups.items():
            if old is None:
                (root / path).unlink(missing_ok=True)
            else:
                (root / path).write_bytes(old)
        raise NotApplied(f"{error}; the tree is as it was") from error
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return Applied(str(root), len(repo.log(base, final)), tuple(sorted(todo)))


def _draft(place: Path, text: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    with os.fdopen(handle, "wb") as out:
        out.write(text.encode("utf-8", "surrogateescape"))
    draft = Path(name)
    draft.chmod(place.stat().st_mode & 0o777 if place.exists() else 0o644)
    return draft


def _merged(repo: RunRepo, base: str, final: str, root: Path) -> dict[str, str]:
    """Texts of the changed files after merging the run's changes with the user's since the snapshot."""
    changes = repo.name_status(base, final)
    if not changes:
        raise NotApplied("the run accepted nothing: there is nothing to apply")
    if not root.is_dir():
        raise NotApplied(f"{root}: no such folder; a checkout of the target is wanted")
    had = [change.path for change in changes if change.status != "A"]
    if had and not any((root / path).exists() for path in had):
        raise NotApplied(f"{root} is no checkout of the target: it has none of {', '.join(had)}; nothing was changed")
    merged: dict[str, str] = {}
    for change in changes:
        old = repo.show(base, change.path) if change.status != "A" else None
        new = repo.show(final, change.path)
        merged[change.path] = _three_way(change.path, old, _read(root / change.path), new)
    return merged


def _three_way(path: str, old: str | None, mine: str | None, new: str) -> str:
    if mine in (old, new):
        return new
    if mine is None or old is None:
        raise NotApplied(f"{path} was {'removed' if mine is None else 'made'} since the snapshot; nothing was changed")
    with tempfile.TemporaryDirectory(prefix="hotloop-merge-") as tmp:
        places = [Path(tmp, name) for name in ("yours", "snapshot", "optimised")]
        for place, text in zip(places, (mine, old, new), strict=True):
            place.write_bytes(text.encode("utf-8", "surrogateescape"))
        done = subprocess.run(
            ["git", "merge-file", "-p", "-q", *map(str, places)], capture_output=True, env=git_env(), cwd=tmp, check=False
        )
    if done.returncode:
        raise NotApplied(f"{path} changed since the snapshot where the run changed it too; nothing was changed")
    return done.stdout.decode("utf-8", "surrogateescape")


def _read(place: Path) -> str | None:
    try:
        return place.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None


def to_branch(repo: RunRepo, base: str, final: str, root: Path, branch: str) -> Applied:
    """Make `branch` in the git repository around `root`: its HEAD plus one commit per accepted patch.

    The working tree, the index and the user's branches stay as they are. Raises NotApplied.
    """
    top = _toplevel(root)
    user = RunRepo(Path(_git(top, "rev-parse", "--absolute-git-dir").strip()), root / ".unused")
    prefix = root.resolve().relative_to(top).as_posix()
    prefix = "" if prefix == "." else f"{prefix}/"
    ref = f"refs/heads/{branch}"
    _check_name(top, branch)
    head = _git(top, "rev-parse", "HEAD").strip()
    parent = base
    tip = head
    files: set[str] = set()
    for commit in repo.log(base, final):
        changed: dict[str, str | None] = {}
        for change in repo.name_status(parent, commit):
            place = prefix + change.path
            old = repo.show(parent, change.path) if change.status != "A" else None
            mine = _show(user, tip, place)
            changed[place] = _three_way(change.path, old, mine, repo.show(commit, change.path))
            files.add(place)
        title, _, body = repo.message(commit).partition("\n")
        tip = user.commit_sources(tip, changed, title, body, {})
        parent = commit
    if parent == base:
        raise NotApplied("the run accepted nothing: there is nothing to apply")
    try:
        user.git("update-ref", ref, tip, "0" * 40)  # only if it is not there: one atomic step
    except GitError as error:
        raise NotApplied(str(error)) from error
    return Applied(f"branch {branch} of {top}", len(repo.log(base, final)), tuple(sorted(files)))


def _show(user: RunRepo, commit: str, path: str) -> str | None:
    try:
        return user.show(commit, path)
    except GitError:
        return None


def _toplevel(root: Path) -> Path:
    try:
        return Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve()
    except NotApplied:
        raise NotApplied(f"{root} is in no git repository; apply to the tree instead (without --branch)") from None


def _check_name(top: Path, branch: str) -> None:
    try:
        _git(top, "check-ref-format", "--branch", branch)
    except NotApplied:
        raise NotApplied(f"{branch!r} is no name for a branch") from None
    try:
        _git(top, "rev-parse", "--verify", "-q", f"refs/heads/{branch}")
    except NotApplied:
        return
    raise NotApplied(f"branch {branch} exists already; give another name")


def _git(where: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *args], capture_output=True, env=git_env(), cwd=where, check=False
    )
    if done.returncode:
        raise NotApplied(f"git {args[0]}: {done.stderr.decode('utf-8', 'replace').strip() or done.returncode}")
    return done.stdout.decode("utf-8", "surrogateescape")
