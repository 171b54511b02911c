"""A server of somebody else, started as its command line says: vLLM, SGLang, whatever speaks its HTTP surface.

It runs as the user would run it: no sandbox, this process's environment. So only engines that are *compared with* are
started here, by the same client and under the same clock as ours. Not for: candidates (`confine/launch.py` confines
those), nor what the flags of one engine are (`vllm_server.py`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.traffic.client import Client, ClientError

PLACEHOLDERS = ("{socket}", "{port}", "{model_dir}", "{trace_dir}", "{python}")
_SETTLE_S = 10.0  # between asking a server to end and ending it: vLLM's workers give their GPU back in this time


class OutsideError(RuntimeError):
    """The server did not come up, or went away; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server. `argv` holds `{socket}` or `{port}`, and may hold the other `PLACEHOLDERS`."""

    label: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()  # on top of this process's own

    def __str__(self) -> str:
        """As one would type it, for a record."""
        return shlex.join([f"{key}={value}" for key, value in self.env] + list(self.argv))


def parse(text: str, label: str) -> Command:
    """A command from one line of shell-quoted text. Raises OutsideError when nothing could be reached by it."""
    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise OutsideError(f"{text!r}: {error}") from None
    if not any("{socket}" in arg or "{port}" in arg for arg in argv):
        raise OutsideError(f"{text!r} names neither {{socket}} nor {{port}}: nobody could reach that server")
    return Command(label, argv)


class Outside:
    """A running server; like `launch.Server` in what the client and the captures need of it."""

    def __init__(self, command: Command, work: Path, model_dir: Path, python: Path) -> None:
        self.command = command
        self.trace_dir = work / "traces"
        self.log_path = work / "server.log"
        self.start_s = 0.0
        self.metadata: dict[str, Any] = {}
        self.argv = _filled(command.argv, work, model_dir, python)
        port = next((found for found in (_port_of(a, b) for a, b in zip(command.argv, self.argv, strict=True)) if found), None)
        path = work / "s.sock"
        self.client = Client(base_url=f"http://127.0.0.1:{port}") if port else Client(socket_path=path)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float, devices: Sequence[int]) -> None:
        """Start and wait until it is healthy. Raises OutsideError."""
        env = os.environ | dict(self.command.env)
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        began = time.perf_counter()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    self.argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.trace_dir
                )
        except OSError as error:
            raise OutsideError(f"{self.command.label}: {error}") from None
        while not self.client.health(timeout_s=2.0):
            if not self.alive():
                raise OutsideError(f"{self.command.label} ended with status {self._process.returncode}\n{self.log_tail()}")
            if time.perf_counter() - began > timeout_s:
                raise OutsideError(f"{self.command.label} was not healthy within {timeout_s:.0f} s\n{self.log_tail()}")
            time.sleep(0.05)
        self.start_s = time.perf_counter() - began
        try:
            self.metadata = self.client.metadata()
        except ClientError as error:
            raise OutsideError(f"{self.command.label}: {error}\n{self.log_tail()}") from None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return self.log_path.read_bytes().decode("utf-8", "replace")
        return ""

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def collect_traces(self, destination: Path) -> list[Path]:
        """Copies of the trace files, sorted by name."""
        destination.mkdir(parents=True, exist_ok=True)
        found = sorted(p for p in self.trace_dir.rglob("*") if p.name.endswith((".json", ".json.gz")))
        return [Path(shutil.copy2(path, destination / path.name)) for path in found]

    def close(self) -> None:
        """End it and everything it started."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_SETTLE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def serve(
    command: Command, model_dir: Path, python: Path, *, timeout_s: float, devices: Sequence[int] = (), log_to: Path | None = None
) -> Iterator[Outside]:
    """A healthy server; whatever happens, nothing of it is left afterwards but its log at `log_to`.

    devices: GPU indices it may see, all if empty. Raises OutsideError.
    """
    work = Path(tempfile.mkdtemp(prefix="hotloop-outside-"))  # a short path: a Unix socket's has 108 bytes at most
    server = Outside(command, work, model_dir, python)
    try:
        server.trace_dir.mkdir()
        server.start(timeout_s, devices)
        yield server
    finally:
        server.close()
        if log_to is not None and server.log_path.exists():
            log_to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(server.log_path, log_to)
        shutil.rmtree(work, ignore_errors=True)


def _filled(argv: Sequence[str], work: Path, model_dir: Path, python: Path) -> list[str]:
    """Plain replacement: arguments may hold braces of their own (JSON). The server runs in a folder of its own: a file that
    was named from here keeps its meaning."""
    values = {
        "{socket}": str(work / "s.sock"),
        "{port}": str(_free_port()) if any("{port}" in arg for arg in argv) else "",
        "{model_dir}": str(model_dir),
        "{trace_dir}": str(work / "traces"),
        "{python}": str(python),
    }
    filled = list(argv)
    for name in PLACEHOLDERS:
        filled = [arg.replace(name, values[name]) for arg in filled]
    return [str(Path(arg).absolute()) if "/" in arg and Path(arg).is_file() else arg for arg in filled]


def _port_of(template: str, filled: str) -> str | None:
    if "{port}" not in template:
        return None
    before, _, after = template.partition("{port}")
    return filled[len(before) : len(filled) - len(after)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
