"""`optimize mcp`: the proposer's tools for any coding agent that speaks the Model Context Protocol.

Over stdio, or streamable HTTP on localhost. An agent starts or joins a run, looks, tries edits, submits one patch per
attempt and reads the verdict; it never sees hidden prompts or gates' data, and cannot time anything. Not for: the
tools themselves (toolbox.py) or judging (the run does, in its own process). What a client asked of a run and was told
is kept in its folder (`exchanges/mcp.jsonl`), as every conversation that leads to patches is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
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
# What a client may say about the run that it starts. Not: what loosens the gates, loads code into the optimiser, or is
# another command (`seal`, `review`, `admit`).
START_OPTIONS = (
    "--target", "--goal", "--target-dir", "--model", "--tp", "--device", "--devices", "--protocol", "--attempts",
    "--budget-minutes", "--max-rejections", "--gpu-minutes", "--seed",
)  # fmt: skip
LONGEST_WAIT_S = 540.0
REPORT_S = 30.0  # a run that has finished is given so long to end its process
EXCHANGES = "mcp.jsonl"  # in the run's folder of exchanges
INSTRUCTIONS = """Make an LLM inference engine faster, one small measured patch at a time. start_run or join_run,
then for each attempt: wait_for_question, look (list_findings, explain, read_code, skills, history), dry_run, then
submit_patch (or decline) with that attempt's number, then verdict. Edits go through submit_patch only. Greedy tokens
must stay what they are. Several clients may share this server: `run` in a call names a run other than the joined one."""


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
    """One server process, for any number of clients: the run that a call means when it names none. The protocol has no
    sessions of its own any more, so that run is not changed under a client while it is going. All state of a run is in
    the run's folder."""

    def __init__(self, runs_dir: Path, run_dir: Path | None = None, skill_folders: tuple[Path, ...] = ()) -> None:
        self.runs_dir, self.run_dir = runs_dir, run_dir
        self.skills = skillbook.load_all([skillbook.BUILT_IN, *skill_folders])
        self.process: subprocess.Popen[bytes] | None = None
        self.started: str | None = None  # id of the run that `process` is
        self._starting = threading.Lock()

    # -- runs ------------------------------------------------------------------------------------------------

    def start(self, arguments: list[str]) -> str:
        """Start `optimize --agent mcp ...` as a process of its own and join it. Arguments: START_OPTIONS only."""
        checked = start_arguments(arguments)
        with self._starting:
            if self._going():
                raise ToolError(f"this server's run {self.started} is still going; join_run another, or wait")
            return self._start(checked)

    def _going(self) -> bool:
        """Whether the run that was started here works on; one that has finished only writes its report: waited for."""
        if self.process is None or self.process.poll() is not None:
            return False
        if self.started is None or not self._finished(self.runs_dir / self.started):
            return True
        try:
            self.process.wait(REPORT_S)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _start(self, arguments: list[str]) -> str:
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
        self.run_dir, self.started = place, place.name
        return f"run {place.name} began; wait_for_question says when it waits for a patch (traces and calibration come first)"

    def join(self, name: str | None) -> str:
        """Make a run the one that calls mean; another one that is still going stays it."""
        wanted = runs.find(self.runs_dir, name)
        if self.run_dir is not None and self.run_dir != wanted and not self._finished(self.run_dir):
            raise ToolError(f"this server is joined to run {self.run_dir.name}, which has not finished; say run={wanted.name!r} in each call")
        self.run_dir = wanted
        return f"joined run {wanted.name}; {self.status()}"

    def _finished(self, place: Path) -> bool:
        return any(x["kind"] == "finished" for x in runs.load(place).ledger.lines()[-3:])

    def status(self, name: str | None = None) -> str:
        run = self._run(name)
        lines = run.ledger.lines()
        done = state.attempts(lines)
        question = Mailbox(run.dir).question()
        token_us, noise = state.token_us(lines), state.calibration(lines)
        facts = {
            "run": run.dir.name,
            "finished": next((x["data"].get("reason") for x in lines if x["kind"] == "finished"), None),
            "waits_for_a_patch": question is not None,
            "open_attempt": question[0] if question else None,
            "being_judged": judged.number if (judged := state.open_attempt(lines)) else None,
            "last_step": f"{lines[-1]['kind']} at {lines[-1]['t_utc']}" if lines else None,
            "attempts": len(done),
            "accepted": sum(x["kind"] == "accepted" for x in lines),
            "speedup": round(state.speedup(lines), 4),
            "us_per_token": None if token_us is None else round(token_us, 1),
            "smallest_gain_that_counts": round(noise.margin, 4) if noise else None,
            "gain_seen_with_80_percent_power": round(noise.mde, 4) if noise else None,
            "process": self._process(run),
        }
        return json.dumps(facts)

    def _process(self, run: runs.Run) -> str | None:
        """Of the run that this server started; nothing is known here of others'."""
        if self.process is None or run.dir.name != self.started:
            return None
        return "going" if self.process.poll() is None else "ended"

    def wait_for_question(self, seconds: float, name: str | None = None) -> str:
        """Wait until the run wants a patch, has finished, or the time is over."""
        run = self._run(name)
        own = self.process if run.dir.name == self.started else None
        deadline = time.monotonic() + min(seconds, LONGEST_WAIT_S)
        while time.monotonic() < deadline:
            if (found := Mailbox(run.dir).question()) is not None:
                return f"attempt {found[0]} waits for a patch"
            if self._finished(run.dir):
                return f"the run has finished: {self.status(name)}"
            if own is not None and own.poll() is not None:
                return f"the run's process has ended: {self.status(name)}"
            time.sleep(0.3)
        return f"not yet: {self.status(name)}"

    def verdict(self, attempt: int, seconds: float, name: str | None = None) -> str:
        """Wait for an attempt's end: verdict, class of the reason, interval, what the trace says."""
        deadline = time.monotonic() + min(seconds, LONGEST_WAIT_S)
        while True:
            lines = self._run(name).ledger.lines()
            item = next((h for h in state.history(lines) if h["attempt"] == attempt), None)
            if item is not None:
                accepted = next((x["data"] for x in lines if x["kind"] == "accepted" and x["attempt"] == attempt), {})
                extra = {k: accepted.get(k) for k in ("ratio", "ci95", "measured_us", "traced_us", "rows") if k in accepted}
                shown = {k: v for k, v in item.items() if k not in ("ast_hash", "patch_sha") and v not in (None, "")}
                return json.dumps({**shown, **extra}, default=str)
            if time.monotonic() >= deadline:
                return f"attempt {attempt} has no verdict yet: {self.status(name)}"
            time.sleep(0.5)

    # -- the open question -----------------------------------------------------------------------------------

    def use(self, tool: str, arguments: dict[str, Any], name: str | None = None, attempt: int | None = None) -> str:
        """A tool of the toolbox on the open question; counted against the run's budget of queries.

        attempt: the one that the caller has looked at; another that is open by now is not answered by it.
        """
        if tool in ("list_skills", "read_skill") and self.run_dir is None and name is None:
            return Toolbox(ProposeContext({}, ()), self.skills, "mcp").call(tool, arguments)
        run = self._run(name)
        box = Mailbox(run.dir)
        found = box.question()
        if found is None and tool in ("list_skills", "read_skill"):
            return Toolbox(ProposeContext({}, ()), self.skills, "mcp").call(tool, arguments)
        if found is None:
            raise ToolError(f"the run does not wait for a patch now: {self.status(name)}")
        number, ctx = found
        _same(attempt, number)
        left = box.count("queries", MOST_QUERIES)
        if tool == "dry_run":
            box.count("dry_runs", MOST_DRY_RUNS)
        toolbox = Toolbox(replace(ctx, try_out=lambda sources: _try_out(run, sources)), self.skills, "mcp")
        answer = toolbox.call(tool, arguments)
        if tool == "list_findings":
            answer = json.dumps({"attempt": number, **json.loads(answer)}, indent=1)
        if toolbox.submitted is not None:
            box.reply(number, toolbox.submitted)
            answer = f"attempt {number}: {answer.partition(';')[0]}; `verdict` with this number waits for how it was judged"
        return answer if left > 20 else f"{answer}\n({left} queries left in this run)"

    def decline(self, attempt: int, why: str, name: str | None = None) -> str:
        box = Mailbox(self._run(name).dir)
        found = box.question()
        if found is None:
            raise ToolError("the run does not wait for a patch now")
        _same(attempt, found[0])
        box.reply(found[0], Declined("mcp", why=why, final=True))
        return "declined; the run ends when its proposer has nothing left"

    def note(self, tool: str, asked: dict[str, Any], name: str | None = None) -> Callable[[str], None]:
        """What enters a call and its answer into the record of the run that it means, if there is one by then."""
        began = datetime.now(UTC).isoformat(timespec="seconds")

        def write(said: str) -> None:
            try:
                place = self._run(name).dir / "exchanges"
            except (ToolError, RunError):
                return
            place.mkdir(exist_ok=True)
            line = json.dumps({"t_utc": began, "tool": tool, "asked": asked, "answer": said}, ensure_ascii=False)
            with (place / EXCHANGES).open("a", encoding="utf-8") as handle:
                handle.write(line + "\n")

        return write

    def _run(self, name: str | None = None) -> runs.Run:
        if name is not None:
            return runs.load(runs.find(self.runs_dir, name))
        if self.run_dir is None:
            raise ToolError("no run: start_run or join_run first")
        return runs.load(self.run_dir)


