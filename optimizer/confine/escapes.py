"""Self-tests of the sandbox: the escapes that were seen to work elsewhere, tried on this machine.

`self_test` is what `optimize doctor` and the tests show. Every row is (what was tried, held, detail); what a level
never promises is None. Not for: building the sandbox (`sandbox.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from optimizer.confine import cgroup, sandbox
from optimizer.confine.launch import Server, default_limits, read_result
from optimizer.confine.sandbox import Bind, SandboxLevel
from optimizer.types import LaunchSpec, Target

Row = tuple[str, bool | None, str]
MOUNTED = ("bwrap", "namespaces")  # levels with a root of their own

# Runs inside, as the candidate would. Prints one JSON object: what it managed to do.
PROBE = r"""
import ctypes, json, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
spec = json.loads(sys.argv[1])
out = {}
def tried(name):
    def wrap(function):
        try:
            out[name] = function()
        except BaseException as error:
            out[name] = f"no: {type(error).__name__}"
    return wrap
@tried("remount")
def _():
    return libc.mount(None, b"/", None, 32 | 4096, None) == 0
@tried("write_system")
def _():
    open("/usr/hotloop-escape", "w").close(); return True
@tried("write_tree")
def _():
    open(spec["tree"] + "/escape.py", "w").close(); return True
@tried("write_weights")
def _():
    open(spec["weights"] + "/escape", "w").close(); return True
@tried("read_host")
def _():
    return open(spec["secret_file"]).read() == spec["secret"]
@tried("environ")
def _():
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                if spec["secret_env"].encode() in open(f"/proc/{pid}/environ", "rb").read():
                    found.append(pid)
            except OSError:
                pass
    return found
@tried("network")
def _():
    with socket.create_connection(("127.0.0.1", spec["port"]), timeout=1):
        return True
@tried("abstract")
def _():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(chr(0) + spec["abstract"]); return True
@tried("signal")
def _():
    os.kill(spec["host_pid"], 0); return True
@tried("ptrace")
def _():
    pid = os.fork()  # a traced process stops at its next signal: let it be another
    if pid == 0:
        os._exit(libc.ptrace(0, 0, 0, 0) != 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
@tried("unshare")
def _():
    return libc.unshare(0x10000000) == 0
@tried("clock")
def _():
    now = ctypes.create_string_buffer(16)
    libc.clock_gettime(0, now)  # to what it is: should it work, nothing changes
    return libc.clock_settime(0, now) == 0
@tried("capabilities")
def _():
    line = next(l for l in open("/proc/self/status") if l.startswith("CapEff"))
    return int(line.split()[1], 16) != 0
@tried("seccomp")
def _():
    return next(l for l in open("/proc/self/status") if l.startswith("Seccomp:")).split()[1]
@tried("shm")
def _():
    path = "/dev/shm/" + spec["mark"]
    with open(path, "wb") as f:
        f.write(b"x" * (1 << 20))
    return True
@tried("link")
def _():
    os.symlink(spec["secret_file"], spec["io"] + "/link.json"); return True
@tried("big_file")
def _():
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open(spec["io"] + "/big", "wb") as f:
        f.truncate(spec["file_bytes"] + 1)
    return True
@tried("daemon")
def _():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sh", ["sh", "-c", "sleep 60; : " + spec["mark"]])
        os._exit(0)
    os.wait()
    return True
with open(spec["io"] + "/result.json", "w") as handle:
    json.dump(out, handle)
if spec["bomb"]:
    children = 0
    try:
        while children < 4000:
            if os.fork() == 0:
                time.sleep(60); os._exit(0)
            children += 1
    except OSError:
        pass
    with open(spec["io"] + "/bomb.json", "w") as handle:
        json.dump(children, handle)
if spec["hog"]:
    with open(spec["io"] + "/hog.json", "w") as handle:
        json.dump("started", handle)
    block = []
    while True:
        block.append(bytearray(b"x") * (16 << 20))
time.sleep(60)
"""


def self_test(level: SandboxLevel | None = None) -> Iterator[Row]:
    """Rows for this machine's level (or another that works here). Nothing of it is left afterwards."""
    level = level or sandbox.detect()
    if level.name == "none":
        yield "confinement", None, "none: nothing is tried"
        return
    folder = Path(tempfile.mkdtemp(prefix=f"hotloop-{os.getpid()}-escape-"))
    try:
        with _Host(folder) as host:
            got, host_side = _probe(level, folder, host)
            yield from _confinement(level, got, host_side)
            yield from _limits(level, folder, host)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Host:
    """Things of the host that an escape would reach: a file, a variable, a port, an abstract socket, a process."""

    def __init__(self, folder: Path) -> None:
        self.secret = secrets.token_hex(16)
        self.file = folder / "host-secret"
        self.file.write_text(self.secret)
        self.name = f"HOTLOOP_SECRET_{secrets.token_hex(4)}"
        self.mark = f"hotloop-{secrets.token_hex(8)}"

    def __enter__(self) -> _Host:
        os.environ[self.name] = self.secret
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0{self.mark}")
        self.abstract.listen()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(self.name, None)
        self.tcp.close()
        self.abstract.close()
        for left in (Path("/dev/shm") / self.mark, Path("/usr/hotloop-escape")):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)


