"""`optimize mcp`: the proposer's tools for any coding agent that speaks the Model Context Protocol.

Over stdio, or streamable HTTP on localhost. An agent starts or joins a run, looks, tries edits, submits one patch per
attempt and reads the verdict; it never sees hidden prompts or gates' data, and cannot time anything. Not for: the
tools themselves (toolbox.py) or judging (the run does, in its own process).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError as McpToolError
from pydantic import BaseModel, Field

from optimizer import run as runs
from optimizer import state
from optimizer.run import RunError

from . import skillbook
from .base import Declined, ProposeContext
from .mailbox import AlreadyAnswered, Mailbox
from .toolbox import DESCRIPTIONS, Toolbox, ToolError

MOST_QUERIES, MOST_DRY_RUNS = 2000, 120  # per run, all clients together
LONGEST_WAIT_S = 540.0
INSTRUCTIONS = """Make an LLM inference engine faster, one small measured patch at a time. start_run or join_run,
then for each attempt: wait_for_question, look (list_findings, explain, read_code, skills, history), dry_run, then
submit_patch (or decline), then verdict. Edits go through submit_patch only. Greedy tokens must stay what they are."""


class EditIn(BaseModel):
    """Exact search and replace; `old` is in the file exactly once; empty `old` creates the file."""

    file: str
    old: str
    new: str


class FunctionIn(BaseModel):
    """A whole function to put in the place of the one with this qualified name."""

    file: str
    name: str
    source: str


class PatchIn(BaseModel):
    """One patch of a series; `predicted_us` is at most the bound of the cited findings."""

    edits: list[EditIn]
    functions: list[FunctionIn] = []
    finding_ids: list[str]
    mechanism: str = Field(description="a short slug: the skill's name where one is followed")
    title: str
    predicted_us: float = Field(ge=0)
    per: str = "token"
    risk: str = ""
    invariants: list[str] = []


class Session:
    """One server process: which run it is joined to. All state of a run is in the run's folder."""

    def __init__(self, runs_dir: Path, run_dir: Path | None = None, skill_folders: tuple[Path, ...] = ()) -> None:
        self.runs_dir, self.run_dir = runs_dir, run_dir
        self.skills = skillbook.load_all([skillbook.BUILT_IN, *skill_folders])
        self.process: subprocess.Popen[bytes] | None = None

    # -- runs ------------------------------------------------------------------------------------------------

    def start(self, arguments: list[str]) -> str:
        """Start `optimize --agent mcp ...` as a process of its own and join it."""
        if self.process is not None and self.process.poll() is None:
            raise ToolError("this server's run is still going; join_run another, or wait")
        place = self.runs_dir / runs.new_id()
        command = [sys.executable, "-m", "optimizer.cli", "--agent", "mcp", "--run-dir", str(place), "--runs", str(self.runs_dir), *arguments]
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        log = self.runs_dir / f"{place.name}.log"
        with log.open("wb") as handle:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, start_new_session=True)
        deadline = time.monotonic() + 60.0
        while not (place / "run.json").is_file():
            if self.process.poll() is not None:
                raise ToolError(f"the run ended at once: {log.read_text('utf-8', 'replace')[-1500:]}")
            if time.monotonic() > deadline:
                raise ToolError(f"the run did not begin within 60 s; see {log}")
            time.sleep(0.2)
        self.run_dir = place
        return f"run {place.name} began; wait_for_question says when it waits for a patch (traces and calibration come first)"

    def join(self, name: str | None) -> str:
        self.run_dir = runs.find(self.runs_dir, name)
        return f"joined run {self.run_dir.name}; {self.status()}"

    def status(self) -> str:
        run = self._run()
        lines = run.ledger.lines()
        done = state.attempts(lines)
        facts = {
            "run": run.dir.name,
            "finished": next((x["data"].get("reason") for x in lines if x["kind"] == "finished"), None),
            "waits_for_a_patch": self._box().question() is not None,
            "attempts": len(done),
            "accepted": sum(x["kind"] == "accepted" for x in lines),
            "speedup": round(state.speedup(lines), 4),
            "us_per_token": state.token_us(lines),
            "process": None if self.process is None else ("going" if self.process.poll() is None else "ended"),
        }
        return json.dumps(facts)

    def wait_for_question(self, seconds: float) -> str:
        """Wait until the run wants a patch, has finished, or the time is over."""
        deadline = time.monotonic() + min(seconds, LONGEST_WAIT_S)
        while time.monotonic() < deadline:
            if (found := self._box().question()) is not None:
                return f"attempt {found[0]} waits for a patch"
            if any(x["kind"] == "finished" for x in self._run().ledger.lines()[-3:]):
                return f"the run has finished: {self.status()}"
            if self.process is not None and self.process.poll() is not None:
                return f"the run's process has ended: {self.status()}"
            time.sleep(0.3)
        return f"not yet: {self.status()}"

    def verdict(self, attempt: int, seconds: float) -> str:
        """Wait for an attempt's end: verdict, class of the reason, interval, what the trace says."""
        deadline = time.monotonic() + min(seconds, LONGEST_WAIT_S)
        while True:
            lines = self._run().ledger.lines()
            item = next((h for h in state.history(lines) if h["attempt"] == attempt), None)
            if item is not None:
                accepted = next((x["data"] for x in lines if x["kind"] == "accepted" and x["attempt"] == attempt), {})
                extra = {k: accepted.get(k) for k in ("ratio", "ci95", "measured_us", "traced_us", "rows") if k in accepted}
                shown = {k: v for k, v in item.items() if k not in ("ast_hash", "patch_sha") and v not in (None, "")}
                return json.dumps({**shown, **extra}, default=str)
            if time.monotonic() >= deadline:
                return f"attempt {attempt} has no verdict yet: {self.status()}"
            time.sleep(0.5)

    # -- the open question -----------------------------------------------------------------------------------

    def use(self, tool: str, arguments: dict[str, Any]) -> str:
        """A tool of the toolbox on the open question; counted against the run's budget of queries."""
        box = self._box()
        found = box.question()
        if found is None and tool in ("list_skills", "read_skill"):
            return Toolbox(ProposeContext({}, ()), self.skills, "mcp").call(tool, arguments)
        if found is None:
            raise ToolError(f"the run does not wait for a patch now: {self.status()}")
        number, ctx = found
        left = box.count("queries", MOST_QUERIES)
        if tool == "dry_run":
            box.count("dry_runs", MOST_DRY_RUNS)
        toolbox = Toolbox(replace(ctx, try_out=self._try_out), self.skills, "mcp")
        answer = toolbox.call(tool, arguments)
        if toolbox.submitted is not None:
            box.reply(number, toolbox.submitted)
            answer = f"attempt {number}: {answer.replace('history', 'verdict')}"
        return answer if left > 20 else f"{answer}\n({left} queries left in this run)"

    def decline(self, why: str) -> str:
        found = self._box().question()
        if found is None:
            raise ToolError("the run does not wait for a patch now")
        self._box().reply(found[0], Declined("mcp", why=why, final=True))
        return "declined; the run ends when its proposer has nothing left"

    def _try_out(self, sources: Any) -> str | None:
        from optimizer.tryout import try_out

        return try_out(self._run(), sources)

    def _run(self) -> runs.Run:
        if self.run_dir is None:
            raise ToolError("no run: start_run or join_run first")
        return runs.load(self.run_dir)

    def _box(self) -> Mailbox:
        if self.run_dir is None:
            raise ToolError("no run: start_run or join_run first")
        return Mailbox(self.run_dir)