def start_arguments(arguments: list[str]) -> list[str]:
    """Options of `optimize` that a client may set, each with its value. Raises ToolError on anything else."""
    checked: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in START_OPTIONS:
            raise ToolError(f"{name!r} cannot be set here; a client may set {', '.join(START_OPTIONS)}, each with a value")
        if not equals:
            if not rest:
                raise ToolError(f"{name} needs a value")
            value = rest.pop(0)
        checked.append(f"{name}={value}")
    return checked


def _same(attempt: int | None, opened: int) -> None:
    if attempt is not None and attempt != opened:
        raise ToolError(f"attempt {attempt} is not open, attempt {opened} is: look at its findings and code first")


def _try_out(run: runs.Run, sources: Any) -> str | None:
    from optimizer.tryout import try_out

    return try_out(run, sources)


def _guarded(work: Callable[[], str], note: Callable[[str], None] = lambda said: None) -> str:
    """Known errors as tool errors with their message; everything else is a fault of ours and stays one."""
    try:
        answer = work()
    except (ToolError, RunError, AlreadyAnswered, PermissionError, RuntimeError) as error:
        note(f"error: {error}")
        raise McpToolError(str(error)) from error
    note(answer)
    return answer


def build_server(session: Session) -> MCPServer:
    """The MCP server with every tool bound to one session."""
    server = MCPServer("hotloop", instructions=INSTRUCTIONS)

    @server.tool(description=f"Start a run of the loop that asks this server's clients for patches. arguments: e.g. ['--tp', '4']; {', '.join(START_OPTIONS)}.")
    def start_run(arguments: list[str]) -> str:
        return _guarded(lambda: session.start(arguments), session.note("start_run", {"arguments": arguments}))

    @server.tool(description="Join a run by id, the beginning of one, or a path; the newest without.")
    def join_run(run: str | None = None) -> str:
        return _guarded(lambda: session.join(run))

    @server.tool(description="Where the run stands.")
    def status(run: str | None = None) -> str:
        return _guarded(lambda: session.status(run))

    @server.tool(description="Wait (at most 540 s) until the run wants a patch or has finished.")
    def wait_for_question(seconds: float = 240.0, run: str | None = None) -> str:
        return _guarded(lambda: session.wait_for_question(seconds, run))

    @server.tool(description="Wait for an attempt's verdict: class of the reason, measured interval, change in the trace.")
    def verdict(attempt: int, seconds: float = 240.0, run: str | None = None) -> str:
        return _guarded(lambda: session.verdict(attempt, seconds, run), session.note("verdict", {"attempt": attempt}, run))

    @server.tool(description="Say that nothing is worth trying; the run ends.")
    def decline(attempt: int, why: str, run: str | None = None) -> str:
        return _guarded(lambda: session.decline(attempt, why, run), session.note("decline", {"attempt": attempt, "why": why}, run))

    _add_looks(server, session)
    return server


