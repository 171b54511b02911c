"""The arithmetic of a dense decoder: what one forward pass must read and multiply at least.

From config.json and the weight files alone. Not for: measuring (`physics.py`, `witness.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def vocabulary(model_dir: Path) -> int:
    """How many token ids a model has, whatever its architecture."""
    return int(json.loads((model_dir / "config.json").read_text())["vocab_size"])


@dataclass(frozen=True, slots=True)
class Model:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, model_dir: Path) -> Model:
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
        )

    def layer_weights(self, tp: int = 1) -> int:
        """Weights of one layer's projections on one rank; KV heads are replicated beyond their number."""
        kv = max(1, self.kv_heads // tp) * self.head_dim
        attention = self.hidden * (2 * (self.heads // tp) * self.head_dim + 2 * kv)
        return attention + 3 * self.hidden * self.inner // tp

    def head_weights(self, tp: int = 1) -> int:
        return self.hidden * -(-self.vocabulary // tp)

    def product_flops(self, rows: int, sampled: int, tp: int = 1) -> int:
        """FLOPs of the weight products of a pass over `rows` tokens that needs logits for `sampled` of them."""
        return 2 * (rows * self.layers * self.layer_weights(tp) + sampled * self.head_weights(tp))

    def pass_bytes(self, bytes_per_weight: float) -> float:
        """Bytes of weights, over all ranks, that every pass reads: projections and head."""
        return bytes_per_weight * (self.layers * self.layer_weights() + self.head_weights())
