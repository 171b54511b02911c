"""Ranks as processes over shared inboxes, for kernels that exchange between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def gathered(rank: Callable[..., None], size: int, words: int, where: Path) -> dict[int, Any]:
    """rank(number, inboxes [size, 2 turns x size x words], where, queue) in a fresh process each -> what each put, by number."""
    inboxes = torch.zeros(size, 2 * size * words, dtype=torch.int64).share_memory_()
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank, args=(number, inboxes, where, results)) for number in range(size)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    return found
