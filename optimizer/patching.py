"""Exact search/replace edits: apply them, derive them, name the code they make.

Every `old` of a patch matches exactly once in the text *before* the patch (edits of one patch do not see each
other), or nothing is applied. The one tolerance is whitespace at line ends. Not for: judging a patch (gates),
or touching files: texts come in as a dict of path to text and go out as another.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import libcst as cst

from optimizer.types import Edit, Patch

_LINE_END = r"[ \t]*\r?\n"
LONGEST_PATH = 240
# What parsing text that is no program can end in: also what is nested deeper than the parser goes.
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class Region:
    """Lines `first`..`last` (1-based, inclusive) of a file, and how alike they are to what was looked for."""

    file: str
    first: int
    last: int
    text: str
    similarity: float  # 0..1


class EditMismatch(Exception):
    """An edit that does not match exactly once. `.matches` tells how often, `.nearest` where it almost does."""

    def __init__(self, edit: Edit, why: str, matches: int = 0, nearest: Region | None = None) -> None:
        self.edit, self.matches, self.nearest = edit, matches, nearest
        message = f"{edit.file}: {why}"
        if nearest is not None:
            numbered = "\n".join(
                f"{n:5d}  {line}" for n, line in enumerate(nearest.text.splitlines(), nearest.first)
            )
            message += f"\nnearest: lines {nearest.first}-{nearest.last} ({nearest.similarity:.0%} alike)\n{numbered}"
        super().__init__(message)


def _unwritable(edit: Edit) -> str | None:
    """Why this cannot be a file of the target, or None: found here, where it is the proposer's fault, not git's."""
    path = PurePosixPath(edit.file)
    if path.is_absolute() or {"..", ".git"} & set(path.parts) or str(path) != edit.file or not edit.file.isprintable():
        return "not the plain path of a file inside the target"
    if len(edit.file) > LONGEST_PATH:
        return f"a path of {len(edit.file)} characters"
    try:
        edit.new.encode()
    except UnicodeEncodeError as error:
        return f"`new` is no text that a file can hold: {error.reason} at character {error.start}"
    return None


def apply_edits(sources: Mapping[str, str], patch: Patch | Sequence[Edit]) -> dict[str, str]:
    """Texts after `patch`; the input is left alone. Raises EditMismatch, and then nothing was applied.

    An edit with an empty `old` creates a file, and its file must not exist yet.
    """
    edits = patch.edits if isinstance(patch, Patch) else tuple(patch)
    after = dict(sources)
    spans: dict[str, list[tuple[int, int, Edit]]] = {}
    for edit in edits:
        if wrong := _unwritable(edit):
            raise EditMismatch(edit, wrong)
        if edit.old == "":
            if edit.file in after:
                raise EditMismatch(edit, "`old` is empty, which creates a file, but the file exists")
            after[edit.file] = edit.new
        elif edit.file not in sources:
            raise EditMismatch(edit, f"no such file (there are: {', '.join(sorted(sources))})")
        else:
            start, end = _locate(sources[edit.file], edit)
            spans.setdefault(edit.file, []).append((start, end, edit))
    for file, found in spans.items():
        found.sort(key=lambda s: (s[0], s[1]))
        for (_, end, _), (start, _, edit) in itertools.pairwise(found):
            if start < end:
                raise EditMismatch(edit, "overlaps another edit of this patch; join the two", matches=1)
        text = sources[file]
        for start, end, edit in reversed(found):
            text = text[:start] + edit.new + text[end:]
        after[file] = text
    return after


def _locate(text: str, edit: Edit) -> tuple[int, int]:
    """The one place of `edit.old` in `text`: exactly, else but for whitespace at line ends."""
    places = _places(text, edit.old)
    if len(places) == 1:
        return places[0], places[0] + len(edit.old)
    count = len(places)
    if count == 0:
        lines = edit.old.replace("\r\n", "\n").split("\n")
        tail = lines.pop()  # what follows the last line end: its end is not ours to loosen
        pattern = "".join(re.escape(line.rstrip()) + _LINE_END for line in lines) + re.escape(tail)
        matches = list(re.finditer(pattern, text)) if lines else []
        if len(matches) == 1:
            return matches[0].span()
        count = len(matches)
    if count == 0:
        raise EditMismatch(edit, "`old` is not there", 0, nearest_region(text, edit))
    where = [text.count("\n", 0, place) + 1 for place in places]
    raise EditMismatch(edit, f"`old` is there {count} times (lines {where}); add context to it", count)


def _places(text: str, old: str) -> list[int]:
    """Every offset of `old`, overlapping ones too: an overlap is as ambiguous as any second match."""
    places, at = [], text.find(old)
    while at >= 0:
        places.append(at)
        at = text.find(old, at + 1)
    return places


def nearest_region(text: str, edit: Edit) -> Region | None:
    """The run of lines most like `edit.old`, as many lines long; None when nothing is even half alike."""
    lines, wanted = text.splitlines(), edit.old.strip("\n").splitlines()
    if not lines or not wanted:
        return None
    height = min(len(wanted), len(lines))
    key = [w.strip() for w in wanted]
    scores = [
        sum(difflib.SequenceMatcher(None, a, b.strip(), autojunk=False).quick_ratio() for a, b in zip(key, window, strict=False))
        for window in (lines[i : i + height] for i in range(len(lines) - height + 1))
    ]
    best = max(range(len(scores)), key=scores.__getitem__)
    found = "\n".join(lines[best : best + height])
    ratio = difflib.SequenceMatcher(None, edit.old.strip("\n"), found, autojunk=False).ratio()
    return Region(edit.file, best + 1, best + height, found, ratio) if ratio >= 0.4 else None


def edits_from(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Edit, ...]:
    """The smallest whole-line edits, each unique in its file, that turn `before` into `after`.

    Files absent from `after` are left alone (edits cannot delete). `apply_edits(before, edits) == {**before,
    **after}` always holds.
    """
    edits: list[Edit] = []
    for file in sorted(after):
        new = after[file]
        if file not in before:
            edits.append(Edit(file, "", new))
        elif before[file] != new:
            edits.extend(_file_edits(file, before[file], new))
    return tuple(edits)


def _file_edits(file: str, before: str, after: str) -> list[Edit]:
    if not before:  # nothing to match: an empty file cannot be edited exactly
        raise ValueError(f"{file} exists and is empty; edits cannot fill it")
    a, b = before.splitlines(keepends=True), after.splitlines(keepends=True)
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    # Cuts: places (i, j) where both texts may be cut so that the parts still correspond.
    cuts = [(0, 0)]
    for tag, i1, i2, j1, j2 in blocks:
        cuts += [(i1 + n, j1 + n) for n in range(1, i2 - i1 + 1)] if tag == "equal" else [(i2, j2)]
    at = {cut: n for n, cut in enumerate(cuts)}
    spans: list[tuple[int, int]] = []
    for tag, i1, i2, j1, j2 in blocks:
        if tag == "equal":
            continue
        lo, hi = at[i1, j1], at[i2, j2]
        if spans and lo < spans[-1][1]:
            lo, hi = spans[-1][0], max(hi, spans.pop()[1])
        lo, hi = _grow(a, cuts, lo, hi, before)
        while spans and lo < spans[-1][1]:  # it grew back into the one before
            lo, hi = min(lo, spans[-1][0]), max(hi, spans.pop()[1])
        spans.append((lo, hi))
    return [
        Edit(file, "".join(a[cuts[lo][0] : cuts[hi][0]]), "".join(b[cuts[lo][1] : cuts[hi][1]])) for lo, hi in spans
    ]


def _grow(a: list[str], cuts: list[tuple[int, int]], lo: int, hi: int, text: str) -> tuple[int, int]:
    """Widen a span of cuts, below and above in turn, until its old side is unique in `text`."""
    below = True
    while not (old := "".join(a[cuts[lo][0] : cuts[hi][0]])) or len(_places(text, old)) != 1:
        if hi + 1 < len(cuts) and (below or lo == 0):
            hi += 1
        else:  # the whole text is unique, so one of the two is always possible
            lo -= 1
        below = not below
    return lo, hi


def changed_lines(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """Added plus deleted lines over all files: what the patch envelope counts."""
    total = 0
    for file, new in after.items():
        old = before.get(file, "")
        if old != new:
            ops = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
            total += sum((i2 - i1) + (j2 - j1) for tag, i1, i2, j1, j2 in ops if tag != "equal")
    return total


def ast_hash(sources: Mapping[str, str]) -> str:
    """sha256 over the syntax trees of all Python files: blind to comments, layout and docstrings.

    Text that does not parse counts by its bytes. Two candidates with one hash are the same program, so a
    second try spends the alpha of the first.
    """
    digest = hashlib.sha256()
    for file in sorted(f for f in sources if f.endswith(".py")):
        try:
            tree = ast.parse(sources[file])
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    _drop_docstring(node)
            body = ast.dump(tree)
        except NOT_PYTHON:
            body = sources[file]
        digest.update(f"{file}\0{body}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        node.body = [*node.body[1:]] or [ast.Pass()]


class _ReplaceFunction(cst.CSTTransformer):
    def __init__(self, path: list[str], new: cst.FunctionDef) -> None:
        self.path, self.new = path, new
        self.stack: list[str] = []
        self.hits = 0

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.stack.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self.stack.pop()
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.stack.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        here = self.stack == self.path
        self.stack.pop()
        if not here:
            return updated_node
        self.hits += 1
        return self.new.with_changes(leading_lines=updated_node.leading_lines)


def replace_function(sources: Mapping[str, str], file: str, qualified_name: str, new: str) -> tuple[Edit, ...]:
    """Edits that put the definition `new` in the place of function `Class.method` (or `function`) of `file`.

    Indentation of `new` is taken from the place. Raises ValueError when the file or function is not there (the
    message lists what is), is there twice, or `new` is not one function definition.
    """
    if file not in sources:
        raise ValueError(f"no such file: {file}")
    try:
        module = cst.parse_module(sources[file])
        body = cst.parse_module(_dedent(new)).body
    except cst.ParserSyntaxError as error:
        raise ValueError(f"does not parse: {error.message}") from error
    if len(body) != 1 or not isinstance(body[0], cst.FunctionDef):
        raise ValueError("`new` must be exactly one function definition")
    replacer = _ReplaceFunction(qualified_name.split("."), body[0])
    text = module.visit(replacer).code
    if replacer.hits != 1:
        raise ValueError(
            f"{file} has {replacer.hits} functions named {qualified_name}; it has: {', '.join(functions(sources[file]))}"
        )
    return edits_from(sources, {file: text})


def _dedent(text: str) -> str:
    lines = text.strip("\n").splitlines()
    indent = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
    return "\n".join(x[indent:] for x in lines) + "\n"


def functions(text: str) -> list[str]:
    """Qualified names of every function in a source text."""
    names: list[str] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                if not isinstance(child, ast.ClassDef):
                    names.append(name)
                walk(child, name + ".")

    walk(ast.parse(text), "")
    return names
