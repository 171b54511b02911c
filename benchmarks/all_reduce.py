"""Microseconds per all-reduce by size, over the ranks of one host: the library's, symmetric memory's, this project's, vLLM's.

    python -m benchmarks.all_reduce [--ranks 2] [--device cuda] [--kib 8,64,1024] [--calls 50] [--repeats 20] [--vllm-site SITE]

Prints one JSON line per size and way. On GPUs `--calls` of one kind are recorded in a CUDA graph and replayed right
after a barrier, so that nobody waits for a late host: what is left is launch inside the graph, barrier between ranks
and transfer. Each is compared with the library's sum first. "custom-all-reduce" is what the skill of that name writes;
vLLM's is timed as it calls it, out of place and with the buffers of the graph registered. On a CPU, call by call, there are
gloo and the skill's shared memory. Not for: what an engine gains (`gpu_ranks.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from optimizer.confine.launch import NO_MULTICAST
from optimizer.proposers import skillbook

REPO = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Way:
    """One all-reduce: `call` gives the sum, in x or in another tensor; `recording` is open while a graph is recorded."""

    call: Callable[[torch.Tensor], torch.Tensor]
    most_bytes: int | None = None  # what is larger takes the library's way
    recording: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def library(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def symmetric(device: torch.device, most: int, dtype: torch.dtype) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    """One-shot and two-shot, each with the copy into the shared buffer that a caller pays."""
    import torch.distributed._symmetric_memory as symm_mem

    shared = symm_mem.empty(most, dtype=dtype, device=device)
    symm_mem.rendezvous(shared, dist.group.WORLD)
    name = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def shot(operator: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: operator(shared[: x.numel()].copy_(x), "sum", name, x)

    return shot(torch.ops.symm_mem.one_shot_all_reduce_out), shot(torch.ops.symm_mem.two_shot_all_reduce_out)


def skill(device: str, folder: Path) -> Way:
    """What custom-all-reduce writes for this kind of device, from a file of its own."""
    caller = "engine/parallel.py"
    rewrites = skillbook.run(skillbook.load_all()["custom-all-reduce"], {caller: (REPO / caller).read_text("utf-8")}, {"device": device})
    if isinstance(rewrites, str):
        raise RuntimeError(f"custom-all-reduce declined: {rewrites}")
    name = f"rank{dist.get_rank()}_collectives"
    (text,) = (text for file, text in rewrites[-1].after.items() if file != caller)
    (folder / f"{name}.py").write_text(text, "utf-8")
    sys.path.insert(0, str(folder))
    made = importlib.import_module(name)

    def call(x: torch.Tensor) -> torch.Tensor:
        made.all_reduce(x)
        return x

    return Way(call, made.MAX_BYTES if device == "cuda" else made.SLOT_BYTES)


def vllm(site: Path, device: torch.device) -> Way:
    """vLLM's custom all-reduce. Raises RuntimeError where it says that it cannot be used."""
    sys.path.insert(0, str(site))
    from vllm.distributed.device_communicators.custom_all_reduce import (  # pyright: ignore[reportMissingImports]
        CustomAllreduce,
    )

    found = CustomAllreduce(dist.new_group(backend="gloo"), device)
    if found.disabled:
        raise RuntimeError("vLLM's custom all-reduce is disabled on this host; its log says why")
    return Way(found.custom_all_reduce, found.max_size - 1, found.capture)


def on_gpu(way: Way, x: torch.Tensor, calls: int, repeats: int) -> list[float]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            way.call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with way.recording(), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(calls):
            way.call(x)
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
            way.call(x)
        found.append((time.perf_counter() - began) * 1e6 / calls)
    return found


def wrong(way: Way, rank: int, numel: int, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference from the library's sum of fresh numbers, as a share of the largest sum."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
    mine, reference = x.clone(), x.float()
    dist.all_reduce(reference)
    return float((way.call(mine).float() - reference).abs().max() / reference.abs().max())


def rows(make: Callable[[], Way], rank: int, sizes: list[tuple[int, torch.Tensor]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One way at every size that it takes; or why it cannot be had, which all ranks find alike."""
    try:
        way = make()
        for kib, x in sizes:
            if way.most_bytes is not None and x.nbytes > way.most_bytes:
                continue
            found = {"kib": kib, "wrong": wrong(way, rank, x.numel(), x.device, x.dtype)}
            us = (on_gpu if x.is_cuda else on_cpu)(way, x, options.calls, options.repeats)
            yield found | {"us": round(statistics.median(us), 3), "us_range": [round(min(us), 3), round(max(us), 3)]}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ways are still to be timed
        yield {"why": f"{type(error).__name__}: {error}"[:2000]}


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    os.environ.update(NO_MULTICAST)
    gpu = options.device == "cuda"
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # as the ranks of an engine: they share the cores
    store = dist.FileStore(f"{folder}/meeting", options.ranks)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=options.ranks)
    sizes = [kib * 1024 // dtype.itemsize for kib in options.kib]
    makers: dict[str, Callable[[], Way]] = {"nccl" if gpu else "gloo": lambda: Way(library), "custom-all-reduce": lambda: skill(options.device, Path(folder))}
    if gpu:
        shots = functools.cache(lambda: symmetric(device, max(sizes), dtype))
        makers |= {"symmetric memory, one-shot": lambda: Way(shots()[0]), "symmetric memory, two-shot": lambda: Way(shots()[1])}
    if options.vllm_site is not None:
        makers["vLLM"] = lambda: vllm(options.vllm_site.resolve(), device)
    for name, make in makers.items():
        for row in rows(make, rank, [(kib, torch.zeros(n, device=device, dtype=dtype)) for kib, n in zip(options.kib, sizes, strict=True)], options):
            if rank == 0:
                print(json.dumps({"way": name, "ranks": options.ranks} | row), flush=True)
    dist.destroy_process_group()


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kib", type=numbers, default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--calls", type=int, default=50, help="in one graph")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM in it: its custom all-reduce is timed as well")
    options = parser.parse_args(argv)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (options, folder), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
