"""Microseconds per all-reduce by size, over the ranks of one host: the library's, and PyTorch's symmetric memory.

    python -m benchmarks.all_reduce [--ranks 2] [--device cuda] [--kib 8,64,1024] [--calls 50] [--repeats 20]

Prints one JSON line per size and way. On GPUs `--calls` of one kind are recorded in a CUDA graph and replayed right
after a barrier, so that nobody waits for a late host: what is left is launch inside the graph, barrier between ranks
and transfer. Each is compared with the library's sum first. On a CPU there is gloo alone, call by call: it shows that the
script runs, no more. Not for: what an engine gains (`gpu_ranks.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from optimizer.confine.launch import NO_MULTICAST

Way = Callable[[torch.Tensor], None]


def library(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def symmetric(device: torch.device, most: int, dtype: torch.dtype) -> dict[str, Way]:
    """One-shot and two-shot, each with the copies into and out of the shared buffer that a caller pays."""
    import torch.distributed._symmetric_memory as symm_mem

    shared = symm_mem.empty(most, dtype=dtype, device=device)
    symm_mem.rendezvous(shared, dist.group.WORLD)
    name = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def one_shot(x: torch.Tensor) -> None:
        mine = shared[: x.numel()]
        mine.copy_(x)
        x.copy_(torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", name))

    def two_shot(x: torch.Tensor) -> None:
        mine = shared[: x.numel()]
        mine.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(mine, "sum", name)
        x.copy_(mine)

    return {"symmetric memory, one-shot": one_shot, "symmetric memory, two-shot": two_shot}


def on_gpu(way: Way, x: torch.Tensor, calls: int, repeats: int) -> list[float]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            way(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(calls):
            way(x)
    found = []
    for _ in range(repeats):
        x.zero_()
        dist.barrier()
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) * 1e3 / calls)
    return found


def on_cpu(way: Way, x: torch.Tensor, calls: int, repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        x.zero_()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            way(x)
        found.append((time.perf_counter() - began) * 1e6 / calls)
    return found


def wrong(way: Way, rank: int, numel: int, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference from the library's sum of fresh numbers, as a share of the largest sum."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
    mine, reference = x.clone(), x.float()
    dist.all_reduce(reference)
    way(mine)
    return float((mine.float() - reference).abs().max() / reference.abs().max())


def rank_main(rank: int, options: argparse.Namespace, meeting: str) -> None:
    os.environ.update(NO_MULTICAST)
    gpu = options.device == "cuda"
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    if gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(meeting, options.ranks)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=options.ranks)
    sizes = [kib * 1024 // dtype.itemsize for kib in options.kib]
    ways: dict[str, Way] = {"nccl" if gpu else "gloo": library}
    if gpu:
        ways |= symmetric(device, max(sizes), dtype)
    for kib, numel in zip(options.kib, sizes, strict=True):
        for name, way in ways.items():
            row: dict[str, Any] = {"kib": kib, "way": name, "ranks": options.ranks}
            row["wrong"] = wrong(way, rank, numel, device, dtype)
            x = torch.zeros(numel, device=device, dtype=dtype)
            us = (on_gpu if gpu else on_cpu)(way, x, options.calls, options.repeats)
            row |= {"us": round(statistics.median(us), 3), "us_range": [round(min(us), 3), round(max(us), 3)]}
            if rank == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kib", type=lambda text: [int(n) for n in text.split(",")], default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--calls", type=int, default=50, help="in one graph")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(argv)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (options, f"{folder}/meeting"), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
