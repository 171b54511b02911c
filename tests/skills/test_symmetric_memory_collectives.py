"""The module that custom-all-reduce adds on GPUs: a small patch, and a kernel that gives every rank the same exact sums.

The kernel runs in Triton's interpreter, ranks as processes over shared memory, where Triton is installed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from spawned_ranks import gathered

from optimizer.gates import policy
from optimizer.patching import changed_lines
from optimizer.proposers import skillbook
from optimizer.proposers.base import MAX_FILES, MAX_LINES

SIZES = (4096, 1024, 6, 4096)  # numbers of one call after another: other programs take part in each
CALLS = 6


def test_the_patch_is_small_and_passes_the_source_check(engine_sources, skills) -> None:
    rewrites = skillbook.run(skills["custom-all-reduce"], engine_sources, {"bound_us": 100.0, "device": "cuda"})
    assert not isinstance(rewrites, str), rewrites
    changed = {f: t for f, t in rewrites[-1].after.items() if engine_sources.get(f) != t}
    assert sorted(changed) == ["engine/parallel.py", "engine/symm_collectives.py", "engine/worker.py"]
    assert len(changed) <= MAX_FILES and changed_lines(engine_sources, changed) <= MAX_LINES
    assert policy.new_findings({f: engine_sources[f] for f in changed if f in engine_sources}, changed) == []
    kernel = rewrites[-1].activation["appear"][0]["row"].strip("*")
    assert f"def {kernel}(" in changed["engine/symm_collectives.py"]


@pytest.fixture
def file(engine_sources: dict[str, str], act: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The generated module on disk, with inboxes of 8 KiB; not read yet."""
    monkeypatch.delitem(sys.modules, "symm_collectives", raising=False)
    path = tmp_path / "symm_collectives.py"
    path.write_text(act(engine_sources, "custom-all-reduce", device="cuda", params={"slot_kib": 16})["engine/symm_collectives.py"])
    return path


def _load(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    return importlib.import_module(file.stem)


def test_reading_the_module_asks_nothing_of_cuda(file, monkeypatch) -> None:
    """Ranks are forked from a process that has read it: one that has begun CUDA cannot have such children."""

    def begun(*_: Any) -> None:
        raise AssertionError("CUDA was begun")

    for name in ("is_available", "device_count", "get_device_capability", "current_device", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, begun)
    assert callable(_load(file).all_reduce)


def _numbers(rank: int, call: int) -> torch.Tensor:
    return torch.randn(SIZES[call % len(SIZES)], generator=torch.Generator().manual_seed(100 * call + rank)).bfloat16()


def _rank(rank: int, inboxes: torch.Tensor, file: Path, results: Any) -> None:
    module, size = _load(file), len(inboxes)
    words_most = module.MAX_BYTES // 4
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64)
    turns = torch.zeros(words_most // module.WORDS, dtype=torch.int32)
    found = []
    for call in range(CALLS):
        numbers = _numbers(rank, call)
        words = numbers.view(torch.int32)
        module.one_shot_all_reduce[(-(-words.numel() // module.WORDS),)](
            words, inboxes[rank], addresses, turns, words.numel(), RANK=rank, RANKS=size, MOST=words_most, WORDS=module.WORDS, AHEAD=False, num_warps=4
        )
        found.append(numbers.float().numpy())
    results.put((rank, found))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("interpreted")
def test_every_rank_gets_the_sum_in_rank_order(size, file) -> None:
    found = gathered(_rank, size, _load(file).MAX_BYTES // 4, file)
    for call in range(CALLS):
        total = torch.zeros(SIZES[call % len(SIZES)])
        for rank in range(size):
            total += _numbers(rank, call).float()
        cut = (total.view(torch.int32) & -65536).view(torch.float32).numpy()  # a GPU rounds here, the interpreter cuts
        for rank in range(size):
            assert (found[rank][call] == cut).all(), (rank, call)
