"""How fast this device reads memory, and how many bytes a decoded token has to read: the bound of decode at batch 1.

    python -m benchmarks.bandwidth DEVICE        prints one JSON line

Run as a process of its own, so that no CUDA context stays with whoever asks. Not for: what a kernel reaches.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from optimizer.truth.weights import qwen3_header

HOW = "torch.sum over {gib:g} GiB of float32 to one number (read), and a copy of the same tensor (read and write): median of {n} timings"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def token_bytes(model: Path, dtype: str) -> int:
    """Bytes of weights that one decoded token reads at batch 1: all of them, but one row of an untied embedding."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    total = 0
    for name, entry in qwen3_header(config).items():
        if name == "model.embed_tokens.weight" and not config.get("tie_word_embeddings"):
            continue
        start, end = entry["data_offsets"]
        total += (end - start) // 2 * _BYTES[dtype]
    return total


def measure(device: str) -> dict[str, Any]:
    """`read_TBs`, `copy_TBs` and `how`, in this process."""
    import torch

    size = 4 << 30 if device == "cuda" else 64 << 20
    times = 20 if device == "cuda" else 5
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def median_s(work: Any) -> float:
        work()
        found = []
        for _ in range(times):
            found.append(_timed(work, device))
        return statistics.median(found)

    read, copy = median_s(lambda: source.sum()), median_s(lambda: target.copy_(source))
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    how = HOW.format(gib=size / 2**30, n=times)
    return {"device": name, "read_TBs": size / read / 1e12, "copy_TBs": 2 * size / copy / 1e12, "how": how}


def _timed(work: Any, device: str) -> float:
    import torch

    if device != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def elsewhere(device: str, env: dict[str, str], timeout_s: float = 60.0) -> dict[str, Any]:
    """`measure` in a process of its own; {"error": ...} when it fails."""
    command = [sys.executable, "-m", "benchmarks.bandwidth", device]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=Path(__file__).parents[1])
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {timeout_s:g} s"}
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip()[-400:]}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
