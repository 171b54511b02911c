"""Command lines out of Markdown, checked against the code that would read them. Not for: running any of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import typer.main

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*$", re.M | re.S)
_COMMENT = re.compile(r"\s#\s.*$")
PROGRAMS = ("optimize", "trace-diff")


def fenced(text: str) -> list[tuple[str, str]]:
    """(info string, body) of every fenced block."""
    return [(m[1].strip(), m[2]) for m in FENCE.finditer(text)]


def lines(text: str) -> Iterator[list[str]]:
    """Words of every `optimize ...` and `trace-diff ...`, in fenced blocks and in inline code."""
    for info, body in fenced(text):
        if info in ("", "sh", "bash", "console", "shell", "text"):
            for raw in body.replace("\\\n", " ").splitlines():
                yield from _words(_COMMENT.sub("", raw.strip().removeprefix("$ ")))
    for match in re.finditer(r"`([^`\n]+)`", FENCE.sub("", text)):
        yield from _words(match[1])


def _words(raw: str) -> Iterator[list[str]]:
    for part in re.split(r"\s*(?:&&|;|\|)\s*", raw):
        bare = re.sub(r"^(?:\S+=\S+\s+)*(?:\S*/)?", "", part)  # FOO=1 .venv/bin/optimize
        if not re.match(rf"(?:{'|'.join(PROGRAMS)})(?:\s|$)", bare):
            continue
        try:
            yield shlex.split(bare)
        except ValueError:
            yield bare.split()


def optimize_tree() -> dict[tuple[str, ...], set[str]]:
    """Every command of `optimize`, () for itself, with its options."""
    from optimizer.cli import app

    found: dict[tuple[str, ...], set[str]] = {}

    def visit(command, path: tuple[str, ...]) -> None:
        found[path] = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")} | {"--help", "-h"}
        for name, child in getattr(command, "commands", {}).items():
            visit(child, (*path, name))

    visit(typer.main.get_command(app), ())
    return found


def trace_diff_tree() -> dict[tuple[str, ...], set[str]]:
    """The same of `trace-diff`, whose first command may be left out."""
    import argparse

    from reports.trace_options import parser

    top = parser()
    found: dict[tuple[str, ...], set[str]] = {(): set()}
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found[(name,)] = {o for a in child._actions for o in a.option_strings}
    found[()] = {o for a in top._actions for o in a.option_strings} | found[("diff",)]
    return found


def trees() -> dict[str, dict[tuple[str, ...], set[str]]]:
    return {"optimize": optimize_tree(), "trace-diff": trace_diff_tree()}


def faults(text: str, known: dict[str, dict[tuple[str, ...], set[str]]]) -> list[str]:
    """What the commands in a text get wrong."""
    found = []
    for program, *words in lines(text):
        tree = known[program]
        path: tuple[str, ...] = ()
        rest = list(words)
        while rest and (*path, rest[0]) in tree:
            path = (*path, rest.pop(0))
        has_commands = any(len(p) > len(path) and p[: len(path)] == path for p in tree)
        if program == "optimize" and has_commands and rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
            found.append(f"{program} {' '.join([*path, rest[0]])}: no such command")
            continue
        for word in rest:
            option = word.partition("=")[0].rstrip(".,:")
            if re.fullmatch(r"--[a-z][a-z-]*", option) and option not in tree[path]:
                found.append(f"{' '.join((program, *path))}: no option {option}")
    return found


def commands_of(text: str, program: str, tree: dict[tuple[str, ...], set[str]]) -> set[tuple[str, ...]]:
    """The commands of a program that a text uses."""
    used = set()
    for name, *words in lines(text):
        if name == program:
            path: tuple[str, ...] = ()
            for word in words:
                if (*path, word) not in tree:
                    break
                path = (*path, word)
            used |= {path[:n] for n in range(len(path) + 1)}
    return used


def links(path: Path) -> Iterator[tuple[str, Path]]:
    """Relative links of a Markdown file and where they lead."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text("utf-8"))):
        if not re.match(r"[a-z]+:|#", target):
            yield target, (path.parent / target.partition("#")[0]).resolve()
