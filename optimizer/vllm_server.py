"""The command line of a vLLM server that does the same work as ours: same weights, same KV cache, token ids in and out.

Flags are those of vLLM 0.25 (`vllm/engine/arg_utils.py`, `vllm/config/{compilation,cache,scheduler,profiler}.py`,
`vllm/entrypoints/openai/cli_args.py`). Not for: starting it (`outside.py`), or choosing the best of its settings
(`benchmarks/gpu_headline.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.confine.launch import NO_MULTICAST
from optimizer.outside import Command

PROGRAM = ("{python}", "-m", "vllm.entrypoints.openai.api_server")
MAX_NUM_SEQS = 64  # graphs are captured for batches up to this and double of it: no cell here is larger
MEMORY_SHARE = 0.4  # what vLLM wants free at its start; the KV cache is sized by bytes, so that two engines fit one card
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Nothing is asked of a network, and no sampler is compiled at the first request.
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}

# On several ranks. Of the all-reduces that vLLM has, symmetric memory's (on by default) and FlashInfer's "mnnvl" multicast; its
# own over CUDA IPC, NCCL's and FlashInfer's "trtllm" (what "auto" takes on one host) do not.
UNICAST = NO_MULTICAST | {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration: what is said beyond the common flags."""

    name: str
    flags: tuple[str, ...] = ()
    compilation: dict[str, Any] = field(default_factory=dict)  # --compilation-config
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Common:
    """What is the same in every configuration."""

    model: Path
    dtype: str = "bfloat16"
    load_format: str = "safetensors"
    max_model_len: int = 8192
    kv_tokens: int = 65536
    tp: int = 1
    site: Path | None = None  # a folder with vLLM in it, for PYTHONPATH
    cache: Path | None = None  # compiled code is kept here, so that a second start is quick
    program: tuple[str, ...] = PROGRAM
    profile: bool = False  # /start_profile and /stop_profile write into {trace_dir}
    uds: bool = True  # False: a loopback port
    texts: bool = False  # it loads the model's tokenizer, for clients that send text

    def kv_bytes(self) -> int:
        """Bytes that a KV cache of `kv_tokens` tokens takes of each rank. Raises KeyError for a config.json without dimensions."""
        config = json.loads((self.model / "config.json").read_text("utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        heads = max(1, heads // self.tp)  # beyond their number they are replicated
        return 2 * config["num_hidden_layers"] * heads * size * BYTES[self.dtype] * self.kv_tokens


def installed(python: Path, site: Path | None = None) -> bool:
    """Whether an interpreter finds vLLM, in `site` too."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    env = os.environ | ({"PYTHONPATH": str(site)} if site is not None else {})
    try:
        return subprocess.run([str(python), "-c", look], env=env, cwd="/", capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def command(common: Common, setting: Setting) -> Command:
    """The command of one configuration; `{socket}` or `{port}`, `{model_dir}` and `{trace_dir}` are left to be filled."""
    argv = [*common.program, "--model", "{model_dir}", *(("--uds", "{socket}") if common.uds else ("--host", "127.0.0.1", "--port", "{port}"))]
    argv += ["--served-model-name", "model", *(() if common.texts else ("--skip-tokenizer-init",)), "--generation-config", "vllm", "--seed", "0"]
    argv += ["--load-format", common.load_format, "--dtype", common.dtype, "--kv-cache-dtype", "auto"]
    argv += ["--max-model-len", str(common.max_model_len), "--no-enable-prefix-caching"]
    argv += ["--kv-cache-memory-bytes", str(common.kv_bytes()), "--gpu-memory-utilization", str(MEMORY_SHARE)]
    argv += ["--max-num-seqs", str(MAX_NUM_SEQS), "--disable-uvicorn-access-log", *setting.flags]
    if common.tp > 1:
        argv += ["--tensor-parallel-size", str(common.tp)]
    if setting.compilation:
        argv += ["--compilation-config", json.dumps(setting.compilation, sort_keys=True)]
    if common.profile:
        options = {"profiler": "torch", "torch_profiler_dir": "{trace_dir}", "torch_profiler_with_stack": False,
                   "torch_profiler_record_shapes": True, "ignore_frontend": True}  # fmt: skip
        argv += ["--profiler-config", json.dumps(options)]
    return Command(f"vLLM, {setting.name}", tuple(argv), (*_environment(common).items(), *setting.env))


def _environment(common: Common) -> dict[str, str]:
    env = ENVIRONMENT | (UNICAST if common.tp > 1 else {})
    if common.site is not None:
        env["PYTHONPATH"] = str(common.site)
    if common.cache is not None:
        env |= {
            "VLLM_CACHE_ROOT": str(common.cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(common.cache / "inductor"),
            "TRITON_CACHE_DIR": str(common.cache / "triton"),
        }
    return env


@dataclass(frozen=True, slots=True)
class Stated:
    """What a vLLM server says of itself: in its log when it starts, and in /metrics. None: it does not say."""

    version: str | None
    dtype: str | None
    kv_dtype: str | None
    prefix_caching: bool | None
    prefix_hits: float | None  # tokens served from the prefix cache since the start
    preemptions: float | None
    kv_tokens: int | None
    attention_backend: str | None


_ENGINE_LINE = re.compile(r"Initializing a V1 LLM engine \(v([^)]+)\) with config: (.*)")
_BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend")
_CACHE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? ([-+.0-9eE]+|NaN)$", re.M)


def stated(log: str, metrics: str) -> Stated:
    """Read what it says out of its log and its Prometheus text."""
    line = _ENGINE_LINE.search(log)
    about = line[2] if line else ""
    cache = _labels(metrics, "vllm:cache_config_info")
    blocks, size, logged = cache.get("num_gpu_blocks", ""), cache.get("block_size", ""), _CACHE.search(log)
    tokens = int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else int(logged[1].replace(",", "")) if logged else None
    caching = cache.get("enable_prefix_caching") or _field(about, "enable_prefix_caching")
    backend = _BACKEND.search(log)
    dtype = _field(about, "dtype")
    return Stated(
        version=line[1] if line else None,
        dtype=dtype.removeprefix("torch.") if dtype else None,
        kv_dtype=cache.get("cache_dtype") or _field(about, "kv_cache_dtype"),
        prefix_caching=None if caching is None else caching == "True",
        prefix_hits=_total(metrics, "vllm:prefix_cache_hits_total"),
        preemptions=_total(metrics, "vllm:num_preemptions_total"),
        kv_tokens=tokens,
        attention_backend=backend[1] if backend else None,
    )


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"(?:^|[\s,]){name}=([^,\s]+)", text)
    return found[1] if found else None


def _labels(metrics: str, name: str) -> dict[str, str]:
    for found, labels, _ in _SAMPLE.findall(metrics):
        if found == name:
            return dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return {}


def _total(metrics: str, name: str) -> float | None:
    values = [float(value) for found, _, value in _SAMPLE.findall(metrics) if found == name]
    return sum(values) if values else None
