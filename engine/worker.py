"""One rank: builds its part of the model, then does what rank 0 says.

Rank 0 runs the same `Worker` inside its step loop. Not for: scheduling and HTTP, which rank 0 alone has.
"""

from __future__ import annotations

import gc
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from engine import config, kv_cache, parallel, weights
from engine.attention import choose_backend
from engine.config import ConfigError, EngineConfig, Limits, ModelConfig
from engine.model import Qwen3ForCausalLM
from engine.parallel import TensorParallel
from engine.profiling import ProfileOptions, Profiler
from engine.request import ContextItem, Sequence, StepPlan
from engine.runner import ModelRunner, StepResult

CPU_CACHE_BYTES = 256 << 20  # default size of the page pool on a CPU, all ranks together
_HASHED_IN_FULL = 256 << 20


@dataclass(frozen=True, slots=True)
class StartProfile:
    options: ProfileOptions


@dataclass(frozen=True, slots=True)
class StopProfile:
    pass


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


class Worker:
    """Model, cache and profiler of one rank."""

    def __init__(self, options: EngineConfig, rank: int, rendezvous: Path) -> None:
        self.tp = parallel.join(rank, options.tp, options.device, rendezvous)
        self.model_config = ModelConfig.from_dir(options.model)
        self.limits = config.limits(options, self.model_config)
        dtype = getattr(torch, config.compute_dtype(options, self.model_config))
        backend, self.block_size, refused = choose_backend(
            options.attention_backend, options.device, options.block_size
        )
        model = build_model(self.model_config, self.tp, backend, dtype, self.limits)
        if options.load_format == "dummy":
            weights.load_dummy(model, options.seed)
        else:
            weights.load_safetensors(model, options.model)
        self.num_blocks = self._choose_num_blocks(options, model, backend.copies_pages, dtype)
        caches = kv_cache.allocate_caches(
            self.model_config, self.tp, self.num_blocks, self.block_size, dtype
        )
        self.runner = ModelRunner(model, self.tp, caches, self.block_size)
        self.metadata = self._describe(options, backend.name, refused, str(dtype).removeprefix("torch."))
        self.profiler = Profiler(options.trace_dir, rank, options.tp, self.metadata)
        gc.collect()
        gc.freeze()  # what is there now stays: a full pass over it would hold up some token for tens of milliseconds

    def step(self, plan: StepPlan, sequences: list[Sequence]) -> StepResult:
        """Run one step, marked in traces by vLLM's name for it."""
        with record_function(plan.name):
            result = self.runner.step(plan, sequences)
        self.profiler.step_done()
        return result

    def _choose_num_blocks(
        self, options: EngineConfig, model: Qwen3ForCausalLM, copies_pages: bool, dtype: torch.dtype
    ) -> int:
        """Pages that every rank can hold; `--num-kv-blocks` decides where given."""
        size = kv_cache.block_bytes(self.model_config, self.tp.size, self.block_size, dtype)
        most = self.limits.max_num_seqs * -(-self.limits.max_model_len // self.block_size)
        if options.num_kv_blocks is not None:
            return options.num_kv_blocks
        if self.tp.device.type == "cpu":
            return max(1, min(most, CPU_CACHE_BYTES // self.tp.size // size))
        free = _free_cuda_bytes(options.gpu_memory_utilization, lambda: self._largest_prefill(model, dtype))
        if copies_pages:
            free -= most * size  # every sequence padded to the longest: the most that a step can copy
        if free < size:
            raise ConfigError(
                f"--gpu-memory-utilization {options.gpu_memory_utilization} leaves {free} bytes for the KV "
                f"cache; one block needs {size}. Lower --max-model-len, --max-num-batched-tokens or "
                "--max-num-seqs, or raise the fraction"
            )
        return self.tp.minimum(min(most, free // size))

    def _largest_prefill(self, model: Qwen3ForCausalLM, dtype: torch.dtype) -> None:
        """Run the largest step that can occur, so that the memory it needs is known."""
        tokens, longest = self.limits.max_num_batched_tokens, self.limits.max_model_len
        lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
        pages = -(-longest // self.block_size)
        caches = kv_cache.allocate_caches(self.model_config, self.tp, pages, self.block_size, dtype)
        runner = ModelRunner(model, self.tp, caches, self.block_size)
        table = list(range(pages))  # shared by all: the values do not matter
        plan = StepPlan([ContextItem(i, [0] * n, table) for i, n in enumerate(lengths)], [], [])
        inputs = runner.prepare(plan)
        hidden = model(inputs.input_ids, inputs.positions, caches, inputs.attention)
        model.compute_logits(hidden[inputs.last_tokens]).float().softmax(-1)

    def _describe(
        self, options: EngineConfig, attention: str, refused: dict[str, str], dtype: str
    ) -> dict[str, Any]:
        """What this rank runs with: /v1/models shows rank 0's, every trace its own rank's."""
        cuda = self.tp.device.type == "cuda"
        return {
            "engine": "hotloop",
            "dtype": dtype,
            "device": self.tp.device.type,
            "device_name": torch.cuda.get_device_name(self.tp.device) if cuda else "cpu",
            "tp": options.tp,
            "attention_backend": attention,
            "attention_backends_refused": refused,
            "all_reduce_backend": self.tp.backend,
            "cuda_graph": False,
            "block_size": self.block_size,
            "num_kv_blocks": self.num_blocks,
            "max_model_len": self.limits.max_model_len,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "load_format": options.load_format,
            "model_hash": model_hash(options),
            "torch": torch.__version__,
            "model": asdict(self.model_config),
        }


def build_model(
    model_config: ModelConfig, tp: TensorParallel, backend: Any, dtype: torch.dtype, limits: Limits
) -> Qwen3ForCausalLM:
    """The model with uninitialised weights, allocated once, on the rank's device and in its dtype."""
    config.check_tp(model_config, tp.size)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with tp.device:
            model = Qwen3ForCausalLM(model_config, tp, backend)
    finally:
        torch.set_default_dtype(before)
    model.model.rotary.build(limits.max_model_len, tp.device)
    return model


def serve_rank(worker: Worker, connection: Any) -> None:
    """Loop of ranks above 0: block on the pipe (an idle rank costs nothing), do, answer where needed."""
    while True:
        message = connection.recv()
        if isinstance(message, StepPlan):
            worker.step(message, [])
        elif isinstance(message, StartProfile):
            worker.profiler.start(message.options)
        elif isinstance(message, StopProfile):
            connection.send(worker.profiler.stop())
        elif isinstance(message, Shutdown):
            return


def model_hash(options: EngineConfig) -> str:
    """sha256 over config.json and the weights; of large weights, over their safetensors headers only."""
    files = [options.model / "config.json"]
    if options.load_format != "dummy":
        files += sorted(options.model.glob("*.safetensors"))
    in_full = sum(path.stat().st_size for path in files) <= _HASHED_IN_FULL
    digest = hashlib.sha256(f"dummy {options.seed}".encode() if options.load_format == "dummy" else b"")
    for path in files:
        with path.open("rb") as handle:
            if in_full or path.suffix == ".json":
                digest.update(handle.read())
            else:
                length = handle.read(8)
                digest.update(length + handle.read(int.from_bytes(length, "little")))
    return f"{'sha256' if in_full else 'headers-sha256'}:{digest.hexdigest()}"


def _free_cuda_bytes(fraction: float, largest_step: Any) -> int:
    """Bytes left for the cache inside `fraction` of the device, beside weights and the largest step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    largest_step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(free - extra - (1 - fraction) * total)
