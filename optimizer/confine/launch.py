"""Start one engine in the sandbox, wait until it is healthy, and leave nothing of it behind.

Not for: measuring (`measure.py`), judging (`gates/`), choosing a sandbox level (`sandbox.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from optimizer.confine import cgroup, compiled, procfs, sandbox
from optimizer.confine.procfs import read_result
from optimizer.confine.sandbox import Bind, Limits, SandboxLevel
from optimizer.target import render_serve
from optimizer.traffic import wire
from optimizer.traffic.client import Client, ClientError
from optimizer.types import LaunchSpec, RejectReason

LAUNCHER = Path(__file__).with_name("launcher.py")
COMPILED = "compiled"  # folder of a launch; its name inside is sandbox.COMPILED
IO_CAP_BYTES = 4 << 30
# An engine that dies while it holds a multicast group of NVLink can take the GPUs of a host from everybody else on it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LOG_TAIL_BYTES = 1 << 20
_COUNTER = itertools.count()
_SWEPT = threading.Event()


class LaunchError(RuntimeError):
    """An engine that did not come up: `reason` is BOOT (it ended) or HANG (a deadline passed)."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Server:
    """A running engine. All numbers about it come from outside: the parent's clock and /proc."""

    def __init__(self, spec: LaunchSpec, level: SandboxLevel, work: Path, limits: Limits) -> None:
        self.spec = spec
        self.level = level
        self.work = work
        self.io = work / "io"
        self.trace_dir = self.io / "traces"
        self.log_path = work / "server.log"
        self.limits = limits
        self.start_s = 0.0
        self.metadata: dict[str, Any] = {}  # as the server states it: for people, never for a verdict
        self.client = Client(socket_path=self.io / "s.sock")
        self.killed_for: str | None = None
        self._group: cgroup.Cgroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def over_limit(self) -> str | None:
        """Which limit the engine ran into, if any."""
        if self.killed_for is None and self.oom_kills():
            return f"more memory than its limit of {self.limits.memory_bytes >> 20} MiB"
        if self.killed_for is None and self._group is not None and self._group.refused_forks():
            return f"more processes and threads than its limit of {self.limits.pids}"
        return self.killed_for

    def oom_kills(self) -> int:
        """Processes that the kernel ended because the memory limit was reached; 0 where no control group counts."""
        return 0 if self._group is None else self._group.oom_kills()

    def processes(self) -> list[int]:
        """Host process ids of everything in the sandbox, wrappers included."""
        if self._group is not None:
            return self._group.processes()
        return [self.pid, *procfs.descendants(self.pid)] if self.alive() else []

    def ranks(self) -> list[int]:
        """Host process ids that run the target's interpreter, oldest first."""
        python = str(self.spec.python.resolve())
        return sorted(pid for pid in self.processes() if procfs.runs(pid, python, but_not=sandbox.JAIL.name))

    def census(self) -> dict[str, int]:
        """Totals over the sandbox: `processes`, `threads`, `fds`, `rss_bytes` (what was allocated: `procfs.own_bytes`),
        `peak_bytes` (the sum of every process's most), `stored_bytes` (in files: of memory, where a control group counts
        them, and below /io)."""
        total: dict[str, int] = dict.fromkeys(("processes", "threads", "fds", "rss_bytes", "peak_bytes"), 0)
        total["stored_bytes"] = self._disk_used()
        if self._group is not None:
            total["stored_bytes"] += self._group.shared_bytes()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                total["rss_bytes"] += procfs.own_bytes(pid)
                total["peak_bytes"] += procfs.peak_bytes(pid)
                total["threads"] += procfs.count(pid, "task")
                total["fds"] += procfs.count(pid, "fd")
                total["processes"] += 1
        return total

    def _disk_used(self) -> int:
        """Bytes in the folders on the host that the engine may write to."""
        return procfs.disk_used(self.io) + procfs.disk_used(self.work / COMPILED)

    def cpu_s(self) -> float:
        """CPU seconds of everything in the sandbox so far."""
        return sum(procfs.cpu_s(pid) for pid in self.processes())

    def rss(self) -> int:
        """Resident bytes of all processes, shared pages counted once (proportional set size)."""
        return self.census()["rss_bytes"]

    def own_bytes(self) -> int:
        """Bytes that all processes allocated: no mapped files, shared memory counted once."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                total += procfs.own_bytes(pid)
        return total

    def maps(self) -> set[str]:
        """Files mapped by any process of the sandbox."""
        return set().union(*(procfs.maps(pid) for pid in self.processes()))

    def strays(self) -> list[str]:
        """Names that an engine left where results are read, beside its socket and its traces."""
        with contextlib.suppress(OSError):
            return sorted({entry.name for entry in os.scandir(self.io)} - {"s.sock", self.trace_dir.name})
        return []

    def log_tail(self, lines: int = 20) -> str:
        with contextlib.suppress(OSError), self.log_path.open("rb") as handle:
            handle.seek(max(0, self.log_path.stat().st_size - 16384))
            return wire.plain("\n".join(handle.read().decode("utf-8", "replace").splitlines()[-lines:]), 16384)
        return ""

    def collect_traces(self, destination: Path, cap_bytes: int = 1 << 30) -> list[Path]:
        """Copy the trace files out. Symbolic links, odd files and sizes over the cap are left; returns copies."""
        destination.mkdir(parents=True, exist_ok=True)
        copied, left = [], cap_bytes
        with contextlib.suppress(OSError):
            for name in sorted(path.name for path in self.trace_dir.iterdir()):
                if name.endswith((".json", ".json.gz")) and not name.startswith("."):
                    data = read_result(self.trace_dir, name, left)
                    if data is not None:
                        (destination / name).write_bytes(data)
                        copied.append(destination / name)
                        left -= len(data)
        return copied

    # -- life ------------------------------------------------------------------------------------------

    def start(
        self, argv: list[str], env: dict[str, str], binds: list[Bind], cwd: str, masks: tuple[str, ...]
    ) -> None:
        name = self.work.name.removeprefix("hotloop-")
        self._group = cgroup.create(name, self.limits.memory_bytes, self.limits.pids)
        wrapped = sandbox.wrap(
            argv, binds, self.level, self.limits, env=env, cwd=cwd, masks=masks, device=self.spec.device
        )
        command = wrapped.argv if self._group is None else self._group.joined(wrapped.argv)
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    env=wrapped.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=wrapped.pass_fds,
                    process_group=0,
                )
        finally:
            for fd in wrapped.pass_fds:
                os.close(fd)
        threading.Thread(target=self._watch, name="hotloop-watch", daemon=True).start()

    def await_health(self, timeout_s: float) -> None:
        began = time.perf_counter()
        pause = 0.005
        while True:
            if self.client.health(timeout_s=2.0):
                break
            if not self.alive():
                why = (
                    self.over_limit() or f"exit status {self._process.returncode if self._process else None}"
                )
                raise LaunchError(
                    RejectReason.BOOT,
                    f"{self.spec.label} ended before it was healthy ({why})\n{self.log_tail()}",
                )
            if time.perf_counter() - began > timeout_s:
                why = f"not healthy after {timeout_s:g} s ({self.over_limit() or 'within its limits'})"
                raise LaunchError(RejectReason.HANG, f"{self.spec.label} {why}\n{self.log_tail()}")
            time.sleep(pause)
        self.start_s = time.perf_counter() - began
        try:
            self.metadata = self.client.metadata()
        except ClientError as error:
            raise LaunchError(RejectReason.BOOT, f"{self.spec.label}: {error}") from None

    def close(self, log_to: Path | None = None, keep: Path | None = None) -> None:
        """Kill everything, keep the end of the log at `log_to` and compiled code in `keep`, remove all else on the host."""
        self._closing.set()
        try:
            self._kill()
            if log_to is not None:
                log_to.parent.mkdir(parents=True, exist_ok=True)
                data = read_result(self.work, self.log_path.name, self.limits.file_bytes) or b""
                log_to.write_bytes(data[-LOG_TAIL_BYTES:])
            if keep is not None:
                compiled.copy(self.work / COMPILED, keep)
        finally:
            procfs.remove_tree(self.work)

    def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        everyone = procfs.identities(procfs.descendants(process.pid))
        if process.poll() is None:
            if self.level.name in ("landlock", "none"):  # the jail is a subreaper: it ends its descendants
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._group is not None:
            self._group.remove()
        process.wait()
        procfs.kill_and_wait(
            everyone
        )  # without a control group: a pid namespace dies a moment after its first process

    def _watch(self) -> None:
        """Outside limits: disk used below /io always; processes and memory where no control group holds them."""
        while not self._closing.wait(0.5):
            if (used := self._disk_used()) > IO_CAP_BYTES:
                self.killed_for = f"wrote {used} bytes to disk"
            elif self._group is None:
                pids = self.processes()
                if len(pids) > self.limits.pids:
                    self.killed_for = f"{len(pids)} processes, limit {self.limits.pids}"
                elif (rss := sum(procfs.rss_bytes(pid) for pid in pids)) > self.limits.memory_bytes:
                    self.killed_for = f"{rss} bytes of memory, limit {self.limits.memory_bytes}"
            if self.killed_for is not None:
                with contextlib.suppress(OSError):
                    self._kill()
                return


@contextmanager
def launch(
    spec: LaunchSpec,
    *,
    limits: Limits | None = None,
    log_to: Path | None = None,
    timeout_s: float | None = None,
    keep: Path | None = None,
) -> Iterator[Server]:
    """A healthy server for `spec`; whatever happens, nothing of it is left afterwards but, in the folder `keep`, what it
    compiled; it starts from what is there.

    Raises LaunchError, or SandboxError for a level that this machine does not offer. Start it from a thread that
    lives as long as the server does: the sandbox dies with the thread that started it.
    """
    level = sandbox.resolve(spec.sandbox)
    if not _SWEPT.is_set():
        _SWEPT.set()
        sweep()
    work = Path(tempfile.mkdtemp(prefix=f"hotloop-{os.getpid()}-{next(_COUNTER)}-"))
    server = Server(spec, level, work, limits or default_limits(spec))
    try:
        for folder in (server.io, server.trace_dir, work / "tmp"):
            folder.mkdir(mode=0o700)
        if spec.compiled is not None:
            compiled.fill(spec, work / COMPILED, partial(_unjudged, timeout_s))
        elif keep is not None:
            compiled.copy(keep, work / COMPILED)
        binds = _binds(spec, work, level)
        argv = _argv(spec, binds, level)
        server.start(
            argv,
            _environment(spec, binds, level),
            list(binds.values()),
            sandbox.inside(level, binds["tree"]),
            _masks(spec),
        )
        server.await_health(spec.target.start_timeout_s if timeout_s is None else timeout_s)
        yield server
    finally:
        server.close(log_to, keep)


def _unjudged(timeout_s: float | None, bare: LaunchSpec, keep: Path) -> AbstractContextManager[Server]:
    return launch(bare, timeout_s=timeout_s, keep=keep)


@contextmanager
def compiling(specs: Sequence[LaunchSpec]) -> Iterator[None]:
    """Compile what these programs will compile, one after another, beside work that nobody times. At the end of that work
    the one under way is waited for and the rest is left: a launch compiles what it does not find."""
    wanted = [spec for spec in specs if spec.compiled is not None]
    if not wanted:
        yield
        return
    over = threading.Event()

    def each() -> None:
        for spec in wanted:
            if not over.is_set():
                compiled.made(spec, partial(_unjudged, None))

    thread = threading.Thread(target=each, name="hotloop-compiling")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def default_limits(spec: LaunchSpec) -> Limits:
    """Limits of one candidate: at most three quarters of this machine's memory.

    On a CPU less: 2 GiB a rank for interpreter, libraries and cache, and eight times the weights.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
    if spec.device == "cpu":
        stored = sum(path.stat().st_size for path in spec.model_dir.glob("*.safetensors"))
        total = min(total, (2 * spec.tp << 30) + 8 * stored)
    return Limits(memory_bytes=total, shm_bytes=total // 2, tmp_bytes=total // 2)


def sweep() -> None:
    """Remove what optimisers that were killed left behind: folders and control groups of dead processes."""
    cgroup.sweep()
    for folder in Path(tempfile.gettempdir()).glob("hotloop-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            procfs.remove_tree(folder)


def _binds(spec: LaunchSpec, work: Path, level: SandboxLevel) -> dict[str, Bind]:
    binds = {
        "tree": Bind(spec.tree.resolve(), sandbox.TREE),
        "weights": Bind(spec.model_dir.resolve(), sandbox.WEIGHTS),
        "launcher": Bind(LAUNCHER.resolve(), sandbox.LAUNCHER),
        "io": Bind(work / "io", sandbox.IO, writable=True),
    }
    if (work / COMPILED).is_dir():
        binds[COMPILED] = Bind(work / COMPILED, sandbox.COMPILED, writable=True)
    if level.name in ("landlock", "none"):
        binds["tmp"] = Bind(work / "tmp", "/tmp", writable=True)
    for number, bind in enumerate(sandbox.python_binds(_absolute(spec.python))):
        binds[f"python{number}"] = bind
    return binds


def _argv(spec: LaunchSpec, binds: dict[str, Bind], level: SandboxLevel) -> list[str]:
    io = sandbox.inside(level, binds["io"])
    argv = render_serve(
        spec.target,
        python=_absolute(spec.python),
        launcher=sandbox.inside(level, binds["launcher"]),
        model_dir=sandbox.inside(level, binds["weights"]),
        tp=spec.tp,
        device=spec.device,
        socket=f"{io}/s.sock",
        trace_dir=f"{io}/traces",
    )
    return [*argv, *spec.extra_args]


def _environment(spec: LaunchSpec, binds: dict[str, Bind], level: SandboxLevel) -> dict[str, str]:
    """Everything the engine's environment holds; nothing is inherited."""
    tmp = sandbox.inside(level, binds["tmp"]) if "tmp" in binds else "/tmp"
    made = sandbox.inside(level, binds[COMPILED]) if COMPILED in binds else tmp
    env = {
        "PATH": f"{_absolute(spec.python).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": tmp,
        "USER": "nobody",
        "LANG": "C.UTF-8",
        "TMPDIR": tmp,
        "XDG_CACHE_HOME": f"{tmp}/cache",
        **{name: f"{made}/{folder}" for name, folder in compiled.FOLDERS.items()},
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, spec.devices)),
        # What timed launches vary (`measure.py` gives both arms the same): gates must not lack it.
        "PYTHONHASHSEED": str(1 + secrets.randbelow(2**32 - 1)),
        "HOTLOOP_PAD": "x" * secrets.randbelow(4096),
    }
    if spec.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    else:
        env |= NO_MULTICAST
        if not spec.devices:
            del env["CUDA_VISIBLE_DEVICES"]
    if "nan_fill" in spec.probes:
        env["HOTLOOP_PROBES"] = "nan_fill"
    if "no_cache_alloc" in spec.probes:  # freed memory goes back at once, and is overwritten when freed
        env |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "MALLOC_PERTURB_": "165", "PYTHONMALLOC": "malloc"}
    if "launch_blocking" in spec.probes:
        env["CUDA_LAUNCH_BLOCKING"] = "1"
    return env | dict(spec.env)


def _masks(spec: LaunchSpec) -> tuple[str, ...]:
    named = " ".join(spec.target.serve)
    allowed = frozenset(name for name in sandbox.OTHER_ENGINES if name in named)
    return sandbox.package_masks(_absolute(spec.python), allowed)


def _absolute(python: Path) -> Path:
    return Path.cwd() / python  # not resolved: a venv's interpreter is known by its own path
