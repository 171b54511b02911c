"""README's tree and commands are those of the code.

The tree is the fenced block with info string `tree` (or whose lines end in `/` and name top-level folders): two spaces or
box characters per level, `{a,b}.py` for several, words after two spaces are a comment. Not for: its prose.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import doc_commands as commands
import pytest

REPO = Path(__file__).resolve().parents[1]
README = REPO / "README.md"
_BOX = re.compile(r"[│├└─|`\\+]")


@pytest.fixture(scope="module")
def text() -> str:
    assert README.is_file(), "a repository without a README"
    return README.read_text("utf-8")


def tree_of(text: str) -> str:
    """The body of the block that shows the tree. Raises LookupError."""
    blocks = commands.fenced(text)
    named = [body for info, body in blocks if info == "tree"]
    like = [body for _, body in blocks if len(re.findall(r"^\W*(?:engine|trace_diff|optimizer|reports|skills)/", body, re.M)) >= 3]
    for body in (*named, *like):
        return body
    raise LookupError("README shows no tree of the repository")


def paths(tree: str) -> Iterator[str]:
    """Every path that a tree names, relative to the repository."""
    above: list[tuple[int, str]] = []
    for raw in tree.splitlines():
        line = _BOX.sub(" ", raw)
        names = re.split(r"\s{2,}|\s#", line.strip(), maxsplit=1)[0].strip()
        if not names or names in (".", "./", "…", "..."):
            continue
        depth = len(line) - len(line.lstrip())
        while above and above[-1][0] >= depth:
            above.pop()
        base = above[-1][1] if above else ""
        found = [base + name for word in re.split(r"[,\s]+(?![^{]*})", names) for name in expand(word)]
        yield from found
        if names.endswith("/") and len(found) == 1:
            above.append((depth, found[0]))


def expand(word: str) -> list[str]:
    """`a{b,c}.py` as two names."""
    match = re.fullmatch(r"(.*?)\{([^}]*)\}(.*)", word)
    return [f"{match[1]}{part.strip()}{match[3]}" for part in match[2].split(",")] if match else [word]


def ignored(path: str) -> bool:
    """What git does not keep (runs/) need not be there."""
    return subprocess.run(["git", "check-ignore", "-q", path], cwd=REPO, check=False).returncode == 0


def there(path: str) -> bool:
    """A file, a folder, a pattern with `*` or `<name>` that something matches, or something that git ignores."""
    pattern = re.sub(r"<[^>]*>", "*", path.rstrip("/"))
    return any(REPO.glob(pattern)) if "*" in pattern else (REPO / pattern).exists() or ignored(path)


def test_every_path_in_the_tree_exists(text):
    named = list(paths(tree_of(text)))
    assert len(named) >= 6
    assert [p for p in named if not there(p)] == []


def test_the_tree_names_every_top_level_folder(text):
    kept = subprocess.run(["git", "ls-files"], cwd=REPO, check=True, capture_output=True, text=True).stdout.split("\n")
    folders = {p.split("/")[0] for p in kept if "/" in p and not p.startswith(".")}
    named = {p.split("/")[0] for p in paths(tree_of(text))}
    assert folders - named == set()


def test_every_command_exists_with_its_options(text):
    assert commands.faults(text, commands.trees()) == []


@pytest.mark.parametrize("program", commands.PROGRAMS)
def test_both_programs_are_shown(text, program):
    """All commands are in docs/commands.md, which has a test of its own."""
    assert len(commands.commands_of(text, program, commands.trees()[program])) >= 3


def test_every_make_target_that_is_named_exists(text):
    made = set(re.findall(r"^([a-z][\w-]*):", (REPO / "Makefile").read_text("utf-8"), re.M))
    assert set(re.findall(r"(?:^|`|\s)make ([a-z][\w-]+)(?=`|\s*$|\s+[#&])", text, re.M)) - made == set()


def test_every_link_leads_somewhere(text):
    assert [name for name, place in commands.links(README) if not place.exists()] == []


# -- the reading of a tree ------------------------------------------------------------------------------------------


TREE = """\
engine/            the thing being optimised
optimizer/         the loop
  gates/           sealed
  {cli,loop}.py    two files
├── skills/<name>/SKILL.md  # one of many
│   └── codemod_tools.py
runs/              git-ignored
"""


def test_indentation_braces_comments_and_box_characters_are_read():
    assert list(paths(TREE)) == [
        "engine/", "optimizer/", "optimizer/gates/", "optimizer/cli.py", "optimizer/loop.py",
        "optimizer/skills/<name>/SKILL.md", "optimizer/codemod_tools.py", "runs/"]  # fmt: skip
    assert there("skills/<name>/SKILL.md") and there("runs/") and not there("optimizer/nowhere.py")


def test_a_block_of_folders_counts_as_the_tree_without_its_name():
    assert tree_of(f"x\n```\n{TREE}skills/\nreports/\n```\n").startswith("engine/")
    with pytest.raises(LookupError):
        tree_of("no tree\n```\nmake test\n```\n")
