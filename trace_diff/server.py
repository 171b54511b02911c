"""A small HTTP client for one inference server over TCP or a Unix socket, for `capture` only.

Standard library, blocking, one connection a request. Not for: timing that decides anything (the loop has its
own client and clock).
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class ServerError(RuntimeError):
    """The server cannot be reached or refused; the message names the URL and the answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One finished completion as the client saw it."""

    tokens: int  # counted by the server's usage chunk, else by chunks
    prompt_tokens: int | None
    arrivals_ns: tuple[int, ...]  # one per chunk that carried text or ids
    sent_ns: int


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Server:
    """`http://host:port`, `unix:///path/to.sock` or a path to a socket."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        if parts.scheme == "unix" or (not parts.scheme and "/" in url):
            self._socket, self._host, self._prefix = parts.path or url, "", ""
        elif parts.scheme == "http" and parts.hostname:
            self._socket, self._host = "", f"{parts.hostname}:{parts.port or 80}"
            self._prefix = parts.path.rstrip("/")
        else:
            raise ServerError(f"{url}: not a server address; use http://HOST:PORT or unix:///PATH")

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._socket:
            return _UnixConnection(self._socket, timeout)
        return http.client.HTTPConnection(self._host, timeout=timeout)

    def request(self, method: str, path: str, body: object = None, timeout: float = 60.0) -> bytes:
        """The body of a 2xx answer. Raises ServerError with the status and the start of the answer otherwise."""
        connection = self._connect(timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, self._prefix + path, data, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}{path}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if answer.status // 100 != 2:
            raise ServerError(f"{self.url}{path}: {answer.status}: {text[:200].decode('utf-8', 'replace')}")
        return text

    def model(self) -> dict[str, Any]:
        """The first entry of /v1/models."""
        try:
            return dict(json.loads(self.request("GET", "/v1/models"))["data"][0])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ServerError(f"{self.url}/v1/models: no model listed") from None

    def complete(self, model: str, prompt: list[int], new_tokens: int, timeout: float) -> Reply:
        """Greedy completion of exactly `new_tokens`, streamed. Raises ServerError; the timeout is for the whole."""
        body = {
            "model": model, "prompt": prompt, "max_tokens": new_tokens, "min_tokens": new_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = self._connect(timeout)
        sent = time.perf_counter_ns()
        deadline = time.monotonic() + timeout
        try:
            connection.request(
                "POST", self._prefix + "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(300).decode("utf-8", "replace")
                raise ServerError(f"{self.url}/v1/completions: {answer.status}: {text}")
            return self._stream(answer, sent, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}/v1/completions: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _stream(self, answer: http.client.HTTPResponse, sent: int, deadline: float) -> Reply:
        arrivals: list[int] = []
        usage: dict[str, Any] = {}
        while line := answer.readline():
            if time.monotonic() > deadline:
                raise ServerError(f"{self.url}/v1/completions: not finished at the deadline")
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                break
            try:
                chunk = json.loads(payload)
            except ValueError:
                raise ServerError(f"{self.url}/v1/completions: a chunk is not JSON: {payload[:80]!r}") from None
            if chunk.get("error"):
                raise ServerError(f"{self.url}/v1/completions: {str(chunk['error'])[:200]}")
            if chunk.get("choices"):
                arrivals.append(time.perf_counter_ns())
            usage = chunk.get("usage") or usage
        if not arrivals:
            raise ServerError(f"{self.url}/v1/completions: the stream held no token")
        return Reply(
            int(usage.get("completion_tokens") or len(arrivals)), usage.get("prompt_tokens"), tuple(arrivals), sent
        )
