"""One control group (v1 or v2) per launch: limits on memory and processes, a census, and a sure kill.

Not for: confinement (`sandbox.py`). Where no group can be made, `create` returns None and says why through
`available()`; `launch.py` then watches the process tree from outside instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "hotloop-"


class Cgroup:
    """Directories of one group: one in v2, one for each controller in v1."""

    def __init__(self, directories: tuple[Path, ...]) -> None:
        self.directories = directories

    def joined(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """The argv that enters the group before it becomes `argv`."""
        enter = "".join(f'echo $$ > "{d}/cgroup.procs" || exit 125; ' for d in self.directories)
        return ("/bin/sh", "-c", enter + 'exec "$@"', "sh", *argv)

    def processes(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self.directories[0] / "cgroup.procs").read_text().split()]
        return []

    def oom_kills(self) -> int:
        """How often the kernel killed a process of this group for memory."""
        for directory in self.directories:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    for line in (directory / name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def refused_forks(self) -> int:
        """How often a new process or thread was refused because the limit was reached."""
        for directory in self.directories:
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int((directory / "pids.events").read_text().split()[1])
        return 0

    def shared_bytes(self) -> int:
        """Bytes in shared memory and in files of memory (/dev/shm, /tmp, memfd), mapped or not; 0 where none are counted."""
        for directory in self.directories:
            with contextlib.suppress(OSError):
                rows = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                return int(rows.get("total_shmem", rows.get("shmem", 0)))
        return 0

    def kill(self) -> None:
        """SIGKILL everyone in the group until nobody is left (at most two seconds)."""
        with contextlib.suppress(OSError):
            (self.directories[0] / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + 2
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def remove(self) -> None:
        self.kill()
        for directory in self.directories:
            for _ in range(200):  # the kernel lets go of dead processes a moment later
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.005)
                else:
                    break


def create(name: str, memory_bytes: int, pids: int) -> Cgroup | None:
    """A new group with these limits, or None where this process may not make one."""
    kind, parents = available()
    made: list[Path] = []
    try:
        for parent in parents:
            directory = parent / f"{PREFIX}{name}"
            directory.mkdir()
            made.append(directory)
        if kind == "v2":
            (made[0] / "memory.max").write_text(str(memory_bytes))
            (made[0] / "pids.max").write_text(str(pids))
            with contextlib.suppress(OSError):
                (made[0] / "memory.swap.max").write_text("0")
        elif kind == "v1":
            (made[0] / "memory.limit_in_bytes").write_text(str(memory_bytes))
            (made[1] / "pids.max").write_text(str(pids))
    except OSError:
        Cgroup(tuple(made)).remove()
        return None
    return Cgroup(tuple(made)) if made else None


@functools.cache
def available() -> tuple[str, tuple[Path, ...]]:
    """("v2", (parent,)), ("v1", (memory parent, pids parent)) or ("", ()): found by making a trial group."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(",") if controllers else ["v2"], path.lstrip("/")))
    for mount in (ROOT, ROOT / "unified"):
        if (mount / "cgroup.controllers").exists():
            for parent in _upwards(mount, own.get("v2", "")):
                if _v2_works(parent):
                    return "v2", (parent,)
    v1 = []
    for controller in ("memory", "pids"):
        mount = ROOT / controller
        found = next((p for p in _upwards(mount, own.get(controller, "")) if _can_make(p)), None)
        if found is None:
            return "", ()
        v1.append(found)
    return "v1", tuple(v1)


def _upwards(mount: Path, path: str) -> list[Path]:
    start = mount / path if (mount / path).is_dir() else mount
    return [p for p in (start, *start.parents) if p.is_relative_to(mount)]


def _v2_works(parent: Path) -> bool:
    with contextlib.suppress(OSError):
        (parent / "cgroup.subtree_control").write_text("+memory +pids")
    return _can_make(parent, ("memory.max", "pids.max"))


def _can_make(parent: Path, files: tuple[str, ...] = ("cgroup.procs",)) -> bool:
    trial = parent / f"{PREFIX}trial-{os.getpid()}"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        return all((trial / name).exists() for name in files)
    finally:
        with contextlib.suppress(OSError):
            trial.rmdir()


def sweep() -> None:
    """Remove groups left by optimisers that are gone (names hold the maker's process id)."""
    for parent in available()[1]:
        for directory in parent.glob(f"{PREFIX}*"):
            owner = directory.name.removeprefix(PREFIX).split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                Cgroup((directory,)).remove()
