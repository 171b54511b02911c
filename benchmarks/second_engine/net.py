"""Qwen3 as one reads it in the paper: norms, rotation, grouped attention over a cache of fixed length, gated MLP.

Weights keep the checkpoint's shapes under names of our own; `load` holds the table. Not for: choosing tokens, or
requests (generate.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

PAGE = 16  # tokens


@dataclass
class Step:
    """What all layers need to know about the tokens of one forward pass."""

    slot_ids: torch.Tensor  # [T] where their keys and values go
    positions: torch.Tensor  # [T]
    reach: torch.Tensor  # [T] how many cached tokens each of them may look at
    block_table: torch.Tensor  # [pages] that hold the sequence so far


class Weight(nn.Module):
    """x W^T. The checkpoint's 16-bit numbers are kept as they are, which halves the memory; products are in float32."""

    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outside, inside, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.float())


class Scale(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, width, eps):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        square = (x * x).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(square + self.eps) * self.gain


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [T, heads, size] turned by angles [T, size / 2], the two halves of a head being one plane each."""
    left, right = x.split(x.shape[-1] // 2, dim=-1)
    cos, sin = torch.cos(angles).unsqueeze(1), torch.sin(angles).unsqueeze(1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Cache(nn.Module):
    """Keys and values of one layer in pages [pages, PAGE, heads, size], for one sequence of at most `length` tokens."""

    def __init__(self, length, heads, size):
        super().__init__()
        pages = -(-length // PAGE)
        self.register_buffer("keys", torch.zeros(pages, PAGE, heads, size), persistent=False)
        self.register_buffer("values", torch.zeros(pages, PAGE, heads, size), persistent=False)

    def put(self, k: torch.Tensor, v: torch.Tensor, slot_ids: torch.Tensor) -> None:
        self.keys.view(-1, *self.keys.shape[2:])[slot_ids] = k.detach()
        self.values.view(-1, *self.values.shape[2:])[slot_ids] = v.detach()


class Mixer(nn.Module):
    """Attention of one layer."""

    def __init__(self, c, length):
        super().__init__()
        self.heads, self.groups, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        wide, narrow = self.heads * self.size, self.groups * self.size
        self.to_q = Weight(c["hidden_size"], wide)
        self.to_k = Weight(c["hidden_size"], narrow)
        self.to_v = Weight(c["hidden_size"], narrow)
        self.back = Weight(wide, c["hidden_size"])
        self.scale_q, self.scale_k = Scale(self.size, c["rms_norm_eps"]), Scale(self.size, c["rms_norm_eps"])
        self.cache = Cache(length, self.groups, self.size)
        theta = c["rope_parameters"]["rope_theta"] if "rope_parameters" in c else c["rope_theta"]
        frequencies = 1.0 / theta ** (torch.arange(0, self.size, 2).float() / self.size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        q = self.scale_q(self.to_q(x).view(-1, self.heads, self.size))
        k = self.scale_k(self.to_k(x).view(-1, self.groups, self.size))
        v = self.to_v(x).view(-1, self.groups, self.size)
        angles = step.positions.float().unsqueeze(1) * self.frequencies
        q, k = rotate(q, angles), rotate(k, angles)
        self.cache.put(k, v, step.slot_ids)
        return self.back(self.look(q, self.cache, step).reshape(len(x), -1))

    def look(self, q: torch.Tensor, cache: Cache, step: Step) -> torch.Tensor:
        """q [T, heads, size] over the sequence's pages, what a token may not see masked out -> the same shape."""
        keys = cache.keys[step.block_table].flatten(0, 1)
        values = cache.values[step.block_table].flatten(0, 1)
        visible = torch.arange(len(keys), device=q.device) < step.reach.unsqueeze(1)
        share = self.heads // self.groups
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.repeat_interleave(share, dim=1).transpose(0, 1),
            values.repeat_interleave(share, dim=1).transpose(0, 1),
            attn_mask=visible,
        )
        return out.transpose(0, 1)


class Gated(nn.Module):
    """The MLP of one layer."""

    def __init__(self, c):
        super().__init__()
        self.gate = Weight(c["hidden_size"], c["intermediate_size"])
        self.lift = Weight(c["hidden_size"], c["intermediate_size"])
        self.drop = Weight(c["intermediate_size"], c["hidden_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        opened = self.gate(x)
        lifted = self.lift(x)
        return self.drop(opened * torch.sigmoid(opened) * lifted)


class Block(nn.Module):
    def __init__(self, c, length):
        super().__init__()
        self.before, self.mixer = Scale(c["hidden_size"], c["rms_norm_eps"]), Mixer(c, length)
        self.between, self.gated = Scale(c["hidden_size"], c["rms_norm_eps"]), Gated(c)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        x = x + self.mixer(self.before(x), step)
        return x + self.gated(self.between(x))


class Net(nn.Module):
    """Token ids [1, T] of one sequence and their Step to the logits of its last token [vocabulary]."""

    def __init__(self, c, length):
        super().__init__()
        self.table = nn.Embedding(c["vocab_size"], c["hidden_size"], dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(c, length) for _ in range(c["num_hidden_layers"]))
        self.last = Scale(c["hidden_size"], c["rms_norm_eps"])
        self.head = Weight(c["hidden_size"], c["vocab_size"])
        if c.get("tie_word_embeddings"):
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        x = self.table(ids.view(-1)).float()
        for block in self.blocks:
            x = block(x, step)
        return self.head(self.last(x))[-1]


# Our names to the checkpoint's; {} is the layer.
_NAMES = {
    "before.gain": "input_layernorm.weight", "between.gain": "post_attention_layernorm.weight",
    "mixer.to_q.weight": "self_attn.q_proj.weight", "mixer.to_k.weight": "self_attn.k_proj.weight",
    "mixer.to_v.weight": "self_attn.v_proj.weight", "mixer.back.weight": "self_attn.o_proj.weight",
    "mixer.scale_q.gain": "self_attn.q_norm.weight", "mixer.scale_k.gain": "self_attn.k_norm.weight",
    "gated.gate.weight": "mlp.gate_proj.weight", "gated.lift.weight": "mlp.up_proj.weight",
    "gated.drop.weight": "mlp.down_proj.weight",
}  # fmt: skip


def load(folder, length):
    """The net with a checkpoint's weights, and its config. Raises KeyError for a weight that is missing."""
    c = json.loads(Path(folder, "config.json").read_text("utf-8"))
    net = Net(c, length)
    where = {"table.weight": "model.embed_tokens.weight", "last.gain": "model.norm.weight", "head.weight": "lm_head.weight"}
    for n in range(c["num_hidden_layers"]):
        where |= {f"blocks.{n}.{ours}": f"model.layers.{n}.{theirs}" for ours, theirs in _NAMES.items()}
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), "pt") as weights:
            found |= {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118  (not a dict)
    if c.get("tie_word_embeddings"):
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    net.load_state_dict({ours: found[theirs] for ours, theirs in where.items()})
    return net, c
