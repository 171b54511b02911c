"""The state of the machine around a timed block, seen from outside: load, pressure, steal, GPU clocks.

Both arms of a pair must have run in the same environment; where they did not, `disagreement` names one of
the reasons, written here before any data exist, for which a pair may be taken again. The test is symmetric
in the arms and knows nothing of their times. Not for: what stays the same during a run (`fingerprint.py`), nor
how many pairs may be lost (`accept.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOREIGN_CORES = 0.5  # foreign CPU use may differ by this many cores, or a quarter of the machine if more
FOREIGN_SHARE = 0.25
STEAL_SHARE = 0.05  # of the machine's CPU time
SM_CLOCK_SHARE = 0.05
# Reasons for lower clocks that matter: hardware slowdown, thermal (hard and soft), power brake. A power cap
# is normal under load and shows in the clocks.
THROTTLE_MASK = 0x8 | 0x20 | 0x40 | 0x80
_GPU_FIELDS = (
    "index", "uuid", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "memory.used",
    "clocks_throttle_reasons.active", "driver_version", "name",
)  # fmt: skip
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    sm_mhz: float
    mem_mhz: float
    celsius: float
    watts: float | None
    used_mib: float
    throttle: int  # bit mask, see THROTTLE_MASK
    driver: str
    name: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The machine at one moment; counters are totals since boot."""

    at_s: float
    busy_s: float  # CPU seconds of all cores, steal not included
    steal_s: float
    pressure_s: float | None  # seconds in which some task waited for a CPU (PSI)
    load1: float
    own_s: float  # CPU seconds of this process and of the processes named
    gpus: tuple[Gpu, ...] = ()
    gpu_pids: frozenset[int] = frozenset()  # processes that use them, as far as this machine's /proc knows them


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two snapshots of one arm."""

    seconds: float
    foreign_cores: float  # cores used by anyone but the arm and its client
    own_cores: float
    steal_share: float
    pressure_share: float | None
    load1: float
    sm_mhz: tuple[float, ...] = ()
    celsius: tuple[float, ...] = ()
    throttled: bool = False
    foreign_gpu_pids: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def snapshot(pids: Iterable[int] = (), devices: Sequence[int] = ()) -> Snapshot:
    """Read the counters now. pids: the arm's processes; devices: GPU indices to ask nvidia-smi about."""
    busy, steal = _parse_stat(_read("/proc/stat"))
    own = time.process_time() + sum(cpu_seconds(pid) for pid in pids)
    gpus = query_gpus(devices) if devices else ()
    users = frozenset(pid for pid in gpu_memory(devices) if Path(f"/proc/{pid}").exists()) if devices else frozenset()
    pressure = _parse_pressure(_read("/proc/pressure/cpu"))
    return Snapshot(time.monotonic(), busy, steal, pressure, os.getloadavg()[0], own, gpus, users)


def window(before: Snapshot, after: Snapshot, arm_pids: Iterable[int] = (), cores: int | None = None) -> Window:
    """What lies between. arm_pids: processes whose use of the GPUs is the arm's own."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    cores = cores or os.cpu_count() or 1
    own = max(0.0, after.own_s - before.own_s) / seconds
    pressure = None
    if before.pressure_s is not None and after.pressure_s is not None:
        pressure = (after.pressure_s - before.pressure_s) / seconds
    return Window(
        seconds=seconds,
        foreign_cores=max(0.0, (after.busy_s - before.busy_s) / seconds - own),
        own_cores=own,
        steal_share=(after.steal_s - before.steal_s) / seconds / cores,
        pressure_share=pressure,
        load1=after.load1,
        sm_mhz=tuple(max(a.sm_mhz, b.sm_mhz) for a, b in zip(before.gpus, after.gpus, strict=False)),
        celsius=tuple(g.celsius for g in after.gpus),
        throttled=any(g.throttle & THROTTLE_MASK for g in (*before.gpus, *after.gpus)),
        foreign_gpu_pids=len((before.gpu_pids | after.gpu_pids) - frozenset(arm_pids)),
    )


def disagreement(a: Window, b: Window, cores: int | None = None) -> str | None:
    """A pre-registered reason to take the pair again, or None. Symmetric in the arms."""
    cores = cores or os.cpu_count() or 1
    if abs(a.foreign_cores - b.foreign_cores) > max(FOREIGN_CORES, FOREIGN_SHARE * cores):
        return "load"
    if abs(a.steal_share - b.steal_share) > STEAL_SHARE:
        return "steal"
    if a.throttled or b.throttled:
        return "throttle"
    if a.foreign_gpu_pids or b.foreign_gpu_pids:
        return "foreign_gpu_process"
    for x, y in zip(a.sm_mhz, b.sm_mhz, strict=False):
        if abs(x - y) > SM_CLOCK_SHARE * max(x, y):
            return "gpu_clock"
    return None


def cpu_seconds(pid: int) -> float:
    """User and system CPU seconds of a process and its reaped children; 0.0 for one that is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()
        return sum(int(fields[i]) for i in (11, 12, 13, 14)) / _TICK
    return 0.0


# --- readers -------------------------------------------------------------------------------------------


def query_gpus(devices: Sequence[int] | None) -> tuple[Gpu, ...]:
    """The GPUs as nvidia-smi sees them; empty where there is none. devices None: all."""
    return parse_gpus(_nvidia_smi(devices, f"--query-gpu={','.join(_GPU_FIELDS)}"))


def gpu_memory(devices: Sequence[int] | None) -> dict[int, float]:
    """Bytes of GPU memory by process id. In a container the ids may be those of the host, or missing."""
    found: dict[int, float] = {}
    for line in _nvidia_smi(devices, "--query-compute-apps=pid,used_memory").splitlines():
        pid, _, mib = (part.strip() for part in line.partition(","))
        with contextlib.suppress(ValueError):
            found[int(pid)] = found.get(int(pid), 0.0) + float(mib) * 2**20
    return found


def _nvidia_smi(devices: Sequence[int] | None, query: str) -> str:
    if (tool := shutil.which("nvidia-smi")) is None:
        return ""
    only = [] if devices is None else ["-i", ",".join(map(str, devices))]
    return _run([tool, *only, query, "--format=csv,noheader,nounits"])


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """nvidia-smi's CSV, one GPU a line, in the order of `_GPU_FIELDS`; lines that do not fit are left out."""
    found = []
    for line in text.splitlines():
        f = [x.strip() for x in line.split(",")]
        if len(f) != len(_GPU_FIELDS):
            continue
        with contextlib.suppress(ValueError):
            watts = None if f[5].startswith("[") else float(f[5])
            throttle = int(f[7], 16) if f[7].startswith("0x") else 0
            found.append(Gpu(int(f[0]), f[1], float(f[2]), float(f[3]), float(f[4]), watts, float(f[6]), throttle, f[8], f[9]))
    return tuple(found)


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _parse_stat(text: str) -> tuple[float, float]:
    """(busy, steal) CPU seconds of /proc/stat's first line: user nice system idle iowait irq softirq steal ..."""
    fields = text.split("\n", 1)[0].split()[1:]
    if len(fields) < 8:
        return 0.0, 0.0
    t = [int(x) / _TICK for x in fields]
    return t[0] + t[1] + t[2] + t[5] + t[6], t[7]


def _parse_pressure(text: str) -> float | None:
    """Seconds of `some` CPU pressure; None where the kernel has no PSI."""
    for line in text.splitlines():
        if line.startswith("some") and "total=" in line:
            return int(line.rsplit("total=", 1)[1]) / 1e6
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
