"""Exact edits: one place or nothing, and edits derived from two texts lead from one to the other."""

from __future__ import annotations

import random

import pytest

from optimizer.patching import (
    EditMismatch,
    apply_edits,
    ast_hash,
    changed_lines,
    edits_from,
    functions,
    replace_function,
)
from optimizer.types import Edit

BEFORE = {
    "engine/a.py": "def f(x):\n    y = x + 1\n    return y\n\n\ndef g(x):\n    y = x + 1\n    return y * 2\n",
    "engine/b.py": "VALUE = 3\n",
}


def test_an_edit_that_matches_once_is_applied_and_the_input_is_left_alone() -> None:
    after = apply_edits(BEFORE, [Edit("engine/b.py", "VALUE = 3", "VALUE = 4")])
    assert after["engine/b.py"] == "VALUE = 4\n"
    assert BEFORE["engine/b.py"] == "VALUE = 3\n"


def test_an_edit_that_matches_twice_is_refused_and_names_both_lines() -> None:
    with pytest.raises(EditMismatch, match=r"2 times \(lines \[2, 7\]\)") as caught:
        apply_edits(BEFORE, [Edit("engine/a.py", "    y = x + 1\n", "    y = x\n")])
    assert caught.value.matches == 2


def test_an_edit_that_almost_matches_gets_the_nearest_lines_with_numbers() -> None:
    with pytest.raises(EditMismatch) as caught:
        apply_edits(BEFORE, [Edit("engine/a.py", "def g(x):\n    z = x + 1\n", "")])
    nearest = caught.value.nearest
    assert nearest is not None and (nearest.first, nearest.last) == (6, 7)
    assert "    7      y = x + 1" in str(caught.value)


def test_a_patch_with_one_bad_edit_is_not_applied_at_all() -> None:
    with pytest.raises(EditMismatch):
        apply_edits(BEFORE, [Edit("engine/b.py", "VALUE = 3", "VALUE = 4"), Edit("engine/a.py", "nowhere", "")])


def test_only_whitespace_at_line_ends_is_forgiven() -> None:
    text = {"m.py": "if a:  \n    b()\t\n    c()\n"}
    assert apply_edits(text, [Edit("m.py", "if a:\n    b()\n", "pass\n")])["m.py"] == "pass\n    c()\n"
    with pytest.raises(EditMismatch):
        apply_edits(text, [Edit("m.py", "if a:\n  b()\n", "pass\n")])


def test_windows_line_ends_are_matched() -> None:
    assert apply_edits({"m.py": "a\r\nb\r\n"}, [Edit("m.py", "a\nb", "c")])["m.py"] == "c\r\n"


def test_edits_of_one_patch_do_not_see_each_other_and_may_not_overlap() -> None:
    with pytest.raises(EditMismatch, match="overlaps"):
        apply_edits(BEFORE, [Edit("engine/a.py", "def g(x):\n    y", "def h(x):\n    y"), Edit("engine/a.py", "g(x)", "k(x)")])


def test_an_empty_old_creates_a_file_once() -> None:
    assert apply_edits(BEFORE, [Edit("engine/c.py", "", "X = 1\n")])["engine/c.py"] == "X = 1\n"
    with pytest.raises(EditMismatch, match="exists"):
        apply_edits(BEFORE, [Edit("engine/a.py", "", "X = 1\n")])


@pytest.mark.parametrize("seed", range(60))
def test_derived_edits_lead_from_before_to_after_and_each_is_unique(seed: int) -> None:
    rng = random.Random(seed)
    old = [rng.choice("abc") + "\n" for _ in range(rng.randrange(1, 25))]  # few letters: little is unique
    new = list(old)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(new) + 1)
        new[at : at + rng.randrange(3)] = [rng.choice("abcd") + "\n" for _ in range(rng.randrange(3))]
    before, after = {"m.py": "".join(old)}, {"m.py": "".join(new), "n.py": "N\n"}
    edits = edits_from(before, after)
    assert apply_edits(before, edits) == after
    assert all(before["m.py"].count(e.old) == 1 for e in edits if e.file == "m.py")


def test_derived_edits_are_small() -> None:
    lines = [f"line {n}\n" for n in range(300)]
    changed = [*lines[:10], "new\n", *lines[10:200], "other\n", *lines[201:]]
    edits = edits_from({"m.py": "".join(lines)}, {"m.py": "".join(changed)})
    assert len(edits) == 2 and max(e.old.count("\n") for e in edits) == 1
    assert changed_lines({"m.py": "".join(lines)}, {"m.py": "".join(changed)}) == 3


def test_the_hash_sees_the_program_and_not_its_comments() -> None:
    one = {"m.py": 'def f():\n    """Doc."""\n    return 1\n'}
    same = {"m.py": "# why\ndef f():\n\n    return  1\n"}
    other = {"m.py": "def f():\n    return 2\n"}
    assert ast_hash(one) == ast_hash(same) != ast_hash(other)
    assert ast_hash({"m.py": "def ("}) != ast_hash({"m.py": "def (("})


def test_a_method_is_replaced_by_its_qualified_name() -> None:
    text = {"m.py": "class A:\n    # keep\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n\n\ndef f():\n    return 1\n"}
    edits = replace_function(text, "m.py", "A.f", "def f(self):\n    return 2\n")
    after = apply_edits(text, edits)["m.py"]
    assert after == text["m.py"].replace("return 1", "return 2", 1)
    with pytest.raises(ValueError, match=r"A\.f, A\.g, f"):
        replace_function(text, "m.py", "B.f", "def f(): pass")
    with pytest.raises(ValueError, match="exactly one function"):
        replace_function(text, "m.py", "A.f", "x = 1")
    assert functions(text["m.py"]) == ["A.f", "A.g", "f"]


@pytest.mark.parametrize(
    "file",
    ["../x.py", "/etc/x.py", ".git/x.py", "engine/.git/hooks/x.py", "engine/./a.py", "engine//a.py", "engine/a\nb.py", "a" * 300 + ".py", "engine/\udc80.py"],
)
def test_a_file_outside_the_target_is_the_proposers_mistake(file):
    with pytest.raises(EditMismatch, match=r"inside the target|characters"):
        apply_edits({"engine/a.py": "x = 1\n"}, [Edit(file, "", "y = 2\n")])


def test_text_that_no_file_can_hold_is_the_proposers_mistake():
    with pytest.raises(EditMismatch, match="no text that a file can hold"):
        apply_edits({"a.py": "x = 1\n"}, [Edit("a.py", "x = 1", "x = '\ud800'")])


@pytest.mark.parametrize("text", ["a" + ".b" * 100_000, "-" * 100_000 + "1", "x = '\ud800'", "x = 1\0", "+".join(["1"] * 5000)])
def test_a_program_that_cannot_be_parsed_still_has_a_name(text):
    assert ast_hash({"a.py": text}) != ast_hash({"a.py": text + "\n\nx"}) and len(ast_hash({"a.py": text})) == 64
