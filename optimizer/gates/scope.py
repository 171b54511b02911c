"""G01: what a commit may touch, read from git's own account of the trees, never from a patch's text.

Not for: what the changed code says (`policy.py`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from optimizer.gates.context import Lab, failed, passed
from optimizer.runrepo import git_env, matches
from optimizer.types import GateResult, RejectReason

MAX_FILES = 3
MAX_LINES = 120
_PLAIN = "100644"
MAX_WIDTH = 200  # characters of a line that was not there before: more cannot be reviewed
# What a reader does not see as it runs: controls (a lone carriage return ends a line for Python, not for a diff), marks
# that turn the direction of text, and characters without width.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_NAME = re.compile(r"[A-Za-z0-9_.\-/]+")
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
    wrong = (
        envelope(found, ctx.target.editable, ctx.target.frozen)
        or hidden_modules(found, paths(ctx.repo, ctx.base_commit))
        or _unreadable(ctx.repo, ctx.base_commit, ctx.candidate_commit, found)
        or same_program(ctx.repo, ctx.base_commit, ctx.candidate_commit, found)
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
    if not _NAME.fullmatch(change.path):
        return "a path of letters, digits, '_', '-', '.' and '/' only: others can look like one that they are not"
    if path.name in _HARNESS:
        return "this name is run by interpreters or test harnesses"
    if matches(change.path, frozen):
        return f"frozen by target.toml (frozen: {', '.join(frozen)})"
    if not matches(change.path, editable):
        return f"not editable (editable: {', '.join(editable)})"
    return None


def hidden_modules(found: list[Change], before: frozenset[str]) -> str | None:
    """A new file that would be imported in the place of another module, or None. `before`: the paths of the base tree.

    The root of the tree comes first on sys.path, and a package comes before a module of its name.
    """
    for change in found:
        path = PurePosixPath(change.path)
        if change.status != "A":
            continue
        top = path.parts[0].removesuffix(".py")
        known = any(p.split("/")[0].removesuffix(".py") == top for p in before)
        if not known and (top in sys.stdlib_module_names or _installed(top)):
            return f"{change.path}: a new module {top} would hide the installed one"
        for twin in (str(path.with_suffix("")) + "/", *(f"{folder}.py" for folder in path.parents)):
            if any(p == twin or (twin.endswith("/") and p.startswith(twin)) for p in before):
                return f"{change.path}: it would hide {twin}, or be hidden by it"
    return None


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ValueError, ImportError):
        return False


def unreadable(old: bytes, new: bytes) -> str | None:
    """What a reviewer, or `policy.py`, would read otherwise than Python does; only what the commit adds counts."""
    for line in new.split(b"\n")[:2]:
        cookie = _COOKIE.match(line)
        if cookie and cookie[1].lower() not in (b"utf-8", b"utf8"):
            return f"its text is declared to be {cookie[1].decode()}, not UTF-8"
    try:
        text = new.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    had = set(old.decode("utf-8", "replace").split("\n"))
    dos = b"\r\n" in old
    for number, line in enumerate(text.split("\n"), 1):
        if line in had:
            continue
        line = line.removesuffix("\r") if dos else line
        if unseen := _UNSEEN.search(line):
            return f"line {number} holds the character U+{ord(unseen[0]):04X}, which is not seen"
        if len(line) > MAX_WIDTH:
            return f"line {number} has {len(line)} characters, at most {MAX_WIDTH}"
    return None


def _unreadable(repo: Path, base: str, commit: str, found: list[Change]) -> str | None:
    for change in found:
        old = _bytes(repo, "show", f"{base}:{change.path}") if change.status == "M" else b""
        if wrong := unreadable(old, _bytes(repo, "show", f"{commit}:{change.path}")):
            return f"{change.path}: {wrong}"
    return None


def same_program(repo: Path, base: str, commit: str, found: list[Change]) -> str | None:
    """A commit must change what runs: not only comments, docstrings or layout. Also refuses text that is no Python."""
    changed = False
    for change in found:
        new = _show(repo, commit, change.path)
        try:
            tree = ast.dump(without_docstrings(ast.parse(new)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"{change.path}: not Python: {error}"
        old = _show(repo, base, change.path) if change.status == "M" else ""
        try:
            changed = changed or ast.dump(without_docstrings(ast.parse(old))) != tree
        except (SyntaxError, ValueError, RecursionError, MemoryError):
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


def paths(repo: Path, commit: str) -> frozenset[str]:
    """Every path of a commit's tree."""
    return frozenset(filter(None, _git(repo, "ls-tree", "-r", "--name-only", "-z", commit).split("\0")))


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
    return _bytes(repo, *arguments).decode("utf-8", "surrogateescape")


def _bytes(repo: Path, *arguments: str) -> bytes:
    done = subprocess.run(
        ["git", "--git-dir", str(repo), *arguments],
        capture_output=True,
        env=git_env(),
        check=False,
        timeout=60,
    )
    if done.returncode != 0:
        raise OSError(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
