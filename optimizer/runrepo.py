"""A run's own git repository: a snapshot of the target, one commit per patch, a clean tree per attempt.

Git is used hermetically: our own identity, no user or system configuration, no hooks, no attributes, no history
of the target to read. Trees are plain checkouts without a `.git`, so a candidate sees files and nothing else.
Not for: deciding what a patch may touch (gates/scope judge `name_status`), nor replaying commits on the user's
tree (apply.py).
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from optimizer.types import Target

INCUMBENT = "refs/heads/incumbent"
# Larger files are weights; they reach an engine through the mounted model folder, not through its tree.
LARGEST_BYTES = 32 << 20
_SKIP_DIRS = {"__pycache__", ".git", ".venv", "venv", "runs", "node_modules", ".pytest_cache", ".ruff_cache"}
_SKIP_SUFFIXES = {".pyc", ".pyo", ".so", ".o"}


class GitError(Exception):
    """git refused; the message holds its words."""


class Conflict(Exception):
    """A commit does not apply where it is replayed; the message names the file."""


class SnapshotError(Exception):
    """The target folder cannot be snapshot; the message names the file."""


def git_env(index: Path | None = None, work_tree: Path | None = None) -> dict[str, str]:
    """A complete environment for git in which nothing of the user's reaches it."""
    env = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": "hotloop",
        "GIT_AUTHOR_EMAIL": "hotloop@localhost",
        "GIT_COMMITTER_NAME": "hotloop",
        "GIT_COMMITTER_EMAIL": "hotloop@localhost",
        # Dates are fixed so that a resumed attempt rebuilds the very same commit.
        "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
        "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    }
    if index is not None:
        env["GIT_INDEX_FILE"] = str(index)
    if work_tree is not None:
        env["GIT_WORK_TREE"] = str(work_tree)
    return env


_SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*", "-c", "core.quotePath=false")


@dataclass(frozen=True, slots=True)
class Snapshot:
    commit: str
    files: int
    left_out: tuple[str, ...]  # too large: weights


@dataclass(frozen=True, slots=True)
class Change:
    """One row of git's raw name-status between two commits."""

    status: str  # A, M, D, T ...
    path: str
    old_mode: str  # "100644"; "000000" where there was no file
    new_mode: str


