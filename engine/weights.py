"""Fills the model with weights: this rank's slices of a Hugging Face checkpoint, or seeded random ones.

Not for: the model's structure. How a parameter is cut stands in its module's `Shard`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from engine.config import ConfigError
from engine.model import Qwen3ForCausalLM, Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_safetensors(model: Qwen3ForCausalLM, model_dir: Path) -> None:
    """Copy this rank's slice of each tensor straight into its parameter (device and dtype are the parameter's).

    Raises ConfigError for a missing file or tensor and for a wrong shape, naming it.
    """
    files = _tensor_files(model_dir)
    wanted = dict(_parameters(model))
    missing = sorted(name for name in wanted if name not in files)
    if missing:
        raise ConfigError(f"{model_dir}: no tensor named {missing[0]} ({len(missing)} missing in all)")
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        device = str(wanted[names[0]][0].device)  # slices go straight there
        with safe_open(str(path), framework="pt", device=device) as handle:
            for name in names:
                parameter, shard = wanted[name]
                source = handle.get_slice(name)
                _check_shape(path, name, tuple(source.get_shape()), _full_shape(parameter, shard))
                _copy_slice(parameter, shard, source)


def load_dummy(model: Qwen3ForCausalLM, seed: int) -> None:
    """Random weights: norms 1, matrices N(0, 1/in), an untied head N(0, 16/in).

    So an untied head's logits have a standard deviation of 4, and the layers, whose outputs have unit scale,
    outweigh the embedding: else a tied head would repeat the token it was given. Each full tensor is drawn from (seed, its
    name) and then cut: the model is the same at every TP (on one kind of device).
    """
    for name, (parameter, shard) in _parameters(model):
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
            continue
        full = _full_shape(parameter, shard)
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # the CPU's takes 32 bits
        values = torch.randn(full, generator=generator, device=parameter.device)
        scale = 4.0 if name == "lm_head.weight" else 1.0
        values *= scale / full[1] ** 0.5
        _copy_slice(parameter, shard, values)


def _parameters(model: Qwen3ForCausalLM) -> Iterator[tuple[str, tuple[nn.Parameter, Shard | None]]]:
    """Each distinct parameter by checkpoint name, with the cut that its module declares."""
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        yield name, (parameter, getattr(module, "shard", None))


def _full_shape(parameter: nn.Parameter, shard: Shard | None) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if shard is not None:
        shape[shard.dim] = shard.full
    return tuple(shape)


def _copy_slice(parameter: nn.Parameter, shard: Shard | None, source: torch.Tensor) -> None:
    """`source` is a tensor or a safetensors slice: both are indexed before they are read."""
    if shard is None:
        parameter.data.copy_(source[:])
        return
    size = parameter.shape[shard.dim]
    first = shard.index * size
    last = min(first + size, shard.full)
    part = source[first:last] if shard.dim == 0 else source[:, first:last]
    target = parameter.data.narrow(shard.dim, 0, last - first)
    target.copy_(part)
    parameter.data.narrow(shard.dim, last - first, size - (last - first)).zero_()


def _check_shape(path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ConfigError(
            f"{path}: tensor {name} has shape {list(found)}; config.json implies {list(expected)}"
        )


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded checkpoint or the header of a single file."""
    index = model_dir / INDEX_FILE
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: model_dir / file for name, file in names.items()}
    elif (model_dir / SINGLE_FILE).exists():
        with safe_open(str(model_dir / SINGLE_FILE), framework="pt") as handle:
            files = dict.fromkeys(handle.keys(), model_dir / SINGLE_FILE)
    else:
        raise ConfigError(f"{model_dir}: neither {SINGLE_FILE} nor {INDEX_FILE}; or use --load-format dummy")
    for path in sorted(set(files.values())):
        if not path.exists():
            raise ConfigError(f"{path}: no such file, but {INDEX_FILE} names it")
    return files
