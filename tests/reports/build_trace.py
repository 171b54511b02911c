"""Builds small GPU traces in Kineto's form: eager and graphed decode, with a host that runs ahead if asked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

LAYER = (("norm", "rms_norm_kernel", 4.0), ("qkv", "nvjet_tst_64x8_qkv", 30.0), ("attn", "flash_fwd_splitkv_kernel", 20.0),
         ("o", "nvjet_tst_64x8_o", 25.0), ("up", "nvjet_tst_192x8_gate_up", 60.0), ("act", "act_and_mul_kernel", 4.0),
         ("down", "nvjet_tst_128x8_down", 40.0))  # fmt: skip


def events(*, steps: int = 5, layers: int = 3, graph: bool = False, launch_us: float = 6.0, ahead: bool = False,
           autograd: bool = False) -> list[dict[str, Any]]:  # fmt: skip
    """One prefill and `steps` decode steps: annotations, launches, kernels, flow arrows."""
    out: list[dict[str, Any]] = []
    host, gpu, corr = 100.0, 100.0, 0

    def x(cat: str, name: str, ts: float, dur: float, pid: int, tid: int, **args: Any) -> dict[str, Any]:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": round(ts, 3), "dur": round(dur, 3)}
        event["args"] = args
        out.append(event)
        return event

    def kernel(name: str, dur: float, at: float, number: int) -> float:
        nonlocal gpu
        start = max(gpu + 1.0, at + 3.0)
        x("kernel", name, start, dur, 0, 7, stream=7, device=0, correlation=number)
        out.append({"ph": "s", "id": number, "pid": 1, "tid": 1, "ts": round(at, 3), "cat": "ac2g", "name": "ac2g"})
        out.append({"ph": "f", "id": number, "pid": 0, "tid": 7, "ts": round(start, 3), "cat": "ac2g", "name": "ac2g", "bp": "e"})
        gpu = start + dur
        return start

    for step in range(steps + 1):
        begin = host
        host += 5
        if graph and step:
            corr += 1
            x("cuda_runtime", "cudaGraphLaunch", host, 40.0, 1, 1, correlation=corr)
            for _ in range(layers):
                for _, name, dur in LAYER:
                    kernel(name, dur, host, corr)
            host += 45
        else:
            for _ in range(layers):
                for op, name, dur in LAYER:
                    corr += 1
                    x("cpu_op", f"aten::{'linear' if 'nvjet' in name else op}", host, launch_us + 6, 1, 1)
                    if autograd:
                        x("cpu_op", "aten::clone", host + 0.5, 1.0, 1, 1)
                    x("cuda_runtime", "cudaLaunchKernel", host + 2, launch_us, 1, 1, correlation=corr)
                    kernel(name, dur, host + 2, corr)
                    host += launch_us + 10
        corr += 1
        x("cpu_op", "aten::item", host, 20.0, 1, 1)
        x("cuda_runtime", "cudaMemcpyAsync", host + 1, 4.0, 1, 1, correlation=corr)
        start = max(gpu + 1, host + 4)
        x("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start, 1.5, 0, 7, stream=7, device=0, correlation=corr, bytes=8)
        gpu = start + 1.5
        corr += 1
        wait = 8.0 if ahead else max(gpu - host - 6, 2.0)
        x("cuda_runtime", "cudaStreamSynchronize", host + 6, wait, 1, 1, correlation=corr)
        host += 8 + wait + 10
        name = "execute_context_1(12)_generation_0(0)" if step == 0 else "execute_context_0(0)_generation_1(1)"
        x("user_annotation", name, begin, host - begin, 1, 1)
        host += 4
    return out


def write(path: Path, rows: list[dict[str, Any]], *, rank: int = 0, world: int = 1, **top: Any) -> Path:
    """Write a Kineto file (gzip if the name says so)."""
    data = {
        "schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": 1_790_000_000_000_000_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        **top, "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}, *rows],
    }  # fmt: skip
    text = json.dumps(data, indent=1).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, 5, mtime=0) if path.suffix == ".gz" else text)
    return path