def _probe(
    level: SandboxLevel, folder: Path, host: _Host, **extra: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """Run PROBE in a server's sandbox; what it says it did, and what is seen from outside afterwards."""
    work = folder / secrets.token_hex(4)
    for name in ("io/traces", "tmp", "tree", "weights"):
        (work / name).mkdir(parents=True)
    limits = replace(default_limits(_spec(work, level)), file_bytes=64 << 20)
    limits = replace(limits, pids=64) if extra.get("bomb") else limits
    limits = replace(limits, memory_bytes=256 << 20) if extra.get("hog") else limits
    server = Server(_spec(work, level), level, work, limits)
    _start(server, host, extra)
    try:
        last = "bomb.json" if extra.get("bomb") else "hog.json" if extra.get("hog") else "result.json"
        side: dict[str, object] = {"last": _await(server, last), "processes": _settle(server, extra)}
        first = read_result(server.io, "result.json", 1 << 20)
        side |= {
            "killed": server.killed_for or (not server.alive()),
            "oom": server.oom_kills(),
            "link": read_result(server.io, "link.json", 1 << 20),
            "shm": (Path("/dev/shm") / host.mark).exists(),
        }
    finally:
        server.close()
    side |= {"daemon": _marked(host.mark), "left": work.exists()}
    return json.loads(first) if first else {}, side


def _start(server: Server, host: _Host, extra: dict[str, bool]) -> None:
    """PROBE in the place of an engine, with everything it is to try."""
    work, level = server.work, server.level
    binds = {
        "tree": Bind(work / "tree", sandbox.TREE),
        "weights": Bind(work / "weights", sandbox.WEIGHTS),
        "io": Bind(work / "io", sandbox.IO, writable=True),
    }
    shown = {name: sandbox.inside(level, bind) for name, bind in binds.items()}
    if level.name not in MOUNTED:
        binds["tmp"] = Bind(work / "tmp", "/tmp", writable=True)
    spec = {
        **shown, "secret_file": str(host.file), "secret": host.secret, "secret_env": host.name,
        "port": host.tcp.getsockname()[1], "abstract": host.mark, "host_pid": os.getpid(), "mark": host.mark,
        "file_bytes": server.limits.file_bytes, "bomb": False, "hog": False, **extra,
    }  # fmt: skip
    python = Path(sys.executable)
    command = [str(python), "-I", "-B", "-c", PROBE, json.dumps(spec)]
    visible = [*binds.values(), *sandbox.python_binds(python)]
    server.start(command, {"PATH": "/usr/bin:/bin"}, visible, shown["tree"], ())


def _settle(server: Server, extra: dict[str, bool]) -> int:
    """Give a bomb or a hog a moment; the most processes seen."""
    most = 0
    for _ in range(20 if extra else 1):
        most = max(most, len(server.processes()))
        if not server.alive() or server.killed_for or server.oom_kills():
            break
        time.sleep(0.1)
    return most


def _spec(work: Path, level: SandboxLevel) -> LaunchSpec:
    target = Target(work, work, "escape", ("{python}",), (), (), ("cpu",), (1,), {"cpu": "float32"}, 20.0)
    return LaunchSpec(work / "tree", target, Path(sys.executable), work / "weights", 1, sandbox=level.name)


def _await(server: Server, name: str) -> object:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.alive():
        data = read_result(server.io, name, 1 << 20)
        with contextlib.suppress(ValueError):
            if data:
                return json.loads(data)
        time.sleep(0.02)
    return None


def _marked(mark: str) -> bool:
    """Whether a process with the mark in its command line still runs; such a one is ended."""
    found = False
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if mark.encode() in line and b"sleep 60" in line:
                    found = True
                    os.kill(int(entry.name), signal.SIGKILL)
    return found


def _confinement(level: SandboxLevel, got: dict[str, object], side: dict[str, object]) -> Iterator[Row]:
    own = level.name in MOUNTED

    def held(name: str) -> bool:
        return name in got and got[name] is not True

    def said(name: str) -> str:
        value = got.get(name)
        return "it worked" if value is True else "refused" if value is False else str(value).removeprefix("no: ")

    yield "remount / writable", held("remount"), said("remount")
    for name, what in (
        ("write_system", "write below /usr"),
        ("write_tree", "write to its tree"),
        ("write_weights", "write to the weights"),
    ):
        yield what, held(name), said(name)
    yield "read a host file", held("read_host"), said("read_host")
    yield (
        "read secrets from /proc/*/environ",
        got.get("environ") == [],
        f"found in {got.get('environ')}" if got.get("environ") else "none found",
    )
    yield "reach a host TCP port", held("network") if own else None, said("network")
    yield "reach a host abstract socket", held("abstract") if own else None, said("abstract")
    yield "signal a host process", held("signal") if own else None, said("signal")
    yield "ptrace", held("ptrace"), said("ptrace")
    yield "new user namespace", held("unshare"), said("unshare")
    yield "set the clock", held("clock"), said("clock")
    yield "hold a capability", held("capabilities"), said("capabilities")
    yield (
        "seccomp filter in force",
        got.get("seccomp") == "2",
        f"mode {got.get('seccomp')}",
    )
    yield "shared memory for the ranks", got.get("shm") is True, said("shm")
    yield (
        "private /dev/shm",
        not side["shm"] if own else None,
        "seen from the host" if side["shm"] else "not seen from the host",
    )
    yield (
        "result through a symbolic link",
        side["link"] is None,
        "refused" if side["link"] is None else "followed",
    )
    yield "file over the size limit", held("big_file"), said("big_file")
    yield "daemon that outlives the sandbox", not side["daemon"], "still ran" if side["daemon"] else "gone"
    yield "folders left behind", not side["left"], "left" if side["left"] else "none"


def _limits(level: SandboxLevel, folder: Path, host: _Host) -> Iterator[Row]:
    kind = cgroup.available()[0] or "watched from outside"
    _, side = _probe(level, folder, host, bomb=True)
    started = side["last"] if isinstance(side["last"], int) else None
    yield (
        "fork bomb",
        started is None or started < 64,
        f"{started if started is not None else 'killed'} of 4000 forks ({kind})",
    )
    _, side = _probe(level, folder, host, hog=True)
    yield (
        "memory hog",
        bool(side["oom"] or side["killed"]),
        f"stopped ({kind})" if side["oom"] or side["killed"] else "not stopped",
    )


def main() -> int:
    """`python -m optimizer.confine.escapes [LEVEL]`: the rows as text; 1 when something was not held."""
    level = sandbox.resolve(sys.argv[1] if len(sys.argv) > 1 else "auto")
    rows = list(self_test(level))
    for what, held, detail in rows:
        sys.stdout.write(f"{'held' if held else '-' if held is None else 'NOT HELD':9}{what}: {detail}\n")
    return 1 if any(held is False for _, held, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
