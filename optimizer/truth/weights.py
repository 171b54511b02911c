"""A model's weight files: digests, secret random weights of the same architecture, and one changed layer.

Not for: loading a model. Tensors are written from names, shapes and dtypes that the safetensors headers (or, where
there are no weights, the config of a Qwen3) give.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGE_BYTES = 1 << 30  # above this random weights are written as one file a layer: all cores write, one layer can change
_CHUNK = 8 << 20
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Gains over 1/sqrt(fan_in), chosen by planting faults (tests/optimizer/test_gates_sensitivity.py): attention must
# weigh as much as the MLP and be sharp, or a wrong softmax in one of 36 layers moves no token. With equal gains and tied
# embeddings a random model only repeats its input.
_ATTENTION_GAIN, _MLP_GAIN, _GAIN = 12.0, 1.0, 1.0
_QK_NORM_MEAN, _LOGIT_STD = 1.8, 4.0


def digest(model_dir: Path) -> str:
    """sha256 over names and contents of every file of a model directory."""
    total = hashlib.sha256()
    paths = _files(model_dir)
    for path, sha in zip(paths, _on_all_cores(file_sha256, paths), strict=True):
        total.update(f"{path.name}\0{sha}\n".encode())
    return total.hexdigest()


def _on_all_cores(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Threads: hashing, drawing, rounding and writing all run outside the interpreter's lock."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(work, items))


def file_sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_CHUNK):
            sha.update(block)
    return sha.hexdigest()


def fingerprint(model_dir: Path) -> tuple[tuple[str, int, int, int], ...]:
    """(name, bytes, mtime in ns, inode) of every file: a cheap check that nothing was touched."""
    return tuple((p.name, (s := p.stat()).st_size, s.st_mtime_ns, s.st_ino) for p in _files(model_dir))


def _files(model_dir: Path) -> list[Path]:
    return sorted(path for path in Path(model_dir).iterdir() if path.is_file())


def layers(model_dir: Path) -> int:
    return int(json.loads((Path(model_dir) / "config.json").read_text())["num_hidden_layers"])


def write_random(model_dir: Path, out: Path, seed: int) -> Path:
    """A model of the same architecture with weights drawn from `seed`, in `out` (kept when already whole)."""
    return _rewrite(Path(model_dir), Path(out), seed, f"random {seed}", lambda name: True)


def write_perturbed(model_dir: Path, out: Path, layer: int, seed: int) -> Path:
    """The model with the projections of one layer redrawn from `seed`; other files are hard links where possible."""

    def changed(name: str) -> bool:
        found = _LAYER.search(name)
        return found is not None and int(found[1]) == layer and "norm" not in name

    return _rewrite(Path(model_dir), Path(out), seed, f"perturbed {layer} {seed}", changed)


def _rewrite(model_dir: Path, out: Path, seed: int, label: str, changed: Any) -> Path:
    stamp = out.with_name(
        out.name + ".stamp"
    )  # beside, not inside: an engine must not see which weights it has
    wanted = f"{label} {fingerprint(model_dir)}"
    if stamp.is_file() and stamp.read_text() == wanted and out.is_dir():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stored = sorted(model_dir.glob("*.safetensors"))
    for path in _files(model_dir):
        if path.suffix != ".safetensors":
            shutil.copy2(path, out / path.name)
    ends = eos_ids(model_dir)

    def one(path: Path) -> None:
        header = read_header(path)
        if any(changed(name) for name in header):
            _write_file(path, out / path.name, header, seed, changed, ends)
            shutil.copystat(path, out / path.name)
        else:
            _link(path, out / path.name)

    _on_all_cores(one, stored)
    if not stored:
        config = json.loads((model_dir / "config.json").read_text())
        _write_new(qwen3_header(config), out, seed, ends)
    stamp.write_text(wanted)
    return out


def _write_new(header: dict[str, dict[str, Any]], out: Path, seed: int, ends: frozenset[int]) -> None:
    """All tensors drawn: in one file, or for a large model in one for each layer and one for each of the rest."""
    total = max(entry["data_offsets"][1] for entry in header.values())
    groups: dict[str, list[str]] = {}
    for name in header:
        found = _LAYER.search(name)
        groups.setdefault(found[0] if found else name, []).append(name)
    if total <= LARGE_BYTES:
        groups = {"all": list(header)}
    files = {key: f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n, key in enumerate(groups, 1)}
    files = {"all": SINGLE} if len(groups) == 1 else files

    def one(key: str) -> None:
        part, offset = {}, 0
        for name in groups[key]:
            start, end = header[name]["data_offsets"]
            part[name] = header[name] | {"data_offsets": [offset, offset + end - start]}
            offset += end - start
        _write_file(None, out / files[key], part, seed, lambda name: True, ends)

    size = {key: sum(header[n]["data_offsets"][1] - header[n]["data_offsets"][0] for n in names) for key, names in groups.items()}
    _on_all_cores(one, sorted(groups, key=lambda key: -size[key]))  # the largest first
    if len(groups) > 1:
        where = {name: files[key] for key, names in groups.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / INDEX).write_text(json.dumps(index, indent=1))


def eos_ids(model_dir: Path) -> frozenset[int]:
    """End-of-text ids of a model: those of config.json and generation_config.json."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(model_dir) / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return frozenset(found)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """name -> {"dtype", "shape", "data_offsets"} of a safetensors file."""
    with path.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
    header.pop("__metadata__", None)
    return header


def qwen3_header(config: dict[str, Any], dtype: str = "BF16") -> dict[str, dict[str, Any]]:
    """The tensors of a Qwen3 checkpoint, from its config, as a safetensors header."""
    hidden, inner, layers_ = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    for i in range(layers_):
        at = f"model.layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": [heads * head, hidden],
            at + "self_attn.k_proj.weight": [kv_heads * head, hidden],
            at + "self_attn.v_proj.weight": [kv_heads * head, hidden],
            at + "self_attn.o_proj.weight": [hidden, heads * head],
            at + "self_attn.q_norm.weight": [head],
            at + "self_attn.k_norm.weight": [head],
            at + "mlp.gate_proj.weight": [inner, hidden],
            at + "mlp.up_proj.weight": [inner, hidden],
            at + "mlp.down_proj.weight": [hidden, inner],
            at + "input_layernorm.weight": [hidden],
            at + "post_attention_layernorm.weight": [hidden],
        }
    shapes["model.norm.weight"] = [hidden]
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = [config["vocab_size"], hidden]
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return header


def _write_file(
    source: Path | None,
    target: Path,
    header: dict[str, dict[str, Any]],
    seed: int,
    changed: Any,
    ends: frozenset[int],
) -> None:
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    text = json.dumps({"__metadata__": {"format": "pt"}} | dict(ordered)).encode()
    text += b" " * (-len(text) % 8)
    base = 0
    if source is not None:
        with source.open("rb") as handle:
            base = 8 + int.from_bytes(handle.read(8), "little")
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, entry in ordered:
            if changed(name):
                for block in _draw(name, entry, seed, ends):
                    out.write(block)
            else:
                assert source is not None
                start, end = entry["data_offsets"]
                with source.open("rb") as handle:
                    handle.seek(base + start)
                    out.write(handle.read(end - start))


def _draw(name: str, entry: dict[str, Any], seed: int, ends: frozenset[int]) -> Iterator[bytes]:
    """The bytes of one tensor: a function of its name, its shape, the seed and the end-of-text ids alone."""
    shape, dtype = entry["shape"], entry["dtype"]
    if dtype not in _SIZES:
        raise ValueError(f"{name}: no random weights in dtype {dtype}; known: {', '.join(_SIZES)}")
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    rng = np.random.Generator(np.random.Philox(int.from_bytes(key, "big")))
    mean, std = _moments(name, shape)
    width = shape[-1]
    rows = math.prod(shape) // width
    step = max(1, (1 << 20) // width)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        values = mean + std * rng.standard_normal((count, width), dtype=np.float32)
        if "embed_tokens" in name or "lm_head" in name:
            for token in ends:
                if first <= token < first + count:
                    values[token - first] *= _eos_gain(rows)
        yield _encode(values.astype(np.float32).reshape(-1), dtype)


def _eos_gain(vocabulary: int) -> float:
    """Makes end-of-text the likeliest token about once in ten: its logit must beat the best of all the others."""
    return math.sqrt(2 * math.log(vocabulary)) / 1.4


def _moments(name: str, shape: list[int]) -> tuple[float, float]:
    if len(shape) == 1:  # norms: each its own, so that a skipped or swapped one shows
        if name.endswith("bias"):
            return 0.0, 0.1
        return (_QK_NORM_MEAN if "q_norm" in name or "k_norm" in name else 1.0), 0.2
    if "embed" in name or "lm_head" in name:
        return 0.0, _LOGIT_STD / math.sqrt(shape[-1])
    gain = _ATTENTION_GAIN if "o_proj" in name else _MLP_GAIN if "down_proj" in name else _GAIN
    return 0.0, gain / math.sqrt(shape[-1])


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":  # round to nearest even: add half of the last kept bit, plus one when that is odd
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype]).tobytes()
