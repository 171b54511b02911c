"""A server that computes nothing: tokens at a fixed pace, to measure what the client itself costs.

`python -m optimizer.traffic.null_server SOCKET PACE_MS [FIRST_MS]`. Speaks the protocol of a target, one thread and one
event loop, events in one write each. Not for: tests of the loop (tests/fakes/engine).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
_EVENT = {"id": "0", "object": "text_completion", "created": 0, "model": "null"}
_METADATA = {"engine": "null", "dtype": "none", "device": "cpu", "tp": 1}


class NullServer:
    """pace_s: between two tokens of a stream; first_s: before the first."""

    def __init__(self, pace_s: float, first_s: float = 0.0) -> None:
        self.pace_s = pace_s
        self.first_s = first_s

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST /v1/completions"):
                await self._complete(await reader.readexactly(_length(head)), writer)
            else:
                models = {"object": "list", "data": [{"id": "null", "object": "model", "metadata": _METADATA}]}
                body = json.dumps(models).encode()
                writer.write(_OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()

    async def _complete(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(body)
        n = int(asked["max_tokens"])
        loop = asyncio.get_running_loop()
        due = loop.time() + self.first_s
        writer.write(_STREAM)
        for i in range(n):
            await asyncio.sleep(max(0.0, due - loop.time()))
            due += self.pace_s
            finish = "length" if i == n - 1 else None
            choice = {"index": 0, "text": "a", "token_ids": [i % 100], "finish_reason": finish}
            writer.write(_chunk({**_EVENT, "choices": [choice]}))
        prompt = len(asked["prompt"])
        usage = {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n}
        writer.write(_chunk({**_EVENT, "choices": [], "usage": usage}))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _chunk(event: dict[str, object]) -> bytes:
    data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


@contextmanager
def running(path: Path, pace_ms: float, first_ms: float = 0.0) -> Iterator[Path]:
    """One in a process of its own, answering at the socket `path`. Errors: RuntimeError when it does not start."""
    argv = [sys.executable, "-P", "-m", "optimizer.traffic.null_server", str(path), str(pace_ms), str(first_ms)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(argv, env=env) as server:
        try:
            deadline = time.monotonic() + 10
            while not _answers(path):
                if time.monotonic() > deadline:
                    raise RuntimeError("the null server does not start")
                time.sleep(0.02)
            yield path
        finally:
            server.terminate()


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return True
    return False


async def serve(path: Path, pace_s: float, first_s: float) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await asyncio.start_unix_server(NullServer(pace_s, first_s).answer, path)
    async with server:
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2]) / 1e3, float(sys.argv[3]) / 1e3 if len(sys.argv) > 3 else 0.0))