def _add_looks(server: MCPServer, session: Session) -> None:
    """The toolbox's own tools, with typed arguments."""

    def use(tool: str, run: str | None, attempt: int | None = None, **arguments: Any) -> str:
        asked = arguments if attempt is None else {"attempt": attempt, **arguments}
        return _guarded(lambda: session.use(tool, arguments, run, attempt), session.note(tool, asked, run))

    @server.tool(description=DESCRIPTIONS["list_findings"])
    def list_findings(run: str | None = None) -> str:
        return use("list_findings", run)

    @server.tool(description=DESCRIPTIONS["explain"])
    def explain(finding_id: str, run: str | None = None) -> str:
        return use("explain", run, finding_id=finding_id)

    @server.tool(description=DESCRIPTIONS["read_code"])
    def read_code(file: str, first_line: int = 1, last_line: int = 0, run: str | None = None) -> str:
        return use("read_code", run, file=file, first_line=first_line, last_line=last_line)

    @server.tool(description=DESCRIPTIONS["search_code"])
    def search_code(pattern: str, run: str | None = None) -> str:
        return use("search_code", run, pattern=pattern)

    @server.tool(description=DESCRIPTIONS["list_skills"])
    def list_skills(run: str | None = None) -> str:
        return use("list_skills", run)

    @server.tool(description=DESCRIPTIONS["read_skill"])
    def read_skill(name: str, run: str | None = None) -> str:
        return use("read_skill", run, name=name)

    @server.tool(description=DESCRIPTIONS["knowledge"])
    def knowledge(run: str | None = None) -> str:
        return use("knowledge", run)

    @server.tool(description=DESCRIPTIONS["history"])
    def history(run: str | None = None) -> str:
        return use("history", run)

    @server.tool(description=DESCRIPTIONS["dry_run"])
    def dry_run(edits: list[EditIn], functions: list[FunctionIn] | None = None, run: str | None = None) -> str:
        return use("dry_run", run, edits=[e.model_dump() for e in edits], functions=[f.model_dump() for f in functions or []])

    @server.tool(description=DESCRIPTIONS["submit_patch"])
    def submit_patch(attempt: int, patches: list[PatchIn], run: str | None = None) -> str:
        return use("submit_patch", run, attempt, patches=[p.model_dump() for p in patches])


def main(runs_dir: Path, run: str | None = None, port: int | None = None, folders: tuple[Path, ...] = ()) -> None:
    """Serve until the client goes away (stdio) or for ever (HTTP on 127.0.0.1:port, path /mcp)."""
    session = Session(runs_dir, runs.find(runs_dir, run) if run else None, folders)
    server = build_server(session)
    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)
