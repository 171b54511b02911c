"""The one client of a served engine: gates, benchmark and captures all speak through it.

HTTP/1.1 and server-sent events over a Unix socket or TCP, with raw sockets and one selector: a token costs a
`recv`, a clock reading and an append; everything is parsed after the last stream has ended. Requests of gates and
of the benchmark look alike (same headers, same fields), so that a server cannot tell them apart. Nothing a server
sends is believed beyond its bytes and the moment at which they came: malformed answers become `Stream.error`.

Not for: judging tokens (`gates/`), statistics (`measure.py`), wire details (`wire.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from optimizer.traffic import wire
from optimizer.types import Stream

MODEL_FALLBACK = "model"
_RECV = 1 << 16
_LOOK_NS = 1_000_000_000
_MOST_NAME = 4096
_AGAIN_S = 0.002  # a server whose queue of connections is full is asked again
_REFUSED_S = 2.0


class ClientError(RuntimeError):
    """The server could not be reached, broke the protocol, or answered a control request with an error."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion: token ids in, token ids out. Fields that are None are not sent."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True
    min_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    logprobs: int | None = None
    delay_s: float = 0.0  # send this long after the batch has started: open-loop arrivals
    abort_after: int | None = None  # hang up once this many events have come
    extra: dict[str, Any] = field(default_factory=dict)  # sent as it is: for tests of bad input

    def body(self, model: str) -> bytes:
        sent: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt_ids),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        for name in ("min_tokens", "top_p", "top_k", "seed", "logprobs"):
            if (value := getattr(self, name)) is not None:
                sent[name] = value
        if self.stop is not None:
            sent["stop"] = list(self.stop)
        return json.dumps(sent | self.extra, separators=(",", ":")).encode()


@dataclass(slots=True)
class _Flight:
    """One request on the wire."""

    request: Request
    payload: bytes
    due_ns: int
    limit: int
    sock: socket.socket | None = None
    sent_ns: int = 0
    unsent: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    size: int = 0
    events: int = 0
    tail: bytes = b""
    error: str | None = None


