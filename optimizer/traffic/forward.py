"""Offer a Unix socket on a loopback TCP port: for clients that only speak TCP, such as AIPerf.

Engines stay in their sandbox without a network; this process, ours, passes the bytes on. Both clients that are
compared go through it, so its cost (tens of microseconds a chunk) is the same for both. `python -m
optimizer.traffic.forward SOCKET` prints the port. Not for: the optimisation loop, which speaks to the socket itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK = 1 << 16
_START_S = 10.0


@contextmanager
def forwarded(socket_path: Path) -> Iterator[str]:
    """`http://127.0.0.1:PORT` for the server behind `socket_path`. Errors: RuntimeError when no port comes."""
    root = str(Path(__file__).resolve().parents[2])
    env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LD_LIBRARY_PATH")} | {"PYTHONPATH": root}
    argv = [sys.executable, "-P", "-m", "optimizer.traffic.forward", str(socket_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=env) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline() if select.select([process.stdout], [], [], _START_S)[0] else b""
            if not line.strip().isdigit():
                raise RuntimeError("the forwarder did not name its port")
            yield f"http://127.0.0.1:{int(line)}"
        finally:
            process.terminate()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


async def serve(socket_path: str) -> None:
    """Until SIGTERM, or until standard input ends (whoever started it is gone)."""
    ended: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(socket_path)
        except OSError:
            writer.close()
            return
        ended.add(writer)
        await asyncio.gather(_pass(reader, back), _pass(there, writer))
        for each in (writer, back):
            each.close()
        ended.discard(writer)

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), stop.set)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await stop.wait()
    server.close()
    for writer in list(ended):
        writer.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
