"""The load generator: `client.Client` in a process of its own, so that nothing else shares its interpreter.

The optimiser's process draws a terminal, writes a ledger and parses results; none of that may delay a time
stamp. This process does nothing but send and receive, with the garbage collector off while streams are in
flight. `self_test` runs it against a null server and says what the client itself costs per token. Not for:
parsing and the wire (`client.py`), choosing requests (`measure.py`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from optimizer.traffic.client import Client, ClientError, Request
from optimizer.types import Stream

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 15.0  # beyond the deadline of the streams themselves
CPU_US_GOAL = 50.0  # per token, 32 streams paced at 10 ms


class LoadError(RuntimeError):
    """The load generator itself failed: says nothing about the server."""


@dataclass(frozen=True, slots=True)
class Load:
    """One batch of requests, done. Times are of the load generator's own clock and process."""

    streams: list[Stream]
    cpu_s: float
    wall_s: float


class LoadGenerator:
    """One process, one server address at a time. A context manager."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LD_LIBRARY_PATH")}
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-P", "-m", "optimizer.traffic.loadgen", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env | {"PYTHONPATH": str(_ROOT)},
            process_group=0,  # what stops the optimiser (Ctrl-C, a service manager) leaves the pair in flight alone
        )

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes: their CPU time is not foreign to the arm."""
        return (self._process.pid,)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(self, client: Client, requests: Sequence[Request], deadline_s: float) -> Load:
        """`client.complete(requests)`, done by the other process at the same address.

        Errors: ClientError as `Client.complete` raises it; LoadError when the process is gone or silent.
        """
        work = (client.socket_path, client.base_url, list(requests), deadline_s)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _write(self._process.stdin, work)
            if not select.select([self._process.stdout], [], [], deadline_s + _GRACE_S)[0]:
                raise LoadError("the load generator does not answer")
            kind, answer = _read(self._process.stdout)
        except (OSError, EOFError) as error:
            raise LoadError(f"the load generator is gone: {error}") from error
        if kind == "client_error":
            raise ClientError(answer)
        return answer


def _write(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    """Both ends of the pipe are ours; a server's bytes arrive as plain `Stream` values."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError("pipe closed")
    return pickle.loads(pipe.read(int.from_bytes(head, "little")))


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """The other process: until its standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the optimiser's business; this process ends with its standard input
        signal.signal(number, signal.SIG_IGN)
    clients: dict[tuple[Any, Any], Client] = {}
    gc.disable()
    while True:
        try:
            path, url, requests, deadline_s = _read(stdin)
        except EOFError:
            return
        client = clients.setdefault((path, url), Client(path, url))
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            streams = client.complete(requests, deadline_s)
        except ClientError as error:
            _write(stdout, ("client_error", str(error)))
        else:
            _write(stdout, ("load", Load(streams, time.process_time() - cpu, time.perf_counter() - wall)))
        gc.collect()


# --- self-test -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the client costs and how late it reads, against a server that computes nothing."""

    streams: int
    pace_ms: float
    tokens: int
    cpu_us_per_token: float
    measured_gap_ms: float  # median gap between tokens; the server paces `pace_ms`
    ok: bool


def self_test(streams: int = 32, pace_ms: float = 10.0, tokens: int = 60, repeats: int = 3) -> SelfTest:
    """Median client CPU per token over `repeats` batches. Errors: LoadError when streams fail."""
    from optimizer.traffic.null_server import running

    with tempfile.TemporaryDirectory() as folder:
        try:
            with running(Path(folder) / "null.sock", pace_ms) as path:
                return _measure_null(path, streams, pace_ms, tokens, repeats)
        except RuntimeError as error:
            raise LoadError(str(error)) from error


def _measure_null(path: Path, streams: int, pace_ms: float, tokens: int, repeats: int) -> SelfTest:
    client = Client(socket_path=path)
    requests = [Request(tuple(range(8)), tokens) for _ in range(streams)]
    costs: list[float] = []
    gaps: list[float] = []
    with LoadGenerator() as generator:
        for _ in range(repeats):
            load = generator.run(client, requests, 30 + tokens * pace_ms / 500)
            if bad := [s.error for s in load.streams if s.error or len(s.token_ids) != tokens]:
                raise LoadError(f"{len(bad)} of {streams} streams of the null server failed: {bad[0]}")
            costs.append(load.cpu_s * 1e6 / (streams * tokens))
            for s in load.streams:
                gaps += [(b - a) / 1e6 for a, b in zip(s.arrivals_ns, s.arrivals_ns[1:], strict=False)]
    cost = median(costs)
    return SelfTest(streams, pace_ms, tokens, cost, median(gaps), cost <= CPU_US_GOAL)


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve(sys.stdin.buffer, sys.stdout.buffer)
        return
    sys.stdout.write(json.dumps(asdict(self_test())) + "\n")


if __name__ == "__main__":
    from optimizer.traffic import (
        loadgen,  # by its own name: what travels over the pipe must not belong to __main__
    )

    loadgen.main()
