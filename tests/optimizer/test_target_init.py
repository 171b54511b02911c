"""`optimize init` and `optimize check` know the options that an engine's own argparse would refuse or miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer import target_init
from optimizer.target import load_target

SERVE = """import argparse

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--uds")
    parser.add_argument("--trace-dir")
    {more}
    options = parser.parse_args()
"""


def engine(place: Path, more: str = "pass") -> Path:
    (place / "serve.py").write_text(SERVE.format(more=more))
    return place


def test_a_draft_passes_what_the_engine_knows_and_asks_for_what_it_cannot_guess(tmp_path: Path) -> None:
    target_init.draft(engine(tmp_path))
    serve = load_target(tmp_path).serve
    assert "--tp" not in serve and "--device" not in serve
    assert serve[serve.index("--engine") + 1] == target_init.FILL_IN
    said = target_init.check(tmp_path)
    assert any("FILL-IN" in line for line in said) and not any("does not know" in line for line in said)
    file = tmp_path / "target.toml"
    file.write_text(file.read_text().replace("FILL-IN", "mine").replace('devices = ["cpu", "cuda"]', 'devices = ["cpu"]'))
    assert target_init.check(tmp_path) == []


def test_options_that_would_be_refused_or_missed_are_named(tmp_path: Path) -> None:
    target_init.draft(engine(tmp_path))
    file = tmp_path / "target.toml"
    file.write_text(file.read_text().replace('"--engine", "FILL-IN"', '"--tp", "{tp}"'))
    said = target_init.check(tmp_path)
    assert any(line.startswith("serve passes --tp, which serve does not know (it has --engine, --model") for line in said)
    assert "serve does not pass --engine, which serve requires" in said


@pytest.mark.parametrize("more", ["add_more(parser)", "add = parser.add_argument", "parser.add_subparsers()", "parser.parse_known_args()"])
def test_a_parser_that_others_extend_is_left_alone(tmp_path: Path, more: str) -> None:
    target_init.draft(engine(tmp_path, more))
    assert "--tp" in load_target(tmp_path).serve
    assert not any("does not know" in line or "requires" in line for line in target_init.check(tmp_path))


def test_the_bundled_targets_check_clean(repo: Path) -> None:
    for place in ("engine", "docs/examples/hf_target"):
        assert target_init.check(repo / place) == []
