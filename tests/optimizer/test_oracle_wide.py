"""The oracle on a GPU: float32 arithmetic on weights that stay in 16 bits gives what float32 weights give."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from optimizer.truth.oracle_worker import widen


def test_widened_weights_compute_what_float32_weights_do() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    narrow = Qwen3ForCausalLM(config).bfloat16().eval()
    full = Qwen3ForCausalLM(config).eval()
    full.load_state_dict({name: value.float() for name, value in narrow.state_dict().items()})
    narrow.model.rotary_emb = type(narrow.model.rotary_emb)(config)  # loading a checkpoint leaves its table in float32 too
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        rounded = narrow(ids).logits.float()
        widen(narrow)
        found, wanted = narrow(ids).logits, full(ids).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (rounded - wanted).abs().max() > 1e-3  # the difference would show
