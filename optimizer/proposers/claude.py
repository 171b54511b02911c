"""Ask a Claude model for a patch: a manual tool loop over streamed messages, with hard caps and a full record.

The context is built anew from the run's state for every attempt, so nothing depends on a conversation that a killed
run has lost. Any endpoint that speaks the Anthropic Messages API will do. Not for: what the tools do (toolbox.py),
costs (meter.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2

from optimizer.types import Series

from . import settings, skillbook
from .base import MAX_FILES, MAX_LINES, Declined, ProposeContext
from .meter import CHARS_PER_TOKEN, CapReached, Meter, Prices, Recorder
from .toolbox import DESCRIPTIONS, SCHEMAS, Toolbox, ToolError, finish

MAX_SOURCE_CHARS = 160_000
RETRIES, LONGEST_WAIT_S = 4, 60.0
NUDGES = 2  # reminders after an answer that neither calls a tool nor declines
_TRANSIENT = (408, 409, 429, 500, 502, 503, 504, 529, 200)  # 200: an error event in the middle of a stream
_NO_KEY = (
    "no credentials for the Anthropic API: set ANTHROPIC_API_KEY (or ANTHROPIC_AUTH_TOKEN, or a profile), "
    "or use --agent playbook, which needs none"
)

CONTRACT = f"""You make an LLM inference engine faster, one small patch at a time. You see where its decode step
spends time, its source, known skills, what was tried. You answer with one patch (or a short series where only the
end pays) by calling submit_patch.

Rules. One mechanism per patch. At most {MAX_FILES} files and {MAX_LINES} added plus deleted lines per patch; new .py
files only beside existing ones. Greedy tokens must stay exactly what they are; every shape, batch size and
tensor-parallel degree must keep working. No clocks, network, processes, profiler queries, environment changes, no
special cases for prompts. Cite the findings that you attack and predict the wall microseconds per token that you
save, at most their bound: your predictions are scored. Do not repeat what history shows as failed unless you say
what is different. Look before you write: read the code that you change, and try dry_run before submit_patch. If
nothing is worth trying, answer with a line that begins with DECLINE: and the reason."""


class _Stop(Exception):
    """The conversation ends without a patch."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.why, self.final = why, final


@dataclass(slots=True)
class _Talk:
    """One conversation: messages so far, and what is said with every request."""

    system: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    box: Toolbox
    log: Recorder
    nudges: int = 0
    turn: int = 0
    spent: dict[str, float] = field(default_factory=lambda: {"usd": 0.0})


