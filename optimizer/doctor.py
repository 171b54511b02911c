"""`optimize doctor`: what this machine offers, what is missing, and how to install it.

Every row is found by trying. Not for: the sandbox's own self-tests (they live beside it), or changing anything.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optimizer import fingerprint
from optimizer.confine import sandbox
from optimizer.traffic import loadgen


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    ok: bool | None  # None: optional and absent
    found: str
    hint: str = ""


def rows(python: Path | None = None) -> Iterator[Row]:
    """One row per thing, in the order in which a run needs it."""
    yield Row("Python", sys.version_info[:2] >= (3, 11), sys.version.split()[0], "3.11 or 3.12")
    yield _command("git", "git --version", "apt-get install git")
    yield from _sandbox()
    yield from _torch(python or Path(sys.executable))
    yield from _gpus()
    yield _module("transformers", "the oracle and a reference", "uv pip install transformers")
    yield _module("accelerate", "the reference at TP > 1", "uv pip install accelerate", optional=True)
    yield _module("anthropic", "--agent claude", "uv pip install anthropic", optional=True)
    yield _module("vllm", "a reference engine", "an environment of its own: see the README", optional=True)
    yield _command("nsys", "nsys --version", "part of the CUDA toolkit", optional=True)
    yield _noise()
    yield _client()


def _sandbox() -> Iterator[Row]:
    level = sandbox.detect()
    hint = "apt-get install bubblewrap" if level.name != "bwrap" else ""
    yield Row("sandbox", level.name != "none", level.name, hint)
    for note in level.notes:
        yield Row("", None, note)
    probe = getattr(sandbox, "self_test", None)
    for what, ok, detail in probe() if probe is not None else ():
        yield Row(f"  {what}", ok, detail)


def _torch(python: Path) -> Iterator[Row]:
    code = (
        "import torch;print(torch.__version__, 'CUDA', torch.version.cuda, 'gloo', torch.distributed.is_gloo_available(),"
        "'nccl', torch.distributed.is_nccl_available(), 'kineto', torch.profiler.kineto_available())"
    )
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    words = (done.stderr.strip().splitlines() or ["no torch"])[-1]
    yield Row("torch of the target", done.returncode == 0, done.stdout.strip() or words, "pip install torch==2.13.0")
    for name, why in (("flash_attn", "attention"), ("vllm_flash_attn", "attention"), ("triton", "kernels")):
        probe = f"import importlib.util,sys;sys.exit(importlib.util.find_spec({name!r}) is None)"
        there = subprocess.run([str(python), "-I", "-c", probe], capture_output=True, check=False).returncode == 0
        yield Row(f"  {name}", True if there else None, f"{'there' if there else 'absent'} ({why})")


def _gpus() -> Iterator[Row]:
    found = fingerprint.gpus()
    if not found:
        yield Row("NVIDIA GPUs", None, "none visible: everything runs on the CPU")
    for gpu in found:
        yield Row(f"GPU {gpu['index']}", True, f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}")


def _client() -> Row:
    """The load generator's own cost, against a server that computes nothing."""
    found = loadgen.self_test()
    text = f"{found.cpu_us_per_token:.0f} us of CPU per token at {found.streams} streams paced at {found.pace_ms:g} ms"
    return Row("client", found.ok, text, f"over {loadgen.CPU_US_GOAL:g} us the client itself slows a small machine")


def _noise() -> Row:
    facts = fingerprint.fingerprint("cpu", sandbox.detect().name)
    load, cores = facts["now"]["load"][0], facts["cores"]
    quiet = load < 0.5 * cores
    return Row("noise", quiet or None, f"load {load:.1f} on {cores} cores", "other work on this machine widens every interval")


def _command(name: str, probe: str, hint: str, optional: bool = False) -> Row:
    if shutil.which(name) is None:
        return Row(name, None if optional else False, "absent", hint)
    done = subprocess.run(probe.split(), capture_output=True, text=True, timeout=30, check=False)
    return Row(name, done.returncode == 0, (done.stdout.strip().splitlines() or ["there"])[0])


def _module(name: str, why: str, hint: str, optional: bool = False) -> Row:
    there = importlib.util.find_spec(name) is not None
    version = fingerprint.version(name) if there else ""
    return Row(name, True if there else None if optional else False, f"{version or 'there' if there else 'absent'} ({why})", hint)