class Client:
    """Speaks to one server. Thread-compatible, not thread-safe: one batch at a time."""

    def __init__(self, socket_path: Path | None = None, base_url: str | None = None) -> None:
        if (socket_path is None) == (base_url is None):
            raise ValueError("give either socket_path or base_url")
        self.socket_path = socket_path
        self.base_url = base_url
        self._model: str | None = None

    # -- control ---------------------------------------------------------------------------------------

    def health(self, timeout_s: float = 1.0) -> bool:
        """True when /health answers 200 within the timeout; never raises."""
        try:
            return self._control("GET", "/health", None, timeout_s).status == 200
        except (OSError, ClientError):
            return False

    def models(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """`/v1/models` as the server gives it (unverified). ClientError when it is not such an answer."""
        answer = self._json("GET", "/v1/models", None, timeout_s)
        data = answer.get("data")
        if not isinstance(data, list) or not data or not isinstance(data[0], dict):
            raise ClientError("/v1/models holds no model")
        return answer

    def metadata(self) -> dict[str, Any]:
        """The first model's `metadata` plus its `id`, as the server states them."""
        first = self.models()["data"][0]
        self._model = str(first.get("id", MODEL_FALLBACK))[:_MOST_NAME]  # it goes into every request
        stated = first.get("metadata")
        return {"id": self._model} | (stated if isinstance(stated, dict) else {})

    def start_profile(self, timeout_s: float = 60.0, **options: Any) -> None:
        self._checked("POST", "/start_profile", options, timeout_s)

    def stop_profile(self, timeout_s: float = 120.0) -> None:
        """Returns when every rank has written its trace."""
        self._checked("POST", "/stop_profile", {}, timeout_s)

    def metrics(self, timeout_s: float = 5.0) -> str:
        return self._checked("GET", "/metrics", None, timeout_s).body.decode("utf-8", "replace")

    def post(self, path: str, body: bytes, timeout_s: float = 10.0) -> wire.Answer:
        """A raw POST, for checks of how a server treats bad input."""
        return self._control("POST", path, body, timeout_s)

    def whole(self, request: Request, message: str | None = None, timeout_s: float = 60.0) -> tuple[Stream, tuple[int, ...]]:
        """One request whose answer comes in one piece, with the prompt's ids as the server states them; `message`: as a
        chat of one user's message instead of the prompt. What goes wrong is the stream's `error`."""
        sent = json.loads(request.body(self._model or MODEL_FALLBACK)) | {"stream": False}
        del sent["stream_options"]
        if message is not None:
            del sent["prompt"]
            sent["messages"] = [{"role": "user", "content": message}]
        path = "/v1/completions" if message is None else "/v1/chat/completions"
        began = time.perf_counter_ns()
        try:
            answer = self._control("POST", path, json.dumps(sent).encode(), timeout_s)
        except (OSError, ClientError) as error:
            return Stream(request.prompt_ids, (), "", None, began, (), None, f"{path}: {error or type(error).__name__}"), ()
        got, prompt = wire.whole(answer, time.perf_counter_ns())
        asked = request.prompt_ids if message is None else prompt
        return Stream(
            asked, got.token_ids, got.text, got.finish_reason, began, got.arrivals_ns, got.usage, got.error, got.status
        ), prompt

    def _json(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        answer = self._checked(method, path, body, timeout_s)
        try:
            parsed = wire.loads(answer.body)
        except ValueError as error:
            raise ClientError(f"{path}: not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ClientError(f"{path}: not a JSON object")
        return parsed

    def _checked(self, method: str, path: str, body: Any, timeout_s: float) -> wire.Answer:
        encoded = None if body is None else json.dumps(body).encode()
        try:
            answer = self._control(method, path, encoded, timeout_s)
        except OSError as error:
            raise ClientError(f"{path}: {error or type(error).__name__}") from None
        if answer.status != 200:
            words = wire.plain(answer.body[:300].decode("utf-8", "replace"))
            raise ClientError(f"{path}: HTTP {answer.status}: {words}")
        return answer

    def _control(self, method: str, path: str, body: bytes | None, timeout_s: float) -> wire.Answer:
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(self._connect(timeout_s)) as sock:
            sock.sendall(wire.request(method, path, body))
            received = b""
            while True:
                answer = wire.parse(received)
                if answer is not None:
                    return answer
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                sock.settimeout(left)
                piece = sock.recv(_RECV)
                if not piece:
                    answer = wire.parse(received, closed=True)
                    if answer is None:
                        raise ClientError(f"{path}: the connection ended early")
                    return answer
                received += piece
                if len(received) > wire.MAX_CONTROL_BYTES:
                    raise ClientError(f"{path}: answer over {wire.MAX_CONTROL_BYTES} bytes")

    def _connected(self, timeout_s: float) -> socket.socket:
        """A connection, asked for again while the server refuses: it may be busy with those that came before."""
        until = time.monotonic() + min(timeout_s, _REFUSED_S)
        while True:
            try:
                return self._connect(timeout_s)
            except ConnectionRefusedError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_AGAIN_S)

    def _connect(self, timeout_s: float) -> socket.socket:
        if self.base_url is not None:
            url = urlsplit(self.base_url)
            sock = socket.create_connection((url.hostname or "127.0.0.1", url.port or 80), timeout=timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        # The candidate owns this path: open what is really there, and only if it is a socket, so that a
        # symbolic link cannot send us to one of the host's. It also lifts the 108-byte limit on the path.
        assert self.socket_path is not None
        fd = os.open(self.socket_path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise ConnectionRefusedError(f"{self.socket_path.name} is not a socket")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            until = time.monotonic() + timeout_s
            while True:
                try:
                    sock.connect(f"/proc/self/fd/{fd}")
                    return sock
                except BlockingIOError:  # a full backlog of a Unix socket does not wait, whatever the timeout
                    if time.monotonic() >= until:
                        sock.close()
                        raise TimeoutError(f"no room in the server's backlog for {timeout_s:g} s") from None
                    time.sleep(_AGAIN_S)
                except BaseException:
                    sock.close()
                    raise
        finally:
            os.close(fd)

    # -- completions -----------------------------------------------------------------------------------

    def complete(self, requests: list[Request], deadline_s: float) -> list[Stream]:
        """Send all at once (or at their `delay_s`), wait for every end; streams in the order of the requests.

        Connections stand before the clock starts. A stream that is not done `deadline_s` after the start
        carries an error. Raises ClientError only when the server cannot be reached at all.
        """
        if self._model is None:
            with contextlib.suppress(ClientError):
                self.metadata()
        model = self._model or MODEL_FALLBACK
        flights: list[_Flight] = []
        try:
            for request in requests:
                payload = wire.request("POST", "/v1/completions", request.body(model))
                flight = _Flight(request, payload, 0, wire.stream_limit(request.max_tokens))
                flights.append(flight)
                try:
                    flight.sock = self._connected(min(deadline_s, 10.0))
                except OSError as error:
                    raise ClientError(f"cannot connect: {error}") from None
                flight.sock.setblocking(False)
            _fly(flights, deadline_s)
        finally:
            for flight in flights:
                if flight.sock is not None:
                    flight.sock.close()
        return [_stream(flight) for flight in flights]


def _fly(flights: list[_Flight], deadline_s: float) -> None:
    start = time.perf_counter_ns()
    deadline = start + int(deadline_s * 1e9)
    waiting = sorted(flights, key=lambda flight: flight.request.delay_s)
    for flight in waiting:
        flight.due_ns = start + int(flight.request.delay_s * 1e9)
    waiting.reverse()
    open_count = len(flights)
    with selectors.DefaultSelector() as selector:
        while open_count:
            now = time.perf_counter_ns()
            while waiting and waiting[-1].due_ns <= now:
                flight = waiting.pop()
                _send(flight, selector)
                open_count -= flight.error is not None
            now = time.perf_counter_ns()
            if now >= deadline:
                break
            until = min(deadline, waiting[-1].due_ns, now + _LOOK_NS) if waiting else min(deadline, now + _LOOK_NS)
            ready = selector.select(max(0.0, (until - now) / 1e9))
            overslept = time.perf_counter_ns() - until - _LOOK_NS
            if overslept > 0:  # this machine or process was suspended, and so may the server have been
                deadline += overslept
            for key, events in ready:
                flight = key.data
                if events & selectors.EVENT_WRITE:
                    _send_rest(flight, selector)
                if events & selectors.EVENT_READ and _receive(flight):
                    selector.unregister(key.fileobj)
                    open_count -= 1
    for flight in flights:
        if flight.error is None and flight.tail != b"done":
            flight.error = f"not finished within {deadline_s:g} s"


def _send(flight: _Flight, selector: selectors.BaseSelector) -> None:
    assert flight.sock is not None
    flight.unsent = flight.payload
    flight.sent_ns = time.perf_counter_ns()
    try:
        sent = flight.sock.send(flight.unsent)
    except BlockingIOError:
        sent = 0
    except OSError as error:
        flight.error = f"send: {error}"
        return
    flight.unsent = flight.unsent[sent:]
    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if flight.unsent else 0)
    selector.register(flight.sock, wanted, flight)


def _send_rest(flight: _Flight, selector: selectors.BaseSelector) -> None:
    assert flight.sock is not None
    with contextlib.suppress(OSError):  # a broken connection shows at the next read
        flight.unsent = flight.unsent[flight.sock.send(flight.unsent) :]
    if not flight.unsent:
        selector.modify(flight.sock, selectors.EVENT_READ, flight)


def _receive(flight: _Flight) -> bool:
    """Take what has come. True when this stream has ended, well or badly."""
    assert flight.sock is not None
    try:
        piece = flight.sock.recv(_RECV)
    except BlockingIOError:
        return False
    except OSError as error:
        flight.error = f"receive: {error}"
        return True
    flight.stamps.append(time.perf_counter_ns())
    flight.pieces.append(piece)
    flight.size += len(piece)
    if not piece:
        flight.tail = b"done"
        return True
    if flight.size > flight.limit:
        flight.error = f"answer over {flight.limit} bytes"
        return True
    if flight.request.abort_after is not None:
        flight.events += piece.count(b"data: ")
        if flight.events >= flight.request.abort_after:
            flight.error = "aborted by the client"
            return True
    flight.tail = (flight.tail + piece)[-5:]
    # A cheap look at the end first; a full parse only where the end may have come.
    content_length = len(flight.pieces) == 1 and b"ransfer-" not in piece[:2048]
    if (flight.tail == wire.LAST_CHUNK or content_length or flight.error) and wire.parse(
        b"".join(flight.pieces)
    ) is not None:
        flight.tail = b"done"
        return True
    return False


def _stream(flight: _Flight) -> Stream:
    """What came, parsed. Streams that failed keep what tokens they had."""
    parsed = wire.completion(flight.pieces, flight.stamps)
    return Stream(
        prompt_ids=flight.request.prompt_ids,
        token_ids=parsed.token_ids,
        text=parsed.text,
        finish_reason=parsed.finish_reason,
        sent_ns=flight.sent_ns,
        arrivals_ns=parsed.arrivals_ns,
        usage=parsed.usage,
        error=flight.error or parsed.error,
        status=parsed.status,
        logprobs=parsed.logprobs,
    )
