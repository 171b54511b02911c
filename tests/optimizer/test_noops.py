"""The no-op patches that try the measurement really are different programs that do the same."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import loop_fakes as fake
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.noops import noops

SOURCES = {p.name: p.read_text() for p in fake.ENGINE.glob("*.py")}


def test_many_different_programs_of_every_kind():
    found = noops(SOURCES, 60)
    assert len({(n.file, ast.dump(ast.parse(n.text))) for n in found}) == 60
    assert {n.kind for n in found} >= {"rename", "return"}
    originals = {name: ast.dump(ast.parse(text)) for name, text in SOURCES.items()}
    assert all(ast.dump(ast.parse(n.text)) != originals[n.file] for n in found)


def test_the_fake_model_says_the_same_after_each(tmp_path):
    right = fake.oracle((3, 4, 5), 6)
    for noop in noops({"model.py": SOURCES["model.py"]}, 6):
        (tmp_path / "model.py").write_text(noop.text)
        assert fake.tokens(tmp_path, (3, 4, 5), 6) == right


def test_branches_and_functions_change_places():
    source = "def a():\n    return 1 + 1\n\n\ndef b(x):\n    if x > 2:\n        y = 1\n    else:\n        y = 2\n    return y\n"
    by_kind = {n.kind: n for n in noops({"m.py": source}, 8)}
    for kind in ("swap", "invert", "rename", "return"):
        scope: dict = {}
        exec(by_kind[kind].text, scope)
        assert (scope["a"](), scope["b"](3), scope["b"](1)) == (2, 1, 2)


def test_too_many_are_refused():
    with pytest.raises(ValueError, match="only"):
        noops({"m.py": "x = 1\n"}, 1)
