"""A running server as the engine's tests see it: started as a process, spoken to over its Unix socket."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


class RunningServer:
    """`python -m engine.serve` until `stop`."""

    def __init__(self, model: Path, tp: int, scratch: Path, *extra: str) -> None:
        self.socket = scratch / "s.sock"
        self.trace_dir = scratch / "traces"
        self.log = scratch / "server.log"
        argv = [sys.executable, "-m", "engine.serve", "--model", str(model), "--tp", str(tp)]
        argv += ["--uds", str(self.socket), "--trace-dir", str(self.trace_dir), *extra]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(argv, cwd=REPO, env=env, stderr=log, start_new_session=True)

    def wait_ready(self, limit_s: float = 90.0) -> RunningServer:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if self.request("GET", "/health")[0] == 200:
                    return self
            except OSError:
                time.sleep(0.05)
        self.kill()
        raise AssertionError(f"the server did not come up: {self.log.read_text()}")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """-> status and JSON body ({} for none). `body`: bytes are sent as they are."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = _UnixConnection(self.socket)
        try:
            connection.request(method, path, raw, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if "json" not in response.headers.get("content-type", ""):
            return response.status, {"text": text.decode()}
        return response.status, json.loads(text)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion with its token ids; greedy and without end unless `body` says otherwise."""
        defaults = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, answer = self.request("POST", "/v1/completions", defaults | body)
        assert status == 200, answer
        return answer

    def complete_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def tokens_of(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of all prompts, sent at once."""
        answers = self.complete_all([{"prompt": p, "max_tokens": max_tokens} for p in prompts])
        return [answer["choices"][0]["token_ids"] for answer in answers]

    def open_stream(self, path: str, body: dict[str, Any]) -> tuple[_UnixConnection, Any]:
        connection = _UnixConnection(self.socket)
        connection.request("POST", path, json.dumps(body | {"stream": True}))
        return connection, connection.getresponse()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end in [DONE]."""
        connection, response = self.open_stream(path, body)
        try:
            events = [e for e in response.read().decode().split("\n\n") if e]
        finally:
            connection.close()
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def metric(self, name: str) -> float:
        for line in self.request("GET", "/metrics")[1]["text"].splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def ranks(self) -> list[int]:
        """Process ids of the ranks above 0."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def stop(self) -> int:
        """SIGTERM -> exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_gone(pids: list[int], limit_s: float = 60.0) -> bool:
    """Whether all processes ended in time."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
