"""HTTP/1.1 answers and completion event streams, parsed strictly from recorded bytes.

Not for: sockets and clocks (`client.py`). Sources: RFC 9112 (chunked coding, content length); the OpenAI
completions stream with vLLM's `return_token_ids`.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass
from typing import Any

MAX_CONTROL_BYTES = 16 << 20
LAST_CHUNK = b"0\r\n\r\n"
_MAX_HEAD = 64 << 10
_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")  # int() would also take signs, blanks and underscores
_MOST_ID = 1 << 31
_MOST_TEXT = 2000


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer. `ends` maps body offsets back to wire offsets: (body end, wire end) per chunk."""

    status: int
    headers: dict[str, str]
    body: bytes
    ends: tuple[tuple[int, int], ...] = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Completion:
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    arrivals_ns: tuple[int, ...] = ()
    usage: dict[str, int] | None = None
    error: str | None = None
    status: int | None = None
    logprobs: tuple[Any, ...] | None = None


class _Bad(Exception):
    """The answer breaks the protocol; the message says how."""


def plain(text: str, most: int = _MOST_TEXT) -> str:
    """Words of a candidate as they may stand in a ledger or on a terminal: printable, and not too many."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text[: most + 1])
    return shown if len(shown) <= most else shown[:most] + " ..."


def loads(text: bytes) -> Any:
    """JSON of a stranger. ValueError, also for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def request(method: str, path: str, body: bytes | None) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


def stream_limit(max_tokens: int) -> int:
    """Bytes that an honest completion stream stays below: logprobs and long texts included."""
    return (1 << 20) + 16384 * max(0, max_tokens)


def parse(data: bytes, closed: bool = False) -> Answer | None:
    """The answer once all of it has come, else None. ValueError-free: a broken answer has status 0."""
    try:
        answer = _parse(data, closed)
    except _Bad as error:
        return Answer(0, {}, str(error).encode())
    return answer if answer is not None and answer.complete else None


