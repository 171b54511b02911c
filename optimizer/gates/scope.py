"""G01: what a commit may touch, read from git's own account of the trees, never from a patch's text.

Not for: what the changed code says (`policy.py`).
"""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from optimizer.gates.context import Lab, failed, passed
from optimizer.runrepo import git_env, matches
from optimizer.types import GateResult, RejectReason

MAX_FILES = 3
MAX_LINES = 120
_PLAIN = "100644"
_HARNESS = ("conftest.py", "sitecustomize.py", "usercustomize.py")


@dataclass(frozen=True, slots=True)
class Change:
    status: str  # git's letter
    old_mode: str
    new_mode: str
    path: str
    added: int | None  # None: binary
    deleted: int | None


def check(lab: Lab) -> GateResult:
    ctx = lab.ctx
    found = changes(ctx.repo, ctx.base_commit, ctx.candidate_commit)
    wrong = envelope(found, ctx.target.editable, ctx.target.frozen) or same_program(
        ctx.repo, ctx.base_commit, ctx.candidate_commit, found
    )
    facts = {"files": len(found), "lines": sum((c.added or 0) + (c.deleted or 0) for c in found)}
    if wrong:
        return failed("scope", "G01", RejectReason.SCOPE, wrong, **facts)
    return passed("scope", "G01", **facts)


def envelope(found: list[Change], editable: tuple[str, ...], frozen: tuple[str, ...]) -> str | None:
    """The first rule that is broken, or None."""
    if not found:
        return "the commit changes nothing"
    for change in found:
        if wrong := _one(change, editable, frozen):
            return f"{change.path}: {wrong}"
    if len(found) > MAX_FILES:
        return f"{len(found)} files changed, at most {MAX_FILES}"
    lines = sum((c.added or 0) + (c.deleted or 0) for c in found)
    if lines > MAX_LINES:
        return f"{lines} lines added and deleted, at most {MAX_LINES}"
    return None


def _one(change: Change, editable: tuple[str, ...], frozen: tuple[str, ...]) -> str | None:
    path = PurePosixPath(change.path)
    if change.status not in ("A", "M"):
        return f"status {change.status}: only changed and new files are allowed"
    if change.new_mode != _PLAIN or (change.status == "M" and change.old_mode != change.new_mode):
        return f"mode {change.old_mode} -> {change.new_mode}: plain files only, modes stay"
    if change.added is None:
        return "binary"
    if path.suffix != ".py":
        return "only .py files may change"
    if path.name in _HARNESS:
        return "this name is run by interpreters or test harnesses"
    if matches(change.path, frozen) or not matches(change.path, editable):
        return f"not editable (editable: {', '.join(editable)})"
    if change.status == "A" and _shadows(path):
        return "a new file of this name would hide a module of Python's"
    return None


def _shadows(path: PurePosixPath) -> bool:
    """A module at the root of the tree comes first on sys.path."""
    import sys

    return len(path.parts) == 1 and path.stem in sys.stdlib_module_names


def same_program(repo: Path, base: str, commit: str, found: list[Change]) -> str | None:
    """A commit must change what runs: not only comments, docstrings or layout. Also refuses text that is no Python."""
    changed = False
    for change in found:
        new = _show(repo, commit, change.path)
        try:
            tree = ast.dump(without_docstrings(ast.parse(new)))
        except (SyntaxError, ValueError, RecursionError) as error:
            return f"{change.path}: not Python: {error}"
        old = _show(repo, base, change.path) if change.status == "M" else ""
        try:
            changed = changed or ast.dump(without_docstrings(ast.parse(old))) != tree
        except (SyntaxError, ValueError, RecursionError):
            changed = True
    return None if changed else "nothing that runs has changed"


def without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return tree


def changes(repo: Path, base: str, commit: str) -> list[Change]:
    """Every path that differs between two commits, renames as a delete and an add."""
    raw = _git(repo, "diff-tree", "-r", "--no-renames", "--raw", "-z", "--full-index", base, commit).split(
        "\0"
    )
    numbers = _git(repo, "diff-tree", "-r", "--no-renames", "--numstat", "-z", base, commit).split("\0")
    counts: dict[str, tuple[int | None, int | None]] = {}
    for entry in filter(None, numbers):
        added, deleted, path = entry.split("\t", 2)
        counts[path] = (None, None) if added == "-" else (int(added), int(deleted))
    found = []
    for meta, path in zip(raw[0::2], raw[1::2], strict=False):
        old_mode, new_mode, _, _, status = meta.lstrip(":").split(" ")
        added, deleted = counts.get(path, (None, None))
        found.append(Change(status[0], old_mode, new_mode, path, added, deleted))
    return found


def _show(repo: Path, commit: str, path: str) -> str:
    return _git(repo, "show", f"{commit}:{path}")


def _git(repo: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "--git-dir", str(repo), *arguments],
        capture_output=True,
        env=git_env(),
        check=False,
        timeout=60,
    )
    if done.returncode != 0:
        raise OSError(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode("utf-8", "surrogateescape")
