"""Whole runs of the loop on the fake engine: by Claude against a local server, and replayed without one, to accepted patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run
from messages_server import serve, text, tools

from optimizer.loop import Loop
from optimizer.proposers import Budget, Declined, ProposeContext, get
from optimizer.proposers.replay import record
from optimizer.run import Run
from optimizer.services import NoProposal, Question
from optimizer.types import Series


def go(place: Path, agent: str, **options: Any) -> Run:
    """One run from its start to its end with a real proposer."""
    run = new_run(place, agent=agent)
    proposer = get(agent, **options)

    def propose(question: Question) -> Series | NoProposal:
        context = ProposeContext(
            question.sources, question.findings, question.history, incumbent=question.incumbent,  # type: ignore[arg-type]
            attempt=question.attempt, exchanges=run.dir / "exchanges", budget=Budget(usd=question.usd_left),
        )  # fmt: skip
        answer = proposer.propose(context)
        return NoProposal(str(answer), answer.final, answer.usd) if isinstance(answer, Declined) else answer

    Loop(replace(Fakes(run, []).services(), propose=propose), run).go()
    return run


def submit(old: str, new: str, **more: Any) -> dict[str, Any]:
    patch = {
        "edits": [{"file": "model.py", "old": old, "new": new}],
        "functions": [], "finding_ids": ["launch-bound"], "mechanism": "shorter-step", "title": f"{old} to {new}",
        "predicted_us": 100.0, "per": "token", "risk": "none", "invariants": [],
    }  # fmt: skip
    return tools(("submit_patch", {"patches": [patch | more]}))


SCRIPT = (
    tools(("list_findings", {}), ("read_code", {"file": "model.py", "first_line": 1, "last_line": 0})),
    submit("STEP_US = 1000", "STEP_US = 700"),
    submit("ids.append(next_token(weights, ids, vocabulary))", "ids.append(7)"),  # rejected: wrong tokens
    submit("STEP_US = 700", "STEP_US = 500"),
    *[text("DECLINE: nothing else is worth trying")] * 3,  # who may still find something is asked again, but not for ever
)
ENDS = ("accepted", "rejected", "undecided", "parked", "finished")


@pytest.fixture(scope="module")
def conversed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, list[Any]]]:
    """A run driven by the script, and the requests that the server got."""
    with pytest.MonkeyPatch.context() as patch, serve(*SCRIPT) as api:
        for name in ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE", "ANTHROPIC_CONFIG_DIR", "ANTHROPIC_MODEL"):
            patch.delenv(name, raising=False)
        patch.setenv("ANTHROPIC_API_KEY", "sk-ant-test-0123456789abcdef")
        patch.setenv("NO_PROXY", "127.0.0.1")
        run = go(tmp_path_factory.mktemp("claude") / "run", "claude", model="test", usd_in=3.0, usd_out=15.0, base_url=api.url)
        yield run, api.requests


def test_a_conversation_ends_in_accepted_patches_and_history_reaches_the_next_one(conversed) -> None:
    run, requests = conversed
    assert [k for k in fake.kinds(run) if k in ENDS] == ["accepted", "rejected", "accepted", "finished"]
    assert "\nSTEP_US = 500\n" in run.repo.sources(run.repo.incumbent(), run.target.editable)["model.py"]
    task = requests[3][1]["messages"][0]["content"]  # built from the ledger, not from the conversation before
    assert '"verdict": "reject"' in task and '"reason": "wrong_tokens"' in task
    assert len(requests[3][1]["messages"]) == 1 and len(requests) == len(SCRIPT)
    spent = [line["data"]["usd"] for line in run.ledger.lines() if line["kind"] == "proposed"]
    assert spent == pytest.approx([2 * 0.0045, 0.0045, 0.0045])


def test_the_same_run_is_replayed_without_a_server_bit_for_bit(conversed, tmp_path: Path) -> None:
    first, _ = conversed
    file = tmp_path / "recording.jsonl"
    assert record(first.dir, file) == 3
    again = go(tmp_path / "again", "replay", recording=str(file))

    def told(run: Run, *names: str) -> list[Any]:
        return [[line["data"].get(n) for n in names] for line in run.ledger.lines() if line["kind"] in ("proposed", *ENDS[:2])]

    assert told(first, "patch_sha", "ast_hash", "reason") == told(again, "patch_sha", "ast_hash", "reason")
    tree = [run.repo.sources(run.repo.incumbent(), run.target.editable) for run in (first, again)]
    assert tree[0] == tree[1]