class RunRepo:
    """`repo.git` and the trees beside it. All paths are relative to the target's root, with forward slashes."""

    def __init__(self, git_dir: Path, worktrees: Path) -> None:
        self.git_dir = git_dir.resolve()  # git runs in its parent
        self.worktrees = worktrees.resolve()

    # -- making it -------------------------------------------------------------------------------------------

    def create(self, target: Target) -> Snapshot:
        """Make the repository with one root commit holding the target's folder. Finishes a half-made one."""
        if not (self.git_dir / "HEAD").exists():
            self.git_dir.parent.mkdir(parents=True, exist_ok=True)
            self.git("init", "-q", "--bare", "--template=", "-b", "incumbent", str(self.git_dir), in_repo=False)
        info = self.git_dir / "info"
        info.mkdir(exist_ok=True)
        # Bytes are bytes: no line-ending conversion, no filters, whatever the snapshot's own .gitattributes say.
        (info / "attributes").write_text("* -text -filter -ident -working-tree-encoding\n")
        files, left_out = snapshot_files(target)
        tree = self._write_tree(target.root, files)
        commit = self._commit(tree, (), f"Snapshot of {target.name}\n")
        self.git("update-ref", INCUMBENT, commit)
        return Snapshot(commit, len(files), left_out)

    def _write_tree(self, root: Path, files: Sequence[tuple[str, str]]) -> str:
        # Plumbing instead of `git add`: a target may hold ignored files and nested repositories.
        regular = [path for path, mode in files if mode != "120000"]
        shas = self.git("hash-object", "-w", "--no-filters", "--stdin-paths", cwd=root, stdin="\n".join(regular))
        by_path = dict(zip(regular, shas.split(), strict=True))
        for path, mode in files:
            if mode == "120000":
                by_path[path] = self.git("hash-object", "-w", "--stdin", stdin=str((root / path).readlink())).strip()
        rows = "".join(f"{mode} {by_path[path]}\t{path}\n" for path, mode in files)
        with tempfile.TemporaryDirectory(dir=self.git_dir) as tmp:
            index = Path(tmp, "index")
            self.git("update-index", "--index-info", index=index, stdin=rows)
            return self.git("write-tree", index=index).strip()

    def _commit(self, tree: str, parents: Iterable[str], message: str) -> str:
        args = [arg for parent in parents for arg in ("-p", parent)]
        return self.git("commit-tree", tree, *args, "-F", "-", stdin=message).strip()

    # -- reading ---------------------------------------------------------------------------------------------

    def incumbent(self) -> str:
        return self.git("rev-parse", INCUMBENT).strip()

    def set_incumbent(self, commit: str) -> None:
        self.git("update-ref", INCUMBENT, commit)

    def tree_of(self, commit: str) -> str:
        return self.git("rev-parse", f"{commit}^{{tree}}").strip()

    def has(self, commit: str) -> bool:
        try:
            self.git("cat-file", "-e", f"{commit}^{{commit}}")
        except GitError:
            return False
        return True

    def sources(self, commit: str, globs: Sequence[str]) -> dict[str, str]:
        """Text of every file of a commit that matches one of the globs (`engine/**/*.py`)."""
        names = [n for n in self.git("ls-tree", "-r", "-z", "--name-only", commit).split("\0") if n and matches(n, globs)]
        asked = "".join(f"{commit}:{name}\n" for name in names)
        raw = self.git("cat-file", "--batch", stdin=asked).encode("utf-8", "surrogateescape")
        found: dict[str, str] = {}
        for name in names:  # each: "<sha> blob <size>\n<bytes>\n"
            head, _, raw = raw.partition(b"\n")
            size = int(head.rsplit(b" ", 1)[1])
            found[name], raw = raw[:size].decode("utf-8", "surrogateescape"), raw[size + 1 :]
        return found

    def show(self, commit: str, path: str) -> str:
        return self.git("cat-file", "blob", f"{commit}:{path}")

    def name_status(self, base: str, commit: str) -> list[Change]:
        """What changed between two commits by git's own account, renames shown as delete and add."""
        raw = self.git("diff-tree", "-r", "-z", "--no-renames", "--raw", base, commit)
        fields = [f for f in raw.split("\0") if f]
        changes = []
        for meta, path in zip(fields[::2], fields[1::2], strict=True):
            old_mode, new_mode, _, _, status = meta.lstrip(":").split()
            changes.append(Change(status, path, old_mode, new_mode))
        return changes

    def log(self, base: str, commit: str) -> list[str]:
        """Commits after base up to commit, oldest first."""
        return self.git("rev-list", "--reverse", f"{base}..{commit}").split()

    def message(self, commit: str) -> str:
        return self.git("show", "-s", "--format=%B", commit).strip()

    def trailers(self, commit: str) -> dict[str, str]:
        rows = self.git("show", "-s", "--format=%(trailers:only,unfold)", commit).splitlines()
        return dict(row.split(": ", 1) for row in rows if ": " in row)

    def diff(self, base: str, commit: str) -> str:
        return self.git("diff-tree", "-p", "--no-renames", "--no-color", "--full-index", base, commit)

    # -- trees and commits -----------------------------------------------------------------------------------

    def tree(self, commit: str, name: str) -> Path:
        """A clean checkout of a commit at `worktrees/<name>`, made whole or not at all, and made anew if it differs."""
        place = self.worktrees / name
        mark = self.worktrees / f".{name}.commit"
        wanted = self.tree_of(commit)
        if place.is_dir() and mark.exists() and mark.read_text() == wanted:
            return place
        self.drop_tree(name)
        self.worktrees.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".new-{name}-", dir=self.worktrees))
        fresh.chmod(0o755)  # the sandbox's user reads it
        self._checkout(commit, fresh)
        fresh.rename(place)
        mark.write_text(wanted)
        return place

    def _checkout(self, commit: str, into: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self.git_dir) as tmp:
            index = Path(tmp, "index")
            self.git("read-tree", commit, index=index)
            self.git("checkout-index", "-a", "-f", f"--prefix={into}/", index=index, work_tree=into)

    def drop_tree(self, name: str) -> None:
        shutil.rmtree(self.worktrees / name, ignore_errors=True)
        (self.worktrees / f".{name}.commit").unlink(missing_ok=True)

    def drop_unfinished_trees(self) -> None:
        """Remove what a killed checkout left behind."""
        for left in self.worktrees.glob(".new-*"):
            shutil.rmtree(left, ignore_errors=True)

    def commit_sources(
        self, parent: str, changed: Mapping[str, str | None], title: str, body: str, trailers: Mapping[str, object]
    ) -> str:
        """A commit on top of `parent` in which the changed files have these texts (None: is gone).

        Same input, same commit.
        """
        return self._commit(self._changed(parent, changed), (parent,), compose(title, body, trailers))

    def _changed(self, parent: str, changed: Mapping[str, str | None]) -> str:
        """The tree of `parent` with these texts."""
        rows = []
        modes = self._modes(parent)
        for path, text in sorted(changed.items()):
            _safe(path)
            if text is None:
                rows.append(f"0 {'0' * 40}\t{path}\n")
                continue
            blob = self.git("hash-object", "-w", "--stdin", stdin=text).strip()
            rows.append(f"{modes.get(path, '100644')} {blob}\t{path}\n")
        with tempfile.TemporaryDirectory(dir=self.git_dir) as tmp:
            index = Path(tmp, "index")
            self.git("read-tree", parent, index=index)
            self.git("update-index", "--add", "--index-info", index=index, stdin="".join(rows))
            return self.git("write-tree", index=index).strip()

    def replay(self, commits: Sequence[str], onto: str) -> str:
        """Cherry-pick commits, words and all, one after the other. Returns the last. Raises Conflict."""
        for commit in commits:
            parent = self.git("rev-parse", f"{commit}^").strip()
            changed = {c.path: self._merged(c.path, parent, commit, onto) for c in self.name_status(parent, commit)}
            onto = self._commit(self._changed(onto, changed), (onto,), self.message(commit) + "\n")
        return onto

    def _merged(self, path: str, base: str, theirs: str, ours: str) -> str | None:
        """Three-way merge of one file's text; None where all agree that it is gone."""
        texts = [self._text_or_none(commit, path) for commit in (ours, base, theirs)]
        mine, old, new = texts
        if mine == old:
            return new
        if mine == new:
            return mine
        if mine is None or old is None or new is None:
            raise Conflict(f"{path} is made or removed elsewhere")
        with tempfile.TemporaryDirectory(dir=self.git_dir) as tmp:
            places = [Path(tmp, name) for name in ("ours", "base", "theirs")]
            for place, text in zip(places, (mine, old, new), strict=True):
                place.write_bytes(text.encode("utf-8", "surrogateescape"))
            try:
                return self.git("merge-file", "-p", "-q", *map(str, places))
            except GitError:
                raise Conflict(path) from None

    def _text_or_none(self, commit: str, path: str) -> str | None:
        try:
            return self.show(commit, path)
        except GitError:
            return None

    def _modes(self, commit: str) -> dict[str, str]:
        rows = self.git("ls-tree", "-r", "-z", commit).split("\0")
        return {row.split("\t", 1)[1]: row.split(" ", 1)[0] for row in rows if row}

    def rewrite(self, commit: str, parent: str, trailers: Mapping[str, object]) -> str:
        """The same tree and words on another parent, with these trailers instead of its own."""
        title, _, rest = self.message(commit).partition("\n")
        old = "\n".join(f"{k}: {v}" for k, v in self.trailers(commit).items())
        body = rest.strip().removesuffix(old).strip()
        return self._commit(self.tree_of(commit), (parent,), compose(title, body, trailers))

    # -- git itself ------------------------------------------------------------------------------------------

    def git(
        self,
        *args: str,
        stdin: str | None = None,
        index: Path | None = None,
        work_tree: Path | None = None,
        cwd: Path | None = None,
        in_repo: bool = True,
    ) -> str:
        """Run git on this repository and return its output. Raises GitError."""
        where = (f"--git-dir={self.git_dir}",) if in_repo else ()
        done = subprocess.run(
            ["git", *_SAFE, *where, *args],
            input=None if stdin is None else stdin.encode("utf-8", "surrogateescape"),
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env=git_env(index, work_tree),
            cwd=cwd or self.git_dir.parent,
            start_new_session=True,  # Ctrl-C stops the loop between steps, not git half-way
            check=False,
        )
        if done.returncode:
            words = done.stderr.decode("utf-8", "replace").strip()
            raise GitError(f"git {args[0]} failed: {words or done.returncode}")
        return done.stdout.decode("utf-8", "surrogateescape")


