"""A unified diff as pieces that a page can show, whoever wrote it: cut where huge, invisible characters made visible.

What is left out or clipped is counted and said, because a person decides by what can be seen. Not for: applying
patches (apply.py), or colours (the templates).
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WIDTH = 400  # characters shown of one line
LINES_A_FILE = 600
LINES = 3000  # of all files together
OPEN_LINES = 120  # a file with more is folded
FILES = 60

_FILE = re.compile(r"^diff --git a/(.*) b/(.*)$")
_HUNK = re.compile(r"^@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a line; `hidden` names a character that would not be seen, or not as what it is."""

    text: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    kind: str  # add, del, same, hunk, meta
    pieces: tuple[Piece, ...]
    old: int | None = None
    new: int | None = None
    cut: int = 0  # characters that are not shown


@dataclass(slots=True)
class File:
    name: str
    added: int = 0
    deleted: int = 0
    lines: list[Line] = field(default_factory=list)
    left_out: int = 0  # lines that are not shown

    @property
    def open(self) -> bool:
        return len(self.lines) + self.left_out <= OPEN_LINES


@dataclass(frozen=True, slots=True)
class Diff:
    files: tuple[File, ...]
    left_out_files: int
    warnings: tuple[str, ...]

    @property
    def added(self) -> int:
        return sum(f.added for f in self.files)

    @property
    def deleted(self) -> int:
        return sum(f.deleted for f in self.files)


def view(text: str) -> Diff:
    """The pieces of a unified diff; text that is none is shown as it is."""
    found = _files(text)
    shown, budget = found[:FILES], LINES
    for file in shown:
        keep = min(LINES_A_FILE, budget)
        file.left_out += max(0, len(file.lines) - keep)
        del file.lines[keep:]
        budget -= len(file.lines)
    return Diff(tuple(shown), len(found) - len(shown), tuple(_warnings(text, shown, len(found) - len(shown))))


def between(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A unified diff of two sets of files."""
    parts: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old != new:
            parts.append(f"diff --git a/{name} b/{name}\n")
            parts += _unified(old, new, name)
    return "".join(parts)


def _unified(old: str | None, new: str | None, name: str) -> Sequence[str]:
    a, b = (text.splitlines(keepends=True) if text else [] for text in (old, new))
    heads = ("/dev/null" if old is None else f"a/{name}", "/dev/null" if new is None else f"b/{name}")
    return [x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in difflib.unified_diff(a, b, *heads)]


@dataclass(slots=True)
class _At:
    """Where the reader is: line numbers, and how many lines of the hunk are still to come."""

    old: int = 0
    new: int = 0
    old_left: int = 0
    new_left: int = 0

    @property
    def inside(self) -> bool:
        return self.old_left > 0 or self.new_left > 0


def _files(text: str) -> list[File]:
    files: list[File] = []
    at = _At()
    for raw in text.split("\n"):
        line = raw.removesuffix("\r")
        # A line of a hunk begins with a sign: "diff" and "@@" end it, whatever length it claims; "+++" may be content.
        if (name := _file_begins(line, files, at.inside)) is not None:
            files.append(File(visible_text(name)[:300]))
            at = _At()
        elif hunk := _HUNK.match(line):
            at = _At(int(hunk[1]), int(hunk[3]), int(hunk[2] or 1), int(hunk[4] or 1))
            _last(files).lines.append(_line("hunk", line))
        elif at.inside and line[:1] in ("+", "-", " ", ""):
            _changed(_last(files), line or " ", at)
        elif line and not line.startswith(("index ", "--- a/", "+++ b/")):
            _last(files).lines.append(_line("meta", line))
    return files


def _file_begins(line: str, files: list[File], inside: bool) -> str | None:
    """The name in a line that begins a file: git's, or `+++` of a plain diff."""
    match = _FILE.match(line)
    if match:
        return match[2]
    plain = not inside and line.startswith("+++ ") and (not files or any(x.kind == "hunk" for x in files[-1].lines))
    return line[4:].partition("\t")[0].removeprefix("b/") if plain else None


def _last(files: list[File]) -> File:
    if not files:
        files.append(File("(no file named)"))
    return files[-1]


def _changed(file: File, line: str, at: _At) -> None:
    """One line of a hunk."""
    sign, text = line[0], line[1:]
    kind = {"+": "add", "-": "del"}.get(sign, "same")
    file.lines.append(_line(kind, text, None if kind == "add" else at.old, None if kind == "del" else at.new))
    if kind != "add":
        at.old, at.old_left = at.old + 1, at.old_left - 1
    if kind != "del":
        at.new, at.new_left = at.new + 1, at.new_left - 1
    file.added += kind == "add"
    file.deleted += kind == "del"


def _line(kind: str, text: str, old: int | None = None, new: int | None = None) -> Line:
    return Line(kind, pieces(text[:WIDTH]), old, new, max(0, len(text) - WIDTH))


def pieces(text: str) -> tuple[Piece, ...]:
    """Runs of plain text and single hidden characters."""
    found: list[Piece] = []
    plain = ""
    for char in text:
        if is_hidden(char):
            found += [Piece(plain)] if plain else []
            found.append(Piece(name_of(char), hidden=True))
            plain = ""
        else:
            plain += char
    return (*found, Piece(plain)) if plain else tuple(found)


def is_hidden(char: str) -> bool:
    """Controls, direction marks, zero-width characters and odd spaces; tabs are plain."""
    return char != "\t" and not char.isprintable()


def name_of(char: str) -> str:
    return f"U+{ord(char):04X} {unicodedata.name(char, 'control')}".strip()


def visible_text(text: str) -> str:
    """One line in which hidden characters are named."""
    return "".join(f"[{p.text}]" if p.hidden else p.text for p in pieces(text))


def _warnings(text: str, files: Sequence[File], left_out: int) -> list[str]:
    found = []
    hidden = sum(1 for char in text.replace("\r\n", "\n") if char != "\n" and is_hidden(char))
    if hidden:
        found.append(f"{hidden:,} characters of this patch are invisible or change direction; they are named where they stand.")
    other = sum(1 for file in files for line in file.lines if line.kind == "add" for p in line.pieces if not p.text.isascii())
    if other:
        found.append(f"{other:,} added line(s) hold characters outside ASCII; look-alikes of letters are possible.")
    cut = sum(1 for file in files for line in file.lines if line.cut)
    lines = sum(file.left_out for file in files)
    rest = [
        f"{cut:,} line(s) longer than {WIDTH} characters are cut" if cut else "",
        f"{lines:,} line(s) are left out" if lines else "",
        f"{left_out:,} file(s) are left out" if left_out else "",
    ]
    if any(rest):
        found.append("Not all of this patch is shown: " + ", ".join(r for r in rest if r) + ". Read the whole patch before you accept it.")
    return found
