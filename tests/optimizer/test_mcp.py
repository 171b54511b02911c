"""A run of the fake engine driven over the Model Context Protocol by the package's own client."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run
from mcp import Client, StdioServerParameters

from optimizer.loop import Loop
from optimizer.proposers import Declined, ProposeContext, get
from optimizer.proposers.mailbox import AlreadyAnswered, Mailbox
from optimizer.proposers.mcp_server import Session, build_server
from optimizer.run import Run
from optimizer.services import NoProposal, Question
from optimizer.types import Series

PATCH = {
    "edits": [{"file": "model.py", "old": "STEP_US = 1000", "new": "STEP_US = 700"}],
    "finding_ids": ["launch-bound"],
    "mechanism": "shorter step",
    "title": "a shorter step",
    "predicted_us": 300.0,
}


def start(tmp_path: Path) -> tuple[Run, threading.Thread]:
    """A run whose proposer waits for an agent, on a thread of its own."""
    run = new_run(tmp_path / "runs" / "run", agent="mcp")
    fakes = Fakes(run, [])
    proposer = get("mcp", wait_s=60.0, poll_s=0.02)

    def propose(question: Question) -> Any:
        context = ProposeContext(
            question.sources, question.findings, question.history, incumbent=question.incumbent,  # type: ignore[arg-type]
            attempt=question.attempt, exchanges=run.dir / "exchanges",
        )  # fmt: skip
        answer = proposer.propose(context)
        return NoProposal(answer.why, answer.final) if isinstance(answer, Declined) else answer

    services = replace(fakes.services(), propose=propose)
    thread = threading.Thread(target=Loop(services, run).go, daemon=True)
    thread.start()
    return run, thread


def text(result: Any) -> str:
    return "\n".join(block.text for block in result.content)


def test_an_agent_looks_submits_and_reads_the_verdict(tmp_path: Path) -> None:
    run, thread = start(tmp_path)

    async def drive() -> None:
        server = build_server(Session(run.dir.parent))
        async with Client(server) as client:

            async def call(tool: str, **arguments: Any) -> str:
                result = await client.call_tool(tool, arguments)
                assert not result.is_error, text(result)
                return text(result)

            names = {tool.name for tool in (await client.list_tools()).tools}
            assert {"list_findings", "explain", "read_code", "dry_run", "submit_patch", "verdict", "join_run"} <= names
            assert not any(word in name for name in names for word in ("bench", "shell", "time", "measure"))
            await call("join_run")
            assert "attempt 1 waits" in await call("wait_for_question", seconds=20)
            assert json.loads(await call("list_findings"))["findings"][0]["id"] == "host-reads"
            assert '"bound_us": 800.0' in await call("explain", finding_id="launch-bound")
            assert "STEP_US = 1000" in await call("read_code", file="model.py")
            assert "inference" in await call("list_skills")
            bad = await client.call_tool("submit_patch", {"patches": [PATCH | {"predicted_us": 5000.0}]})
            assert bad.is_error and "above the bound" in text(bad)
            assert "attempt 1: submitted" in await call("submit_patch", patches=[PATCH])
            late = await client.call_tool("submit_patch", {"patches": [PATCH]})
            assert late.is_error  # one answer per attempt
            verdict = json.loads(await call("verdict", attempt=1, seconds=30))
            assert verdict["verdict"] == "accept" and verdict["ratio"] == pytest.approx(0.7, rel=0.03)
            assert verdict["traced_us"] == pytest.approx(300)
            assert "attempt 2 waits" in await call("wait_for_question", seconds=20)
            assert json.loads((await call("history")).splitlines()[0])["mechanism"] == "shorter-step"
            await call("decline", why="enough")

    asyncio.run(drive())
    thread.join(30)
    assert not thread.is_alive()
    assert [k for k in fake.kinds(run) if k in ("accepted", "finished")] == ["accepted", "finished"]


def test_two_clients_cannot_both_answer_one_attempt(tmp_path: Path) -> None:
    box, other = Mailbox(tmp_path), Mailbox(tmp_path)
    ctx = ProposeContext({"model.py": ""}, [], incumbent="c0", attempt=1)
    box.ask(1, ctx)
    first, second = fake.WIN, fake.WRONG_TOKENS
    won: list[int] = []
    barrier = threading.Barrier(2)

    def reply(n: int, mailbox: Mailbox, series: Series) -> None:
        barrier.wait()
        try:
            mailbox.reply(1, series)
            won.append(n)
        except AlreadyAnswered:
            pass

    threads = [threading.Thread(target=reply, args=a) for a in ((0, box, first), (1, other, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert box.answer(1) == (first, second)[won[0]]


def test_an_answer_to_an_earlier_question_is_not_taken_for_this_one(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    box.ask(3, ProposeContext({"model.py": ""}, [], incumbent="old"))
    box.reply(3, fake.WIN)
    box.ask(3, ProposeContext({"model.py": ""}, [], incumbent="old"))  # resumed: the same question
    assert box.answer(3) == fake.WIN
    box.ask(3, ProposeContext({"model.py": ""}, [], incumbent="new"))
    assert box.answer(3) is None
    box.reply(3, Declined("mcp", why="no"))
    assert isinstance(box.answer(3), Declined) and box.answer(3) is None


def test_queries_are_counted_over_all_clients_and_end(tmp_path: Path) -> None:
    for left in (1, 0):
        assert Mailbox(tmp_path).count("queries", 2) == left
    with pytest.raises(PermissionError, match="budget of 2 queries"):
        Mailbox(tmp_path).count("queries", 2)


def test_no_agent_no_patch(tmp_path: Path) -> None:
    proposer = get("mcp", wait_s=0.05, poll_s=0.01)
    answer = proposer.propose(ProposeContext({}, [], exchanges=tmp_path / "exchanges", attempt=1))
    assert isinstance(answer, Declined) and "optimize mcp" in answer.why
    assert Mailbox(tmp_path).question() is None
    stopped = ProposeContext({}, [], exchanges=tmp_path / "exchanges", attempt=1, stopped=lambda: True)
    answer = proposer.propose(stopped)
    assert isinstance(answer, Declined) and not answer.final


def test_the_command_line_serves_over_stdio(tmp_path: Path) -> None:
    async def drive() -> None:
        command = StdioServerParameters(command=sys.executable, args=["-m", "optimizer.cli", "mcp", "--runs", str(tmp_path)])
        async with Client(command) as client:
            result = await client.call_tool("join_run", {})
            assert result.is_error and "no runs in" in text(result)

    asyncio.run(asyncio.wait_for(drive(), 60))
