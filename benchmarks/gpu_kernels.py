"""How near the memory bandwidth products of few rows come on this GPU, by kernel and by launch: for choosing the skills' sizes.

    python -m benchmarks.gpu_kernels OUT [--rows 1,8,32] [--seconds 150]

The five products of a Qwen3-8B decode step (bf16, random). Each figure is microseconds a product and TB/s of weight
read, from CUDA-graph replays over enough copies of the weight that none of it stays in the L2 cache; medians of 20.
Not for: claims about an engine (benchmarks/gpu_headline.py), or for choosing anything at run time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu_engine import emit

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288), "head": (151936, 4096)}
COPIES_BYTES = 400 << 20  # of weights that take turns: six times the L2 cache
ONE_ROW = [(r, s, w) for r, s, w in itertools.product((1, 2, 4), (512, 1024, 2048, 4096), (4, 8)) if r * s <= 8192]
FEW_ROWS = [(n, k, s, w) for n, k, s, w in itertools.product((16, 32, 64), (128, 256, 512), (3, 4, 6), (4, 8)) if n * k * s * 2 <= 140_000]


@triton.jit
def one_row(x, weight, out, outputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    n, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    inside, at = (n < outputs)[:, None], weight + n[:, None] * K + k[None, :]
    part = tl.load(at, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.load(x + k).to(tl.float32)[None, :] * part.to(tl.float32)
    for start in range(STEP, K, STEP):
        value = tl.load(x + start + k).to(tl.float32)
        acc += value[None, :] * tl.load(at + start, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < outputs)


@triton.jit
def few_rows(x, weight, out, rows, outputs, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    n, m, k = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.arange(0, M), tl.arange(0, STEP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside, real = (n < outputs)[None, :], (m < rows)[:, None]
    acc = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        value = tl.load(x + m[:, None] * K + start + k[None, :], mask=real, other=0.0)
        part = tl.load(weight + n[None, :] * K + start + k[:, None], mask=inside, other=0.0)
        acc = tl.dot(value, part, acc)
    tl.store(out + m[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=real & inside)


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: tuple[int, ...], pdl: bool) -> None:
    outputs, inputs = weight.shape
    if x.shape[0] == 1:
        r, step, warps = config
        one_row[(triton.cdiv(outputs, r),)](x, weight, out, outputs, K=inputs, ROWS=r, STEP=step, PDL=pdl, launch_pdl=pdl, num_warps=warps)
    else:
        n, step, stages, warps = config
        few_rows[(triton.cdiv(outputs, n),)](
            x, weight, out, x.shape[0], outputs, K=inputs, M=max(16, x.shape[0]), N=n, STEP=step, STAGES=stages, PDL=pdl, launch_pdl=pdl, num_warps=warps
        )  # fmt: skip


def configs(rows: int, inputs: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = list(ONE_ROW) if rows == 1 else list(FEW_ROWS)
    return [c for c in found if inputs % c[1] == 0]


def compile_some(jobs: list[tuple[int, str, tuple[int, ...]]]) -> None:
    """Run each kernel once: its binary goes to the cache on disk that all processes share."""
    for rows, name, config in jobs:
        outputs, inputs = SHAPES[name]
        x, weight = torch.zeros(rows, inputs, dtype=torch.bfloat16, device="cuda"), torch.zeros(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        try:
            launch(x, weight, x.new_empty(rows, outputs), config, True)
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            print(name, rows, config, type(error).__name__)


def timed(run: Any, weights: list[torch.Tensor]) -> float:
    """Microseconds of one product: a graph over all copies, median of 20 replays."""
    for weight in weights[:2]:
        run(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    spans = []
    for _ in range(22):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        spans.append(a.elapsed_time(b))
    return statistics.median(spans[2:]) * 1e3 / len(weights)


def product(rows: int, name: str, deadline: float) -> list[dict[str, Any]]:
    """All configurations of one product, the library's first; those whose answer is wrong say so."""
    outputs, inputs = SHAPES[name]
    copies = max(2, COPIES_BYTES // (outputs * inputs * 2))
    weights = [torch.randn(outputs, inputs, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    out, wanted = x.new_empty(rows, outputs), torch.nn.functional.linear(x, weights[0]).float()
    found = [{"config": "library", "us": timed(lambda w: torch.nn.functional.linear(x, w), weights)}]
    for config, pdl in itertools.product(configs(rows, inputs), (True, False) if rows == 1 else (True,)):
        if time.monotonic() > deadline:
            break
        try:
            launch(x, weights[0], out, config, pdl)
            wrong = (out.float() - wanted).abs().max().item() / wanted.abs().max().item()
            found.append({"config": [*config, pdl], "us": timed(lambda w, c=config, p=pdl: launch(x, w, out, c, p), weights), "wrong": wrong})
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            found.append({"config": [*config, pdl], "error": type(error).__name__})
    for row in found:
        if "us" in row:
            row["TB/s"] = outputs * inputs * 2 / row["us"] / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    options = parser.parse_args()
    began = time.monotonic()
    rows = [int(r) for r in options.rows.split(",")]
    jobs = [(r, n, c) for r in rows for n in SHAPES for c in configs(r, SHAPES[n][1])]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        pool.map(compile_some, [jobs[i :: options.processes] for i in range(options.processes)])
    emit({"compiled": len(jobs), "s": round(time.monotonic() - began, 1)})
    table = {}
    cases = [(r, n) for r in rows for n in SHAPES]
    for at, (r, name) in enumerate(cases):
        left = options.seconds - (time.monotonic() - began)
        table[f"{name} {r}"] = found = product(r, name, time.monotonic() + left / (len(cases) - at))
        best = sorted((row for row in found if "us" in row and row.get("wrong", 0) < 0.02), key=lambda row: row["us"])
        emit({"product": name, "rows": r, "library": found[0], "tried": len(found), "best": best[:4]})
    (options.out / "kernels.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main()
