"""A local server that speaks the Anthropic Messages API: scripted answers over SSE, errors, cuts and delays.

Each script entry answers one request: a dict is a message, `Status` an HTTP error, `Cut` a stream that ends early,
`MidError` an error event in the middle of a stream. Not for: anything but tests.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Status:
    code: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    message: dict[str, Any]
    events: int  # events sent before the connection is closed


@dataclass(frozen=True)
class MidError:
    kind: str = "overloaded_error"


@dataclass(frozen=True)
class Slow:
    message: dict[str, Any]
    seconds: float


def text(said: str, reason: str = "end_turn") -> dict[str, Any]:
    return _message([{"type": "text", "text": said}], reason)


def tools(*calls: tuple[str, dict[str, Any]], reason: str = "tool_use") -> dict[str, Any]:
    blocks = [{"type": "tool_use", "id": f"toolu_{n}_{name}", "name": name, "input": given} for n, (name, given) in enumerate(calls)]
    return _message(blocks, reason)


def _message(content: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    return {"content": content, "stop_reason": reason, "usage": {"input_tokens": 1000, "output_tokens": 100}}


def events(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A message as the stream that makes it."""
    start = {"id": "msg_1", "type": "message", "role": "assistant", "model": "test", "content": [], "stop_reason": None,
             "stop_sequence": None, "usage": {"input_tokens": message["usage"]["input_tokens"], "output_tokens": 1}}  # fmt: skip
    found: list[tuple[str, dict[str, Any]]] = [("message_start", {"message": start})]
    for n, block in enumerate(message["content"]):
        if block["type"] == "text":
            found.append(("content_block_start", {"index": n, "content_block": {"type": "text", "text": ""}}))
            found.append(("content_block_delta", {"index": n, "delta": {"type": "text_delta", "text": block["text"]}}))
        else:
            empty = {**block, "input": {}}
            found.append(("content_block_start", {"index": n, "content_block": empty}))
            raw = json.dumps(block["input"])
            for part in (raw[: len(raw) // 2], raw[len(raw) // 2 :]):
                found.append(("content_block_delta", {"index": n, "delta": {"type": "input_json_delta", "partial_json": part}}))
        found.append(("content_block_stop", {"index": n}))
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    found.append(("message_delta", {"delta": delta, "usage": {"output_tokens": message["usage"]["output_tokens"]}}))
    found.append(("message_stop", {}))
    return found


@dataclass
class Api:
    """The running server: `url`, and every request it got as (headers, body)."""

    script: list[Any]
    url: str = ""
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)


@contextmanager
def serve(*script: Any) -> Iterator[Api]:
    """Answer one request per entry; further ones get 500."""
    api = Api(list(script))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            api.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
            answer = api.script.pop(0) if api.script else Status(500)
            if isinstance(answer, Status):
                self._error(answer)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            if isinstance(answer, MidError):
                self._send(events(text("so far"))[:3])
                self._send([("error", {"error": {"type": answer.kind, "message": "overloaded"}})])
            elif isinstance(answer, Cut):
                self._send(events(answer.message)[: answer.events])
            elif isinstance(answer, Slow):
                self._send(events(answer.message)[:3])
                time.sleep(answer.seconds)
                self._send(events(answer.message)[3:])
            else:
                self._send(events(answer))

        def _error(self, answer: Status) -> None:
            raw = json.dumps({"type": "error", "error": {"type": "api_error", "message": f"status {answer.code}"}}).encode()
            self.send_response(answer.code)
            for name, value in {"content-type": "application/json", "content-length": str(len(raw)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

        def _send(self, stream: list[tuple[str, dict[str, Any]]]) -> None:
            for name, data in stream:
                self.wfile.write(f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode())
                self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that gave up is what some scripts are for; its traceback would land in another test's stderr."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    api.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
