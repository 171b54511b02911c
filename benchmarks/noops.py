"""Patches that do nothing: locals renamed, functions reordered, returns through a local, branches turned round.

Each changes the program's AST and nothing that it computes or how long it takes, so accepting one is an error of
the measurement. Generated from whatever sources they are given. Not for: running them (`noop_candidates.py`).
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SUFFIXES = ("_", "_value", "_now", "_here", "_item", "_it", "_one", "_local", "_cur", "_this")
RESULTS = ("result_", "answer_", "outcome_", "value_", "returned_", "out_")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class NoOp:
    """One file of the sources, rewritten. kind: rename, return, swap or invert."""

    kind: str
    title: str
    file: str
    text: str


def noops(sources: Mapping[str, str], count: int, seed: int = 0) -> list[NoOp]:
    """`count` different no-ops in a random order, every file and kind represented where it can be.

    Errors: ValueError when the sources do not offer so many.
    """
    rng = random.Random(seed)
    by_kind: dict[str, list[NoOp]] = {}
    for file in sorted(sources):
        if file.endswith(".py"):
            for found in _of_file(file, sources[file]):
                by_kind.setdefault(found.kind, []).append(found)
    for found in by_kind.values():
        rng.shuffle(found)
    chosen: list[NoOp] = []
    seen: set[tuple[str, str]] = set()
    while len(chosen) < count:
        if not any(by_kind.values()):
            raise ValueError(f"these sources offer only {len(chosen)} different no-ops, {count} were asked for")
        for found in by_kind.values():
            if found and len(chosen) < count:
                noop = found.pop()
                if (noop.file, noop.text) not in seen:
                    seen.add((noop.file, noop.text))
                    chosen.append(noop)
    return chosen


def _of_file(file: str, text: str) -> Iterator[NoOp]:
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    for function in [n for n in ast.walk(tree) if isinstance(n, FUNCTIONS)]:
        yield from _renames(file, lines, function)
        yield from _returns(file, lines, function)
        yield from _inverted(file, lines, function)
    yield from _swaps(file, lines, tree)


def _valid(kind: str, title: str, file: str, lines: list[str]) -> Iterator[NoOp]:
    text = "".join(lines)
    try:
        ast.parse(text)
    except SyntaxError:
        return
    yield NoOp(kind, title, file, text)


def _renames(file: str, lines: list[str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[NoOp]:
    """Locals that nothing but plain reads and writes of this function mentions."""
    first, last = function.lineno - 1, function.end_lineno or function.lineno
    inner = [n for n in ast.walk(function) if n is not function]
    if any(isinstance(n, (*FUNCTIONS, ast.Lambda, ast.Global, ast.Nonlocal, ast.ClassDef)) for n in inner):
        return
    arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    written = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    body = "".join(lines[first:last])
    for name in sorted(written - arguments):
        elsewhere = rf"\.{name}\b|\b{name}\s*=[^=][^\n]*\)|[\"'][^\"'\n]*\b{name}\b[^\"'\n]*[\"']|#[^\n]*\b{name}\b"
        if name.startswith("_") or re.search(elsewhere, body):
            continue
        for suffix in SUFFIXES:
            renamed = re.sub(rf"\b{name}\b", name + suffix, body)
            new = [*lines[:first], *renamed.splitlines(keepends=True), *lines[last:]]
            yield from _valid("rename", f"{function.name}: {name} -> {name}{suffix}", file, new)


def _returns(file: str, lines: list[str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[NoOp]:
    """`return expression` on one line becomes two statements."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Return) or node.value is None or isinstance(node.value, ast.Name | ast.Constant):
            continue
        at = node.lineno - 1
        if node.end_lineno != node.lineno or not lines[at].lstrip().startswith("return "):
            continue
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        for name in RESULTS:
            value = lines[at].lstrip()[len("return ") :]
            new = [*lines[:at], f"{indent}{name} = {value}", f"{indent}return {name}\n", *lines[at + 1 :]]
            yield from _valid("return", f"{function.name}: return through {name}", file, new)


def _inverted(file: str, lines: list[str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[NoOp]:
    """`if a: x else: y` becomes `if not (a): y else: x`."""
    for node in ast.walk(function):
        if not isinstance(node, ast.If) or not node.orelse or isinstance(node.orelse[0], ast.If):
            continue
        if node.test.end_lineno != node.lineno or node.body[0].lineno == node.lineno:
            continue
        head, orelse = node.lineno - 1, node.orelse[0].lineno - 1
        end = node.end_lineno or orelse + 1
        middle = next((i for i in range(head, orelse) if lines[i].strip() == "else:"), None)
        if middle is None or not lines[head].lstrip().startswith("if "):
            continue
        indent = lines[head][: len(lines[head]) - len(lines[head].lstrip())]
        test = ast.get_source_segment("".join(lines), node.test)
        new = [*lines[:head], f"{indent}if not ({test}):\n", *lines[middle + 1 : end], lines[middle], *lines[head + 1 : middle], *lines[end:]]  # fmt: skip
        yield from _valid("invert", f"{function.name}: branches of line {node.lineno} turned round", file, new)


def _swaps(file: str, lines: list[str], tree: ast.Module) -> Iterator[NoOp]:
    """Neighbouring top-level functions without decorators or default arguments change places."""
    body = tree.body
    for one, two in itertools.pairwise(body):
        if not (isinstance(one, FUNCTIONS) and isinstance(two, FUNCTIONS)):
            continue
        if any(f.decorator_list or f.args.defaults or any(f.args.kw_defaults) for f in (one, two)):
            continue
        a, b, c, d = one.lineno - 1, one.end_lineno or 0, two.lineno - 1, two.end_lineno or 0
        new = [*lines[:a], *lines[c:d], *lines[b:c], *lines[a:b], *lines[d:]]
        yield from _valid("swap", f"{one.name} after {two.name}", file, new)
