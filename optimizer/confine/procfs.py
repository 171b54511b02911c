"""What /proc says about processes of a candidate, read from outside.

Not for: deciding anything. A process that is gone is an OSError or an empty answer, never a zero reading of a
live one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from pathlib import Path

ENTRY_BYTES = 4096  # what an empty file or folder costs a file system, roughly


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError, ValueError):
            for task in os.listdir(f"/proc/{parent}/task"):
                children = [int(c) for c in _read(f"/proc/{parent}/task/{task}/children").split()]
                found += children
                todo += children
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size: shared pages divided among those who map them. Raises OSError when gone."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def own_bytes(pid: int) -> int:
    """What the process allocated: anonymous and shared memory (proportional), not the pages of mapped files.

    The share of a library's pages depends on who else maps them, also outside the engine. Raises OSError when gone.
    """
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    rows = [line.split() for line in _read(f"/proc/{pid}/smaps_rollup").splitlines()]
    return sum(int(row[1]) for row in rows if row and row[0] in kinds) * 1024


def peak_bytes(pid: int) -> int:
    """The most that was ever resident of the process, mapped files included. Raises OSError when gone."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # a process that has ended and waits to be reaped


def rss_bytes(pid: int) -> int:
    """Resident set size; 0 for a process that is gone."""
    with contextlib.suppress(OSError):
        return int(_read(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def count(pid: int, kind: str) -> int:
    """How many entries /proc/PID/`kind` has ("task": threads, "fd": open files). Raises OSError when gone."""
    return len(os.listdir(f"/proc/{pid}/{kind}"))


def identities(pids: list[int]) -> list[tuple[int, str]]:
    """(pid, start time) of those that live: a number alone may be somebody else's a moment later."""
    return [(pid, started) for pid in pids if (started := _started(pid))]


def kill_and_wait(known: list[tuple[int, str]], timeout_s: float = 2.0) -> None:
    """SIGKILL these processes until none of them is left."""
    deadline = time.monotonic() + timeout_s
    left = [who for who in known if _started(who[0]) == who[1]]
    while left and time.monotonic() < deadline:
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        left = [who for who in left if _started(who[0]) == who[1]]


def _started(pid: int) -> str:
    """Start time in clock ticks; empty for a process that is gone or only waits to be reaped."""
    with contextlib.suppress(OSError, IndexError):
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    return ""


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, of a process and its children that have ended; 0 for one that is gone."""
    with contextlib.suppress(OSError, IndexError):
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def runnable(pid: int) -> int:
    """Threads of the process that run or wait for a core at this moment; 0 for one that is gone."""
    found = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError):
                found += _read(f"/proc/{pid}/task/{task}/stat").rpartition(")")[2].split()[0] == "R"
    return found


def wanting(pids: list[int], seconds: float = 0.4, looks: int = 20) -> float:
    """Threads of these processes that want a core, on average over a moment. Not their CPU time: that depends on who else
    uses the machine."""
    seen = 0
    for _ in range(looks):
        time.sleep(seconds / looks)
        seen += sum(map(runnable, pids))
    return seen / looks


def runs(pid: int, executable: str, but_not: str) -> bool:
    """True when `pid` runs this executable and no early argument ends in /`but_not`."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/exe") == executable:
            return not any(
                part.endswith(f"/{but_not}") for part in _read(f"/proc/{pid}/cmdline").split("\0")[:5]
            )
    return False


def maps(pid: int) -> set[str]:
    """Files that the process has mapped; empty when it is gone."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for line in _read(f"/proc/{pid}/maps").splitlines():
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith("/"):
                found.add(parts[5])
    return found


def read_result(folder: Path, name: str, cap_bytes: int) -> bytes | None:
    """The bytes of a regular file that a candidate wrote; None for a link, another kind, or one over the cap."""
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as handle:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_size > cap_bytes:
            return None
        return handle.read(cap_bytes + 1)[:cap_bytes]


def disk_used(folder: str | os.PathLike[str]) -> int:
    """Bytes on disk below `folder`, links not followed; every entry counts as a block, so that empty ones do too.

    Whatever depth there is: names that are too long to be looked at are left out.
    """
    total, todo = 0, [os.fspath(folder)]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                total += ENTRY_BYTES
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
    return total


def remove_tree(folder: str | os.PathLike[str]) -> None:
    """Delete `folder` and all below it, as far as this user may. What a candidate nested too deeply for names and
    recursion is first moved up, and folders that it closed are opened: nothing may be left by it."""
    top = os.fspath(folder)
    if os.path.islink(top):
        return
    with contextlib.suppress(OSError):
        os.chmod(top, 0o700)
    number, todo = 0, [top]
    while todo:
        here = todo.pop()
        found: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(here) as entries:
            found = list(entries)
        for entry in found:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)  # a folder that cannot be written to cannot be moved
                number += 1
                os.rename(entry.path, f"{top}/.{number}")
                todo.append(f"{top}/.{number}")
        if here != top:
            with contextlib.suppress(OSError):
                os.rmdir(here)
    with contextlib.suppress(OSError):
        os.rmdir(top)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read()
