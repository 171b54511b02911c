"""The documentation says what the code says: generated parts are up to date, commands, keys and links are real."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import doc_commands as commands
import pytest

from optimizer import target
from optimizer.proposers import skillbook

REPO = Path(__file__).resolve().parents[1]
sys.path.append(str(REPO))
PAGES = sorted(p for p in (REPO / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def known():
    return commands.trees()


def test_generated_pages_are_up_to_date():
    from docs import generate

    assert generate.outdated() == [], "run `python -m docs.generate`"


def test_the_generator_notices_what_is_old_or_left_over(tmp_path, monkeypatch):
    from docs import generate

    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "findings", lambda: {tmp_path / "findings" / "a.md": "new\n"})
    monkeypatch.setattr(generate, "command_list", lambda: "commands\n")
    monkeypatch.setattr(generate, "BLOCKS", {"x": lambda: "now"})
    (tmp_path / "findings").mkdir()
    (tmp_path / "findings" / "gone.md").write_text("old rule\n")
    (tmp_path / "page.md").write_text("words\n<!-- generated: x -->\nthen\n<!-- end -->\nmore\n")
    assert generate.write() == ["commands.md", "findings/a.md", "findings/gone.md", "page.md"]
    assert (tmp_path / "page.md").read_text() == "words\n<!-- generated: x -->\n\nnow\n\n<!-- end -->\nmore\n"
    assert generate.outdated() == [] and not (tmp_path / "findings" / "gone.md").exists()


def test_every_rule_has_a_page():
    from trace_diff.findings import RULES

    pages = {p.stem for p in (REPO / "docs" / "findings").glob("*.md")}
    assert pages == {rule.RULE for rule in RULES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_commands_and_links_of_a_page_exist(page, known):
    assert commands.faults(page.read_text("utf-8"), known) == []
    assert [name for name, place in commands.links(page) if not place.exists()] == []


def test_the_list_of_commands_is_whole(known):
    text = (REPO / "docs" / "commands.md").read_text("utf-8")
    heads = set(re.findall(r"^## (.*)$", text, re.M))
    assert heads == {" ".join((program, *path)) for program, tree in known.items() for path in tree}


def test_a_command_that_is_not_there_is_noticed(known):
    text = "`optimize reprot`, `optimize report --srve`\n\n```\n$ optimize --goal 2x   # fine\n.venv/bin/trace-diff explain --nope x\n```\n"
    assert commands.faults(text, known) == [
        "trace-diff explain: no option --nope", "optimize reprot: no such command", "optimize report: no option --srve"]  # fmt: skip


def test_the_first_hour_explains_every_key_of_a_target_and_no_other():
    text = (REPO / "docs" / "first-hour.md").read_text("utf-8")
    table = text[text.index("| Key |") : text.index("Unknown keys are errors")]
    named = [k for row in table.splitlines() if row.startswith("|") for k in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(target.KEYS)
    for name in target.PLACEHOLDERS:
        assert f"{{{name}}}" in table


def test_the_page_on_skills_names_what_a_codemod_may_return_and_import():
    text = (REPO / "docs" / "skills.md").read_text("utf-8")
    for word in ("sources", "mechanism", "predicted_us", "invariants", "params", "activation", "title", "declined", *skillbook.TOOLS):
        assert word in text
