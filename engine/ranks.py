"""Starts, watches and ends the processes of a tensor-parallel group.

The serving process is rank 0. It imports torch once and forks the others before any CUDA call: a fork takes
a tenth of a second, an import of torch more than one. Not for: what a rank computes (`worker.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from engine import parallel
from engine.config import ConfigError, EngineConfig
from engine.worker import Shutdown, Worker, serve_rank

_PR_SET_PDEATHSIG = 1
_EXIT_GRACE_S = 5.0
_UNUSABLE = 2  # exit code for options or a model that cannot be used


class Ranks:
    """The ranks above 0, seen from rank 0."""

    def __init__(self, options: EngineConfig, rendezvous: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        self._stopping = threading.Event()
        for rank in range(1, options.tp):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_rank_main,
                args=(options, rank, rendezvous, theirs, list(self._connections), os.getpid()),
                name=f"rank{rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        if self._processes:
            self._watcher.start()

    def send(self, message: Any) -> None:
        """Tell every other rank."""
        for connection in self._connections:
            connection.send(message)

    def gather(self) -> list[Any]:
        """One answer from every other rank."""
        return [connection.recv() for connection in self._connections]

    def stop(self) -> None:
        """Leave the group together with the other ranks; kill those that do not end."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self.send(Shutdown())
        parallel.leave()
        for process in self._processes:
            process.join(_EXIT_GRACE_S)
        self.kill()

    def name_the_dead(self) -> None:
        """After a failed step: when a rank's death is the cause, let the watch say so and end the server."""
        if self._processes and wait([process.sentinel for process in self._processes], timeout=1.0):
            self._watcher.join(_EXIT_GRACE_S)

    def kill(self) -> None:
        """End the ranks at once: they may be waiting for rank 0 in a collective."""
        self._stopping.set()
        for process in self._processes:
            process.kill()

    def _watch(self) -> None:
        """A rank that dies takes the server with it: the others would wait for it in a collective for ever."""
        gone = wait([process.sentinel for process in self._processes])
        if self._stopping.is_set():
            return
        dead = [process for process in self._processes if process.sentinel in gone]
        for process in dead:
            process.join()
            if process.exitcode != _UNUSABLE:  # that one has said why
                sys.stderr.write(f"{process.name} died (exit code {process.exitcode}); the server stops\n")
        self.kill()
        sys.stderr.flush()
        os._exit(_UNUSABLE if any(process.exitcode == _UNUSABLE for process in dead) else 1)


def _rank_main(
    options: EngineConfig, rank: int, rendezvous: Path, connection: Any, inherited: list[Any], parent: int
) -> None:
    for other in inherited:  # rank 0's ends: kept open here they would hide its death
        other.close()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when to leave
        signal.signal(number, signal.SIG_IGN)
    try:
        worker = Worker(options, rank, rendezvous)
        connection.send("ready")
        serve_rank(worker, connection)
        parallel.leave()
    except ConfigError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        sys.exit(_UNUSABLE)
    except EOFError:  # rank 0 is gone
        os._exit(1)
    except Exception:  # noqa: BLE001  whatever it was: say so and die, for the others wait in a collective
        sys.stderr.write(f"rank {rank} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)
