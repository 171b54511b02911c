"""What the engine is told: the model's dimensions (config.json) and its own options (command line).

Not for: anything decided while running. Every default of the engine lives in `EngineConfig`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_MODEL_TYPES = ("qwen3",)
DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("safetensors", "dummy")
DEVICES = ("cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "sdpa", "flash")


class ConfigError(ValueError):
    """The model directory or an option cannot be used; the message names the field and the valid values."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a dense Qwen3 model, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, model_dir: Path) -> ModelConfig:
        """Read `config.json`, and the stop tokens of `generation_config.json`, which may know more of them.

        Raises ConfigError for a missing file, an unknown model type, or a field that is missing or unsupported.
        """
        raw = _read_json(model_dir / "config.json")
        path = model_dir / "generation_config.json"
        generation = _read_json(path) if path.exists() else {}
        return cls.from_raw(raw, _eos_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))))

    @classmethod
    def from_raw(cls, raw: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """From the contents of config.json. Raises ConfigError naming the field."""
        model_type = raw.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise ConfigError(
                f"config.json: model_type is {model_type!r}; valid values: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        _refuse_unsupported(raw)
        heads = _positive_int(raw, "num_attention_heads")
        hidden = _positive_int(raw, "hidden_size")
        return cls(
            vocab_size=_positive_int(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive_int(raw, "intermediate_size"),
            num_hidden_layers=_positive_int(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_positive_int(raw, "num_key_value_heads", default=heads),
            head_dim=_positive_int(raw, "head_dim", default=hidden // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            max_position_embeddings=_positive_int(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=_checkpoint_dtype(raw),
            eos_token_ids=eos_token_ids,
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one server. The command line takes its defaults from here."""

    model: Path
    tp: int = 1
    device: str = "cpu"
    dtype: str = "auto"  # float32 on a CPU; the checkpoint's on CUDA
    load_format: str = "safetensors"
    seed: int = 0  # of dummy weights
    max_model_len: int | None = None  # None: the model's, at most 8192
    block_size: int | None = None  # None: 16, or what the attention backend needs
    num_kv_blocks: int | None = None  # None: from free memory
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None  # None: max(2048, max_model_len)
    attention_backend: str = "auto"
    gpu_memory_utilization: float = 0.9
    trace_dir: Path | None = None
    served_model_name: str | None = None
    uds: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a running server accepts, once model and options are known."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def limits(options: EngineConfig, model: ModelConfig) -> Limits:
    """Resolve the length limits. Raises ConfigError when they exceed the model's positions."""
    longest = options.max_model_len or min(model.max_position_embeddings, 8192)
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {longest}; the model has {model.max_position_embeddings} positions "
            "(max_position_embeddings)"
        )
    tokens = options.max_num_batched_tokens or max(2048, longest)
    if tokens < longest:
        raise ConfigError(
            f"--max-num-batched-tokens is {tokens}; a prompt is prefilled in one step, so it must be at least "
            f"--max-model-len ({longest})"
        )
    return Limits(longest, options.max_num_seqs, tokens)


def check_tp(model: ModelConfig, tp: int) -> None:
    """Raise ConfigError, naming the dimension, unless the model can be split over `tp` ranks."""
    for field in ("num_attention_heads", "intermediate_size"):
        size = getattr(model, field)
        if size % tp:
            valid = [n for n in (1, 2, 4, 8, 16) if size % n == 0]
            raise ConfigError(f"--tp {tp} does not divide {field} ({size}); valid values include {valid}")
    kv_heads = model.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"--tp {tp} neither divides num_key_value_heads ({kv_heads}) nor is a multiple of it"
        )


def compute_dtype(options: EngineConfig, model: ModelConfig) -> str:
    """Name of the dtype of weights and activations."""
    if options.dtype != "auto":
        return options.dtype
    return "float32" if options.device == "cpu" else model.dtype


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return raw


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Options of the Qwen3 family that this model code does not compute: refuse them, never ignore them."""
    required: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
    }
    for field, supported in required.items():
        value = raw.get(field, supported)
        if value != supported:
            raise ConfigError(f"config.json: {field} is {value!r}; only {supported!r} is supported")


def _positive_int(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: {field} is {value!r}; it must be a positive integer")
    return value


def _rope_theta(raw: dict[str, Any]) -> float:
    """`rope_parameters: {rope_theta}` (transformers 5) or top-level `rope_theta` with `rope_scaling`."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: rope_type is {kind!r}; only 'default' is supported")
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError(f"config.json: rope_theta is {theta!r}; it must be a positive number")
    return float(theta)


def _checkpoint_dtype(raw: dict[str, Any]) -> str:
    """`dtype` (transformers 5) or `torch_dtype`."""
    name = raw.get("dtype", raw.get("torch_dtype")) or "float32"
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {name!r}; valid values: {', '.join(DTYPES)}")
    return name


def _eos_token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) for token in ids):
        raise ConfigError(f"eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
