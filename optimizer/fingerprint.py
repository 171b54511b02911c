"""What the machine is, so that timings of two machines are never compared: stable facts and their hash.

The load and other things that change by the minute are reported beside the hash, never in it. Not for: judging
whether a machine is quiet enough (accept.calibrate does, by A/A).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from optimizer.ledger import canonical

_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "triton", "flash-attn")


def fingerprint(device: str, sandbox_level: str, gpu_devices: tuple[int, ...] = ()) -> dict[str, Any]:
    """Stable facts, their `hash` (16 hex digits), and under `now` load and memory as they are this moment."""
    stable: dict[str, Any] = {
        "os": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions(),
        "sandbox": sandbox_level,
        "device": device,
        "gpus": gpus(gpu_devices) if device == "cuda" else [],
    }
    return {
        **stable,
        "hash": hashlib.sha256(canonical(stable)).hexdigest()[:16],
        "now": {"load": list(os.getloadavg()), "memory_bytes": _memory(), "memory_free_bytes": _free_memory()},
    }


def versions() -> dict[str, str]:
    """Installed versions of what a timing depends on; absent packages are absent."""
    return {name: found for name in _PACKAGES if (found := version(name))}


def version(name: str) -> str:
    """Installed version of a distribution, empty where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpus(devices: tuple[int, ...] = ()) -> list[dict[str, str]]:
    """Name, driver and memory of the visible NVIDIA GPUs; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 3]
    keys = ("index", "name", "driver", "memory")
    return [dict(zip(keys, row, strict=True)) for row in rows if not devices or int(row[0]) in devices]


def _memory() -> int:
    """Of the machine; a virtual one may be given more while it runs, so this is no stable fact."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
