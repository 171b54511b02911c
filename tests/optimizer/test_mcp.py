"""A run of the fake engine driven over the Model Context Protocol by the package's own client."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run
from mcp import Client, StdioServerParameters

from optimizer import state
from optimizer.loop import Loop
from optimizer.proposers import Declined, ProposeContext, get
from optimizer.proposers.mailbox import AlreadyAnswered, Mailbox
from optimizer.proposers.mcp_server import Session, build_server, start_arguments
from optimizer.proposers.toolbox import ToolError
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
            assert "attempt 1 waits" in await call("wait_for_question", seconds=120)
            assert json.loads(await call("list_findings"))["findings"][0]["id"] == "host-reads"
            assert '"bound_us": 800.0' in await call("explain", finding_id="launch-bound")
            assert "STEP_US = 1000" in await call("read_code", file="model.py")
            assert "inference" in await call("list_skills")
            bad = await client.call_tool("submit_patch", {"attempt": 1, "patches": [PATCH | {"predicted_us": 5000.0}]})
            assert bad.is_error and "above the bound" in text(bad)
            stale = await client.call_tool("submit_patch", {"attempt": 7, "patches": [PATCH]})
            assert stale.is_error and "attempt 1 is" in text(stale)
            said = await call("submit_patch", attempt=1, patches=[PATCH])
            assert said == "attempt 1: submitted 1 patch(es); `verdict` with this number waits for how it was judged"
            late = await client.call_tool("submit_patch", {"attempt": 1, "patches": [PATCH]})
            assert late.is_error  # one answer per attempt
            said = await call("verdict", attempt=1, seconds=150)
            assert said.startswith("{"), said
            verdict = json.loads(said)
            assert verdict["verdict"] == "accept" and verdict["ratio"] == pytest.approx(0.7, rel=0.03)
            assert verdict["traced_us"] == pytest.approx(300)
            assert "attempt 2 waits" in await call("wait_for_question", seconds=120)
            assert json.loads((await call("history")).splitlines()[0])["mechanism"] == "shorter-step"
            await call("decline", attempt=2, why="enough")

    asyncio.run(drive())
    thread.join(120)
    assert not thread.is_alive()
    assert [k for k in fake.kinds(run) if k in ("accepted", "finished")] == ["accepted", "finished"]
    kept = [json.loads(line) for line in (run.dir / "exchanges" / "mcp.jsonl").read_text().splitlines()]
    submitted = next(x for x in kept if x["tool"] == "submit_patch" and x["answer"].startswith("attempt 1"))
    assert submitted["asked"]["patches"][0]["edits"] == PATCH["edits"] and submitted["asked"]["attempt"] == 1
    assert [x["answer"][:27] for x in kept if x["answer"].startswith("error: predicted")] == ["error: predicted 5000 us is"]
    assert [x["tool"] for x in kept][-1] == "decline"


def test_status_says_what_is_judged_and_what_can_be_seen_here(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", agent="mcp")
    session = Session(tmp_path, run.dir)
    Loop(replace(Fakes(run, [fake.WIN]).services(), check_seal=lambda: None), run).go()
    lines = run.ledger.lines()
    said = json.loads(session.status())
    noise = next(x["data"] for x in lines if x["kind"] == "calibrated")
    assert said["smallest_gain_that_counts"] == round(noise["margin"], 4)
    assert said["gain_seen_with_80_percent_power"] == round(noise["mde"], 4)
    assert said["being_judged"] is None and said["last_step"].startswith("finished at ") and said["process"] is None
    cut = next(n for n, x in enumerate(lines) if x["kind"] == "screened")
    text = "".join((run.dir / "ledger.jsonl").read_text().splitlines(keepends=True)[: cut + 1])
    (run.dir / "ledger.jsonl").write_text(text)
    said = json.loads(session.status())
    assert said["being_judged"] == 1 and said["open_attempt"] is None and said["last_step"].startswith("screened at ")


def test_the_process_of_one_run_is_not_told_of_another(tmp_path: Path) -> None:
    runs = [new_run(tmp_path / name, agent="mcp") for name in ("one", "two")]
    session = Session(tmp_path, runs[0].dir)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        session.process, session.started = process, "one"
        told = [json.loads(session.status(run.dir.name))["process"] for run in runs]
        process.kill()
    assert told == ["going", None]


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["seal", "--reason", "x"],  # another command
        ["--unsafe-no-sandbox"],
        ["--accept-numeric-drift"],
        ["--trust-skills", "/tmp"],  # code in the optimiser's process
        ["--tp", "4", "review"],
        ["--tp"],
        ["--attempts=1", "--agent=playbook"],
    ],
)
def test_a_client_starts_runs_but_loosens_nothing(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"cannot be set here|needs a value"):
        Session(tmp_path).start(arguments)
    assert list(tmp_path.iterdir()) == []
    assert start_arguments(["--tp", "4", "--goal=1.5x"]) == ["--tp=4", "--goal=1.5x"]


def test_a_second_client_cannot_move_the_first_ones_run_and_names_its_own(tmp_path: Path) -> None:
    one, two = (new_run(tmp_path / "runs" / name, agent="mcp") for name in ("one", "two"))
    for run in (one, two):
        Mailbox(run.dir).ask(1, ProposeContext({"model.py": f"NAME = {run.dir.name!r}\n"}, [], incumbent="c0", attempt=1))
    session = Session(tmp_path / "runs")
    session.join("one")
    with pytest.raises(ToolError, match="run='two'"):
        session.join("two")
    look = {"file": "model.py", "first_line": 1, "last_line": 0}
    assert "'one'" in session.use("read_code", look) and "'two'" in session.use("read_code", look, "two")
    one.ledger.append("finished", None, {"reason": "over"})
    assert session.join("two").startswith("joined run two")


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def test_the_command_line_serves_several_clients_over_http_on_this_machine_only(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs" / "run", agent="mcp")
    Mailbox(run.dir).ask(1, ProposeContext({"model.py": "STEP_US = 1000\n"}, [fake.Finding("launch-bound", "launch-bound", fake.Status.FOUND, "x")], incumbent="c0", attempt=1))
    port = free_port()
    command = [sys.executable, "-m", "optimizer.cli", "mcp", "--http", str(port), "--runs", str(tmp_path / "runs"), "--run", "run"]

    async def client(name: str) -> list[str]:
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            waits = await client.call_tool("wait_for_question", {"seconds": 20})
            patch = PATCH | {"title": name, "predicted_us": 0.0}
            return [text(waits), text(await client.call_tool("submit_patch", {"attempt": 1, "patches": [patch]}))]

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(client("first"), client("second")))

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            stranger = httpx2.post(f"http://127.0.0.1:{port}/mcp", headers={"Host": "elsewhere.example"}, json={})
            assert stranger.status_code in (400, 403, 421)
            said = asyncio.run(asyncio.wait_for(both(), 90))
        finally:
            server.terminate()
    assert [waits for waits, _ in said] == ["attempt 1 waits for a patch"] * 2
    won = [answer for _, answer in said if "attempt 1: submitted" in answer]
    assert len(won) == 1  # and the other was told so
    series = Mailbox(run.dir).answer(1)
    assert isinstance(series, Series) and series.patches[0].title in ("first", "second")


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        with socket.socket() as door:
            if door.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None
        time.sleep(0.1)
    raise AssertionError("the server did not come up")


def test_the_command_line_serves_over_stdio(tmp_path: Path) -> None:
    async def drive() -> None:
        command = StdioServerParameters(command=sys.executable, args=["-m", "optimizer.cli", "mcp", "--runs", str(tmp_path)])
        async with Client(command) as client:
            result = await client.call_tool("join_run", {})
            assert result.is_error and "no runs in" in text(result)

    asyncio.run(asyncio.wait_for(drive(), 60))


def test_the_two_lines_of_the_readme_start_the_server() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
    block = readme.split("```json\n", 1)[1].split("```", 1)[0]
    entry = json.loads(block)["mcpServers"]["hotloop"]
    assert len(block.splitlines()) == 2 and entry["command"].endswith("/optimize")

    async def drive() -> None:
        command = StdioServerParameters(command=str(Path(sys.executable).with_name("optimize")), args=entry["args"])
        async with Client(command) as client:
            assert {"start_run", "submit_patch", "verdict"} <= {tool.name for tool in (await client.list_tools()).tools}

    asyncio.run(asyncio.wait_for(drive(), 60))


def test_the_next_run_waits_for_the_report_of_a_finished_one_and_not_for_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path / "one", agent="mcp")
    session = Session(tmp_path, run.dir)
    monkeypatch.setattr(Session, "_start", lambda self, arguments: "began")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as process:
        session.process, session.started = process, "one"
        with pytest.raises(ToolError, match="run one is still going"):
            session.start([])
        run.ledger.append("finished", None, {"reason": "enough"})
        assert session.start([]) == "began"


def test_an_undecided_attempt_says_what_was_resolved_and_a_failed_gate_does_not_say_where() -> None:
    proposed = {"mechanism": "m", "finding_ids": ["f"], "ast_hash": "a", "patch_sha": "s", "predicted_us": 1.0}

    def lines(kind: str, **data: Any) -> list[dict[str, Any]]:
        both = (("proposed", proposed), (kind, data))
        return [{"kind": k, "attempt": 1, "data": d, "incumbent_commit": "c"} for k, d in both]

    undecided = state.history(lines("undecided", detail="gain +4 % not resolved", reason=None, stage="decide"))
    assert undecided[0]["verdict"] == "undecided" and undecided[0]["detail"] == "gain +4 % not resolved"
    wrong = state.history(lines("rejected", detail="stream 3, token 9", reason="wrong_tokens", stage="quick"))
    assert wrong[0]["detail"] == ""