def compose(title: str, body: str, trailers: Mapping[str, object]) -> str:
    """A commit message; trailers are one line each."""
    rows = "\n".join(f"{key}: {' '.join(str(value).split())}" for key, value in trailers.items())
    shown = "".join(c if c.isprintable() else " " for c in title)  # titles are shown on terminals
    parts = [" ".join(shown.split()) or "Patch", body.strip(), rows]
    return "\n\n".join(part for part in parts if part) + "\n"


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether a path matches a glob in which `**` spans any number of folders, none included."""
    return any(_match(PurePosixPath(path).parts, PurePosixPath(glob).parts) for glob in globs)


def unfrozen(sources: Mapping[str, str], frozen: Sequence[str]) -> dict[str, str]:
    """The sources that a patch may change."""
    return {path: text for path, text in sources.items() if not matches(path, frozen)}


def _match(parts: tuple[str, ...], glob: tuple[str, ...]) -> bool:
    if not glob:
        return not parts
    if glob[0] == "**":
        return _match(parts, glob[1:]) or (bool(parts) and _match(parts[1:], glob))
    return bool(parts) and PurePosixPath(parts[0]).match(glob[0]) and _match(parts[1:], glob[1:])


def snapshot_files(target: Target) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """(path, git mode) of every file that belongs in the snapshot, sorted, and what is too large for it.

    Raises SnapshotError on links that lead outside, odd files and names that git cannot take line by line.
    """
    files: list[tuple[str, str]] = []
    left_out: list[str] = []
    home = target.directory.resolve()
    for folder, dirs, names in os.walk(target.directory):
        dirs[:] = sorted(d for d in dirs if d not in _SKIP_DIRS and not d.endswith(".egg-info"))
        for name in sorted(names):
            place = Path(folder, name)
            path = place.relative_to(target.root).as_posix()
            if place.suffix in _SKIP_SUFFIXES or name == ".git":
                continue
            if "\n" in path or "\t" in path:
                raise SnapshotError(f"{path!r}: a name with a line break or tab cannot be snapshot")
            info = place.lstat()
            if stat.S_ISLNK(info.st_mode):
                if not place.resolve().is_relative_to(home):
                    raise SnapshotError(f"{path}: a link that leads outside {home}; copy the file instead")
                files.append((path, "120000"))
            elif not stat.S_ISREG(info.st_mode):
                raise SnapshotError(f"{path}: neither a file nor a folder")
            elif info.st_size > LARGEST_BYTES:
                left_out.append(path)
            else:
                files.append((path, "100755" if info.st_mode & 0o100 else "100644"))
    return sorted(files), tuple(sorted(left_out))


def _safe(path: str) -> None:
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or ".git" in parts or "\n" in path or "\0" in path:
        raise GitError(f"not a path inside the target: {path!r}")
