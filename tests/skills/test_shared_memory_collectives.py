"""The module that custom-all-reduce adds: the same sums as gloo, the same bits everywhere, whatever the timing."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

SHAPES = [(1, 64), (7,), (3, 5, 2), (1, 1024)]


@pytest.fixture(scope="module")
def module_file(engine_sources: dict[str, str], act: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated module on disk, with slots of 16 KiB so that large tensors fall back."""
    file = tmp_path_factory.mktemp("shm") / "shm_collectives.py"
    file.write_text(act(engine_sources, "custom-all-reduce", params={"slot_kib": 16})["engine/shm_collectives.py"])
    return file


def _load(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    return importlib.import_module(file.stem)


def _rank(rank: int, size: int, store: str, file: Path, work: Any, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        results.put((rank, work(_load(file), rank, size), None))
    except BaseException as error:
        results.put((rank, None, repr(error)))
        raise
    dist.barrier()
    dist.destroy_process_group()


def _run(work: Any, size: int, file: Path, tmp_path: Path) -> list[Any]:
    """What `work(module, rank, size)` returns on each of `size` forked ranks."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(r, size, str(tmp_path / "store"), file, work, results)) for r in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        found = {}
        for _ in ranks:
            rank, value, error = results.get(timeout=100)
            assert error is None, f"rank {rank}: {error}"
            found[rank] = value
        return [found[r] for r in range(size)]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def _compare_with_gloo(shm: ModuleType, rank: int, size: int) -> list[bytes]:
    torch.manual_seed(rank)
    late = random.Random(rank)
    bits = []
    for turn in range(60):
        x = torch.randn(SHAPES[turn % len(SHAPES)])
        y = x.clone()
        if late.random() < 0.1:  # ranks arrive at different times
            time.sleep(late.random() * 0.003)
        shm.all_reduce(x)
        bits.append(x.numpy().tobytes())
        if turn % 6 == 0:
            dist.all_reduce(y)
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
            told = torch.arange(4) * (1 if rank == size - 1 else 0)
            shm.broadcast(told, src=size - 1)
            assert told.tolist() == [0, 1, 2, 3]
            parts = [torch.empty(2, 3) for _ in range(size)]
            shm.all_gather(parts, torch.full((2, 3), float(rank)))
            assert [p.unique().tolist() for p in parts] == [[float(r)] for r in range(size)]
    return bits


@pytest.mark.parametrize("size", [2, 4])
def test_sums_equal_gloos_and_are_the_same_bits_on_every_rank(size: int, module_file: Path, tmp_path: Path) -> None:
    bits = _run(_compare_with_gloo, size, module_file, tmp_path)
    assert all(b == bits[0] for b in bits) and len(set(bits[0])) == 60


def _no_overwriting(shm: ModuleType, rank: int, size: int) -> int:
    """One slow rank, one that runs ahead as far as it may: a slot reused too early would change the sum."""
    for turn in range(40):
        x = torch.full((1024,), float(turn + rank))
        if rank == size - 1:
            time.sleep(0.001)
        shm.all_reduce(x)
        want = float(sum(turn + r for r in range(size)))
        assert x.eq(want).all(), (turn, x.unique().tolist(), want)
        shm.broadcast(torch.tensor([turn if rank == 0 else -1]), src=0)
    return 1


def test_a_fast_rank_cannot_overwrite_what_a_slow_one_still_reads(module_file: Path, tmp_path: Path) -> None:
    assert _run(_no_overwriting, 3, module_file, tmp_path) == [1, 1, 1]


def _fallbacks(shm: ModuleType, rank: int, size: int) -> list[float]:
    large = torch.ones(5000) * (rank + 1)  # 20 kB: over the slot
    shm.all_reduce(large)
    least = torch.tensor([float(rank)])
    shm.all_reduce(least, op=dist.ReduceOp.MIN)
    handle = shm.all_reduce(once := torch.ones(3), async_op=True)
    handle.wait()
    odd = torch.ones(4, 6)[:, ::2]
    shm.all_reduce(odd)
    graph = torch.ones(3, requires_grad=True) * 2
    shm.all_reduce(graph)
    half = torch.full((5,), 0.5, dtype=torch.bfloat16)
    shm.all_reduce(half)
    return [large[0].item(), least.item(), once[0].item(), odd.sum().item(), graph[0].item(), half[0].item()]


def test_what_does_not_fit_takes_the_library_and_odd_tensors_work(module_file: Path, tmp_path: Path) -> None:
    assert _run(_fallbacks, 2, module_file, tmp_path) == [[3.0, 0.0, 2.0, 24.0, 4.0, 1.0]] * 2


def test_nothing_is_left_in_dev_shm(module_file: Path, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("ranks-*"))
    _run(_fallbacks, 2, module_file, tmp_path)
    assert set(Path("/dev/shm").glob("ranks-*")) <= before


