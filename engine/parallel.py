"""Everything that crosses ranks inside a step: the process group and its collectives.

All ranks live on one host. With one rank every operation is the identity and no process group exists.
Not for: how ranks are started, or how they learn what to compute (see `ranks.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from engine.config import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's view of the tensor-parallel group."""

    rank: int
    size: int
    device: torch.device
    backend: str  # what does the all-reduce; reported in /v1/models

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' `x` [..., n] along the last dimension -> [..., n * size]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite `x` on all ranks with rank 0's."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x

    def minimum(self, value: int) -> int:
        """The smallest `value` of any rank (start-up only)."""
        if self.size == 1:
            return value
        x = torch.tensor([value], device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return int(x.item())


def join(rank: int, size: int, device_kind: str, rendezvous: Path) -> TensorParallel:
    """Join the group of `size` ranks that meet at the file `rendezvous`; call once in each rank.

    A file, not a port: two engines on one host must not collide. Raises ConfigError without enough devices.
    """
    device = torch.device("cpu")
    if device_kind == "cuda":
        found = torch.cuda.device_count()
        if found < size:
            raise ConfigError(f"--device cuda with --tp {size} needs {size} GPUs; this process sees {found}")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if size == 1:
        return TensorParallel(0, 1, device, "none")
    backend = "gloo" if device.type == "cpu" else "nccl"
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve in a sandbox
    store = dist.FileStore(str(rendezvous), size)  # pyright: ignore[reportPrivateImportUsage]
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    return TensorParallel(rank, size, device, backend)


def leave() -> None:
    """Leave the group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