def _parse(data: bytes, closed: bool) -> Answer | None:
    split = data.find(b"\r\n\r\n")
    if split < 0:
        if len(data) > _MAX_HEAD:
            raise _Bad("HTTP head too long")
        return None
    status, headers = _head(data[:split])
    start = split + 4
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunked(data, start, status, headers)
    if "content-length" in headers:
        text = headers["content-length"]
        if not _SIZE.fullmatch(text.encode("latin-1")) or not text.isdecimal():
            raise _Bad("bad Content-Length")
        end = start + int(text)
        body = data[start:end]
        return Answer(status, headers, body, ((len(body), start + len(body)),), len(data) >= end)
    if status in (204, 304):
        return Answer(status, headers, b"")
    body = data[start:]
    return Answer(status, headers, body, ((len(body), len(data)),), closed)


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not re.fullmatch(r"[1-5][0-9][0-9]", parts[1]):
        raise _Bad(f"not an HTTP/1.1 status line: {lines[0][:60]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise _Bad(f"bad header line {line[:60]!r}")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


def _chunked(data: bytes, start: int, status: int, headers: dict[str, str]) -> Answer:
    pieces: list[bytes] = []
    ends: list[tuple[int, int]] = []
    length = 0
    while True:
        line_end = data.find(b"\r\n", start, start + 64)
        if line_end < 0:
            if len(data) - start >= 64:
                raise _Bad("chunk size line too long")
            break
        text = data[start:line_end].split(b";")[0]
        if not _SIZE.fullmatch(text):
            raise _Bad(f"bad chunk size {text[:20]!r}")
        size = int(text, 16)
        begin = line_end + 2
        if size == 0:
            if data[begin : begin + 2] != b"\r\n":
                if len(data) >= begin + 2:
                    raise _Bad("trailers are not accepted")
                break
            if len(data) > begin + 2:
                raise _Bad("bytes after the last chunk")
            return Answer(status, headers, b"".join(pieces), tuple(ends))
        if len(data) < begin + size + 2:
            break
        if data[begin + size : begin + size + 2] != b"\r\n":
            raise _Bad("chunk does not end where its size says")
        pieces.append(data[begin : begin + size])
        length += size
        start = begin + size + 2
        ends.append((length, begin + size))
    return Answer(status, headers, b"".join(pieces), tuple(ends), complete=False)


def completion(pieces: list[bytes], stamps: list[int]) -> Completion:
    """The recorded pieces (`stamps[i]`: when piece i came) as tokens with arrival times.

    A token's arrival is that of the piece which completed its event. An error is text, never an exception;
    tokens that came before it are kept.
    """
    data = b"".join(pieces)
    if not data:
        return Completion(error="no answer")
    try:
        answer = _parse(data, closed=True)
    except _Bad as error:
        return Completion(error=f"protocol: {error}")
    if answer is None:
        return Completion(error="the answer ended inside the HTTP head")
    if answer.status != 200:
        text = plain(answer.body[:500].decode("utf-8", "replace"))
        return Completion(error=f"HTTP {answer.status}: {text}", status=answer.status)
    clock = _clock(pieces, stamps, answer)
    parsed = _Events()
    try:
        parsed.read(answer.body, clock)
        if not answer.complete:
            raise _Bad("the stream ended early")
        parsed.finish()
    except _Bad as error:
        return parsed.completion(str(error))
    return parsed.completion(None)


def whole(answer: Answer, stamp: int) -> tuple[Completion, tuple[int, ...]]:
    """An answer that was not streamed, completion or chat: (what it holds, the prompt's ids as the server has them).

    Tokens all arrive at `stamp`. What is wrong with it stands in `error`.
    """
    if answer.status != 200:
        text = plain(answer.body[:500].decode("utf-8", "replace"))
        return Completion(error=f"HTTP {answer.status}: {text}", status=answer.status), ()
    parsed = _Events()
    prompt: tuple[int, ...] = ()
    try:
        data = loads(answer.body)
        choice = data["choices"][0]
        said = choice.get("message")
        parsed.event(json.dumps({"choices": [choice | {"text": said["content"]} if said else choice], "usage": data.get("usage")}).encode(), stamp)
        ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()
        prompt = tuple(i for i in ids if type(i) is int and 0 <= i < _MOST_ID)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return Completion(error=f"protocol: {type(error).__name__}: {plain(str(error), 200)}", status=200), ()
    except _Bad as error:
        return parsed.completion(f"protocol: {error}"), ()
    return parsed.completion(None if parsed.finish_reason else "no finish reason"), prompt


def _clock(pieces: list[bytes], stamps: list[int], answer: Answer):
    """Body offset (exclusive end) -> the stamp of the piece that brought its last byte."""
    totals: list[int] = []
    total = 0
    for piece in pieces:
        total += len(piece)
        totals.append(total)
    body_ends = [body for body, _ in answer.ends]

    def when(body_end: int) -> int:
        chunk = bisect.bisect_left(body_ends, body_end)
        body, wire = answer.ends[min(chunk, len(answer.ends) - 1)]
        return stamps[min(bisect.bisect_left(totals, wire - (body - body_end)), len(stamps) - 1)]

    return when


class _Events:
    """Collects `data:` events of one completion."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.arrivals: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, int] | None = None
        self.done = False

    def read(self, body: bytes, when: Any) -> None:
        start = 0
        while (end := body.find(b"\n\n", start)) >= 0:
            event = body[start:end]
            start = end + 2
            if not event or event.startswith(b":"):
                continue
            if not event.startswith(b"data: ") or b"\n" in event:
                raise _Bad(f"not a data event: {event[:60]!r}")
            if self.done:
                raise _Bad("events after [DONE]")
            if event == b"data: [DONE]":
                self.done = True
                continue
            self.event(event[6:], when(start))
        if body[start:].strip():
            raise _Bad("the stream ended inside an event")

    def event(self, payload: bytes, stamp: int) -> None:
        try:
            data = loads(payload)
        except ValueError:
            raise _Bad(f"not JSON: {payload[:60]!r}") from None
        if not isinstance(data, dict):
            raise _Bad("event is not an object")
        if "error" in data:
            raise _Bad(f"server error: {json.dumps(data['error'])[:300]}")
        usage = data.get("usage")
        if isinstance(usage, dict):
            self.usage = {k: v for k, v in usage.items() if type(v) is int}
        choices = data.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            raise _Bad("event without exactly one choice")
        if choices:
            self.choice(choices[0], stamp)

    def choice(self, choice: Any, stamp: int) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            raise _Bad("bad choice")
        if self.finish_reason is not None:
            raise _Bad("tokens after the finish reason")
        text, ids = choice.get("text", ""), choice.get("token_ids")
        if not isinstance(text, str):
            raise _Bad("text is not a string")
        if ids is None and (text or choice.get("finish_reason") is None):
            raise _Bad("the server does not return token_ids: it must support return_token_ids in streams")
        ids = ids or []
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < _MOST_ID for i in ids):
            raise _Bad("token_ids is not a list of token ids")
        self.tokens += ids
        self.arrivals += [stamp] * len(ids)
        self.texts.append(text)
        if choice.get("logprobs") is not None:
            self.logprobs.append(choice["logprobs"])
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise _Bad("finish_reason is not a string")
        self.finish_reason = reason

    def finish(self) -> None:
        if not self.done:
            raise _Bad("the stream ended without [DONE]")
        if self.finish_reason is None:
            raise _Bad("no finish reason")

    def completion(self, error: str | None) -> Completion:
        return Completion(
            tuple(self.tokens),
            "".join(self.texts),
            self.finish_reason,
            tuple(self.arrivals),
            self.usage,
            error,
            200,
            tuple(self.logprobs) or None,
        )