def _guarded(work: Callable[[], str]) -> str:
    """Known errors as tool errors with their message; everything else is a fault of ours and stays one."""
    try:
        return work()
    except (ToolError, RunError, AlreadyAnswered, PermissionError, RuntimeError) as error:
        raise McpToolError(str(error)) from error


def build_server(session: Session) -> MCPServer:
    """The MCP server with every tool bound to one session."""
    server = MCPServer("hotloop", instructions=INSTRUCTIONS)

    @server.tool(description="Start a run of the loop that asks this server's clients for patches. arguments: of `optimize`, e.g. ['--tp','4'].")
    def start_run(arguments: list[str]) -> str:
        return _guarded(lambda: session.start(arguments))

    @server.tool(description="Join a run by id, the beginning of one, or a path; the newest without.")
    def join_run(run: str | None = None) -> str:
        return _guarded(lambda: session.join(run))

    @server.tool(description="Where the run stands.")
    def status() -> str:
        return _guarded(session.status)

    @server.tool(description="Wait (at most 540 s) until the run wants a patch or has finished.")
    def wait_for_question(seconds: float = 240.0) -> str:
        return _guarded(lambda: session.wait_for_question(seconds))

    @server.tool(description="Wait for an attempt's verdict: class of the reason, measured interval, change in the trace.")
    def verdict(attempt: int, seconds: float = 240.0) -> str:
        return _guarded(lambda: session.verdict(attempt, seconds))

    @server.tool(description="Say that nothing is worth trying; the run ends.")
    def decline(why: str) -> str:
        return _guarded(lambda: session.decline(why))

    _add_looks(server, session)
    return server


def _add_looks(server: MCPServer, session: Session) -> None:
    """The toolbox's own tools, with typed arguments."""

    def use(tool: str, **arguments: Any) -> str:
        return _guarded(lambda: session.use(tool, arguments))

    @server.tool(description=DESCRIPTIONS["list_findings"])
    def list_findings() -> str:
        return use("list_findings")

    @server.tool(description=DESCRIPTIONS["explain"])
    def explain(finding_id: str) -> str:
        return use("explain", finding_id=finding_id)

    @server.tool(description=DESCRIPTIONS["read_code"])
    def read_code(file: str, first_line: int = 1, last_line: int = 0) -> str:
        return use("read_code", file=file, first_line=first_line, last_line=last_line)

    @server.tool(description=DESCRIPTIONS["search_code"])
    def search_code(pattern: str) -> str:
        return use("search_code", pattern=pattern)

    @server.tool(description=DESCRIPTIONS["list_skills"])
    def list_skills() -> str:
        return use("list_skills")

    @server.tool(description=DESCRIPTIONS["read_skill"])
    def read_skill(name: str) -> str:
        return use("read_skill", name=name)

    @server.tool(description=DESCRIPTIONS["knowledge"])
    def knowledge() -> str:
        return use("knowledge")

    @server.tool(description=DESCRIPTIONS["history"])
    def history() -> str:
        return use("history")

    @server.tool(description=DESCRIPTIONS["dry_run"])
    def dry_run(edits: list[EditIn], functions: list[FunctionIn] | None = None) -> str:
        return use("dry_run", edits=[e.model_dump() for e in edits], functions=[f.model_dump() for f in functions or []])

    @server.tool(description=DESCRIPTIONS["submit_patch"])
    def submit_patch(patches: list[PatchIn]) -> str:
        return use("submit_patch", patches=[p.model_dump() for p in patches])


def main(runs_dir: Path, run: str | None = None, port: int | None = None, folders: tuple[Path, ...] = ()) -> None:
    """Serve until the client goes away (stdio) or for ever (HTTP on 127.0.0.1:port, path /mcp)."""
    session = Session(runs_dir, runs.find(runs_dir, run) if run else None, folders)
    server = build_server(session)
    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)