class Claude:
    """See the module docstring. Options come as --agent-option KEY=VALUE, environment variables, or a config file."""

    name = "claude"

    def __init__(
        self,
        config: str | None = None,
        folders: Iterable[str] = (),
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        want = settings.read(options, config)
        self.want, self.model, self.sleep = want, want.model, sleep
        self.key = os.environ.get(want.key_env) if want.key_env else None
        self.prices = Prices.of(want.model, want.usd_in, want.usd_out, Path(want.prices) if want.prices else None)
        self.caps = {name: getattr(want, name) for name in ("max_usd", "max_tokens", "max_requests", "max_seconds")}
        self.skills = skillbook.load_all([skillbook.BUILT_IN, *map(Path, folders)])
        self.meter: Meter | None = None
        self.client: anthropic.Anthropic | None = None

    def propose(self, ctx: ProposeContext) -> Series | Declined:
        """One conversation; its cost is in the answer whatever the answer is."""
        name = f"{ctx.attempt or len(ctx.history) + 1}-claude.jsonl"
        log = Recorder(ctx.exchanges / name if ctx.exchanges else None)
        talk: _Talk | None = None
        try:
            self._ready(ctx, log)
            talk = self._begin(ctx, log)
            while talk.box.submitted is None:
                self._turn(talk)
            return finish(talk.box.submitted, talk.spent["usd"], name if log.file else None)
        except _Stop as stop:
            why, final = stop.why, stop.final
        except CapReached as cap:
            why, final = str(cap), True
        log.write("declined", {"why": why})
        return Declined(self.name, why=why, final=final, usd=talk.spent["usd"] if talk else 0.0, exchange=name if log.file else None)

    # -- before the first request ----------------------------------------------------------------------------

    def _ready(self, ctx: ProposeContext, log: Recorder) -> None:
        """Client and meter. Raises _Stop without credentials."""
        if self.client is None:
            try:
                self.client = anthropic.Anthropic(api_key=self.key, base_url=self.want.base_url, max_retries=0, timeout=self.want.timeout_s)
            except anthropic.AnthropicError as error:
                raise _Stop(f"{_NO_KEY} ({error})", final=True) from error
        client = self.client
        if not (client.api_key or client.auth_token or getattr(client, "credentials", None)):
            raise _Stop(_NO_KEY, final=True)
        log.secrets = tuple(s for s in (client.api_key, client.auth_token) if isinstance(s, str))
        if self.meter is None:
            self.meter = Meter(self.prices, **self.caps)
        if ctx.budget.usd is not None:  # the run's own cap, whatever was spent before this process
            if not self.prices.known:
                raise CapReached(f"no price is known for {self.model}: a cap in USD needs usd_in and usd_out as agent options")
            run_cap = self.meter.usd + ctx.budget.usd
            self.meter.max_usd = run_cap if self.caps["max_usd"] is None else min(run_cap, self.caps["max_usd"])

    def _begin(self, ctx: ProposeContext, log: Recorder) -> _Talk:
        box = Toolbox(ctx, self.skills, self.name)
        hour, minutes = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral", "ttl": "5m"}
        files = sum(map(len, ctx.sources.values()))
        names = "\n".join(f"{f}: {text.count(chr(10))} lines" for f, text in sorted(ctx.sources.items()))
        whole = "\n\n".join(f"=== {f}\n{text}" for f, text in sorted(ctx.sources.items()))
        code = whole if files <= MAX_SOURCE_CHARS else f"Files (read what you need):\n{names}"
        talk = _Talk(
            system=[
                {"type": "text", "text": f"{CONTRACT}\n\nSkills:\n{box.list_skills()}", "cache_control": hour},
                {"type": "text", "text": code, "cache_control": minutes},
            ],
            tools=[
                {"name": n, "description": DESCRIPTIONS[n], "input_schema": SCHEMAS[n], "strict": True} for n in SCHEMAS
            ],
            messages=[{"role": "user", "content": _task(box)}],
            box=box,
            log=log,
        )
        log.write("begin", {"model": self.model, "system": talk.system, "tools": talk.tools, "prices": asdict(self.prices)})
        return talk

    # -- one turn --------------------------------------------------------------------------------------------

    def _turn(self, talk: _Talk) -> None:
        """One request with its answer worked off. Raises _Stop, CapReached."""
        if talk.box.ctx.stopped is not None and talk.box.ctx.stopped():
            raise _Stop("the run was asked to stop")
        message = self._ask(talk)
        reason, content = message.stop_reason, [b.to_dict() for b in message.content]
        if reason == "tool_use":
            talk.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": self._answers(talk, content)}]
        elif reason == "pause_turn":
            talk.messages.append({"role": "assistant", "content": content})
        elif reason == "refusal":
            raise _Stop("the model refused")
        elif reason == "model_context_window_exceeded":
            raise _Stop("the conversation no longer fits into the model's context")
        else:  # end_turn, stop_sequence, max_tokens, or a stream that was cut
            self._nudge(talk, reason, "".join(str(b.get("text", "")) for b in content))

    def _answers(self, talk: _Talk, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Tool results in order; after a submission the rest is not run."""
        results = []
        for block in (b for b in content if b.get("type") == "tool_use"):
            result: dict[str, Any] = {"type": "tool_result", "tool_use_id": block["id"]}
            if talk.box.submitted is not None:
                result |= {"content": "not run: a patch was submitted", "is_error": True}
            else:
                try:
                    arguments = block["input"]
                    if not isinstance(arguments, dict):
                        raise ToolError("arguments must be an object")
                    result["content"] = talk.box.call(block["name"], arguments)
                except ToolError as error:
                    result |= {"content": str(error), "is_error": True}
            results.append(result)
        talk.log.write("tools", {"results": results})
        return results

    def _nudge(self, talk: _Talk, reason: str | None, text: str) -> None:
        for line in text.splitlines():
            if line.strip().startswith("DECLINE:"):
                raise _Stop(f"declined: {line.strip()[8:].strip()[:300]}")
        talk.nudges += 1
        if talk.nudges > NUDGES:
            raise _Stop({"max_tokens": "the answer was cut at its token limit", None: "streams were cut"}.get(reason, "no patch was submitted"))
        if reason == "end_turn" and text.strip():
            talk.messages.append({"role": "assistant", "content": text})
            talk.messages.append({"role": "user", "content": "Call submit_patch, or answer with a line DECLINE: and the reason."})
        elif reason == "max_tokens":  # a half-written tool call must not be sent back
            _add_text(talk.messages, "Your last answer was cut at its token limit. Be shorter; use a smaller patch.")

    def _ask(self, talk: _Talk) -> anthropic.types.Message:
        """One answered request, with retries. Every try is counted against the caps, every answer booked."""
        assert self.client is not None and self.meter is not None
        said: dict[str, Any] = {"system": talk.system, "tools": talk.tools, "messages": talk.messages}
        size, (hour, short) = len(json.dumps(said, default=str)), (len(block["text"]) for block in talk.system)
        hour += len(json.dumps(talk.tools))  # tools come before the system text and are cached with it
        more: dict[str, Any] = {"output_config": {"effort": self.want.effort}} if self.want.effort else {}
        most = self.want.max_output
        for attempt in range(RETRIES + 1):
            self.meter.before(size, most, hour, short)
            talk.turn += 1
            talk.log.write("request", {"turn": talk.turn, "try": attempt, "new": talk.messages[-1:], "max_tokens": most})
            partial: anthropic.types.Message | None = None
            try:
                with self.client.messages.stream(model=self.model, max_tokens=most, timeout=self._patience(), **said, **more) as stream:
                    for _ in stream:
                        partial = stream.current_message_snapshot
                        if self.meter.seconds_left() == 0.0:
                            break
                    partial = stream.current_message_snapshot
            except (TypeError, anthropic.AnthropicError, httpx2.HTTPError) as error:
                self._book(talk, partial, str(error))
                self._after_error(error, attempt)
                continue
            self._book(talk, partial, None)
            if partial is not None and partial.stop_reason is not None:
                return partial
            self._wait(attempt, None)  # cut before its end: the SDK says nothing, the stop reason is missing
        raise _Stop(f"no whole answer in {RETRIES + 1} tries")

    def _patience(self) -> float:
        """Seconds that a silent server is waited for: never beyond the time cap."""
        assert self.meter is not None
        left = self.meter.seconds_left()
        return self.want.timeout_s if left is None else max(0.1, min(self.want.timeout_s, left))

    def _warn(self, talk: _Talk) -> None:
        """Say, and record, which caps are half or four fifths used."""
        assert self.meter is not None
        for text in self.meter.warnings():
            talk.log.write("warning", {"text": text})
            if talk.box.ctx.note is not None:
                talk.box.ctx.note(f"claude: {text}")

    def _book(self, talk: _Talk, message: anthropic.types.Message | None, error: str | None) -> None:
        assert self.meter is not None
        usage: dict[str, Any] = message.usage.to_dict() if message is not None else {}
        if message is not None and message.stop_reason is None:  # cut: what was sent is paid, reported or not
            said = sum(len(json.dumps(b.to_dict(), default=str)) for b in message.content)
            usage["output_tokens"] = max(int(usage.get("output_tokens") or 0), int(said / CHARS_PER_TOKEN))
        usd = self.meter.book(usage)
        talk.spent["usd"] += usd
        answer = None if message is None else message.to_dict()
        talk.log.write("answer", {"turn": talk.turn, "message": answer, "usage": usage, "usd": usd, "error": error})
        self._warn(talk)

    def _after_error(self, error: Exception, attempt: int) -> None:
        """Wait and let the caller try again, or raise _Stop."""
        if isinstance(error, TypeError) or type(error).__name__ == "CredentialsError":
            raise _Stop(f"{_NO_KEY} ({error})", final=True) from error
        if isinstance(error, anthropic.APIStatusError):
            if error.status_code not in _TRANSIENT:
                raise _Stop(f"the API answered {error.status_code}: {error.message[:300]}", final=True) from error
            self._wait(attempt, error.response.headers.get("retry-after"))
        elif isinstance(error, anthropic.APIConnectionError | httpx2.HTTPError):  # in mid-stream the SDK lets the latter through
            self._wait(attempt, None)
        else:
            raise _Stop(f"the API client failed: {type(error).__name__}: {error}", final=True) from error
        if attempt == RETRIES:
            raise _Stop(f"the API did not answer in {RETRIES + 1} tries: {error}") from error

    def _wait(self, attempt: int, asked: str | None) -> None:
        """Exponential back-off, longer where the server says so, never beyond the time cap."""
        assert self.meter is not None
        seconds = min(2.0**attempt, LONGEST_WAIT_S)
        try:
            seconds = max(seconds, float(asked)) if asked else seconds
        except ValueError:
            pass  # a date: our own back-off will do
        left = self.meter.seconds_left()
        if seconds > LONGEST_WAIT_S or (left is not None and seconds > left):
            raise _Stop(f"the API asks to wait {seconds:.0f} s, longer than this run will")
        self.sleep(seconds)


def _task(box: Toolbox) -> str:
    return (
        f"Findings on the incumbent:\n{box.list_findings()}\n\nEarlier attempts:\n{box.history()}\n\n"
        f"Accepted knowledge:\n{box.knowledge()}\n\nPropose the patch that is most likely to be accepted with the largest gain."
    )


def _add_text(messages: list[dict[str, Any]], text: str) -> None:
    """Append text to the last user message (roles must alternate)."""
    content = messages[-1]["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    messages[-1] = {"role": "user", "content": [*blocks, {"type": "text", "text": text}]}
