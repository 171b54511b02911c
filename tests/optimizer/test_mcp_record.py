"""The committed run that a coding agent drove over MCP: it verifies, and its replay proposes the same programs bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optimizer import seal, state
from optimizer.candidate import patch_sha
from optimizer.patching import apply_edits, ast_hash
from optimizer.proposers import Declined, ProposeContext, get
from optimizer.proposers.skillbook import BUILT_IN, load_all
from optimizer.run import Run, load
from optimizer.types import Edit, Series
from optimizer.verify import verify

NAME = "reports/gallery/mcp-tiny"


@pytest.fixture
def record(repo: Path) -> Run:
    return load(repo / NAME)


def proposed(run: Run, number: int) -> list[dict[str, Any]]:
    return [x["data"] for x in run.ledger.lines() if x["kind"] == "proposed" and x["attempt"] == number]


def hashes(run: Run, programs: list[Mapping[str, str]], told: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(as it is, as it was told); hashes of syntax trees are comparable only under the Python that the run was made with."""
    if str(run.request.environment["python"]).split(".")[:2] != [str(n) for n in sys.version_info[:2]]:
        return [], []
    return [ast_hash(p) for p in programs], [line["ast_hash"] for line in told]


def test_nothing_in_it_fails_to_verify(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "verify", lambda: None)  # whether this checkout is sealed is another test's business
    monkeypatch.chdir(repo)  # the record names the model relative to the checkout
    found = {check.what: check.ok for check in verify(repo / NAME)}
    assert not [what for what, ok in found.items() if ok is False]
    assert found["ledger chain"] and found["end of the ledger"] and found["weights"] and found["repository"]


def test_an_agent_got_three_patches_in_that_no_skill_stands_for(record: Run) -> None:
    accepted = [a for a in state.attempts(record.ledger.lines()) if str(a.verdict) == "accept"]
    patches = [p for a in accepted for p in proposed(record, a.number)]
    assert record.request.agent == "mcp" and {p["proposer"] for p in patches} == {"mcp"}
    assert len({p["mechanism"] for p in patches}) == len(patches) >= 3
    assert not {p["mechanism"] for p in patches} & set(load_all([BUILT_IN]))
    final = record.repo.incumbent()
    assert len(record.repo.log(record.base, final)) == len(patches)


def test_its_replay_proposes_the_same_programs_and_they_are_the_committed_ones(record: Run) -> None:
    replay = get("replay", recording=str(record.dir))
    incumbent, history = record.base, []
    sources: dict[str, str] = {}
    for attempt in state.attempts(record.ledger.lines()):
        sources = dict(record.repo.sources(incumbent, record.target.editable))
        series = replay.propose(ProposeContext(sources, [], history=tuple(history)))
        assert isinstance(series, Series)
        told = proposed(record, attempt.number)
        assert [patch_sha(p) for p in series.patches] == [line["patch_sha"] for line in told]
        texts: list[Mapping[str, str]] = []
        for patch in series.patches:
            sources = apply_edits(sources, patch)
            texts.append(sources)
        now, then = hashes(record, texts, told)
        assert now == then
        history.append({"attempt": attempt.number})
        if attempt.end is not None and attempt.end["kind"] == "accepted":
            commits = attempt.end["data"]["commits"]
            assert [dict(record.repo.sources(c, record.target.editable)) for c in commits] == texts
            incumbent = commits[-1]
    ended = replay.propose(ProposeContext(sources, [], history=tuple(history)))
    assert isinstance(ended, Declined) and "ends after" in str(ended)


def test_what_was_judged_is_what_the_agent_sent(record: Run) -> None:
    """The conversation beside it leads to the recorded patches."""
    kept = [json.loads(line) for line in (record.dir / "exchanges" / "mcp.jsonl").read_text("utf-8").splitlines()]
    sent = {x["asked"]["attempt"]: x["asked"]["patches"] for x in kept if x["tool"] == "submit_patch" and not x["answer"].startswith("error")}
    attempts = state.attempts(record.ledger.lines())
    assert sorted(sent) == [a.number for a in attempts]
    for attempt in attempts:
        sources = dict(record.repo.sources(attempt.lines[0]["incumbent_commit"], record.target.editable))
        for patch, line in zip(sent[attempt.number], proposed(record, attempt.number), strict=True):
            sources = apply_edits(sources, [Edit(**e) for e in patch["edits"]])
            now, then = hashes(record, [sources], [line])
            assert now == then and patch["mechanism"] == line["mechanism"]
    verdicts = {x["asked"]["attempt"]: json.loads(x["answer"]) for x in kept if x["tool"] == "verdict" and x["answer"].startswith("{")}
    for item in state.history(record.ledger.lines()):
        assert verdicts[item["attempt"]]["verdict"] == item["verdict"]
        assert verdicts[item["attempt"]]["measured_ratio_ci95"] == item["measured_ratio_ci95"]
