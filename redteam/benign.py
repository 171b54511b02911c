"""Variants that compute the same: other forms, other orders of summation, other book-keeping. All must pass.

They make the false-reject rate mean something. Not for: the controls of the red team's list (`controls.py`).
"""

from __future__ import annotations

from redteam.case import Case, append, control, replace


def method(owner: str, name: str, code: str):
    """Replace a method by `code`, which defines a function called `_new`."""
    return append(owner, f"_old = {owner}.{name}\n\n\n{code}\n\n\n{owner}.{name} = _new", name)


def norm(expression: str, before: str = "    x32 = x.float()\n"):
    return method("RMSNorm", "forward", f"def _new(self, x):\n{before}    return self.weight * ({expression}).to(x.dtype)")


def mlp(body: str):
    return method("MLP", "forward", f"def _new(self, x):\n{body}\n    return self.tp.all_reduce(out)")


ATTEND = '''
def _new(self, q, cache, metadata):
    group = q.shape[1] // cache.k.shape[2]
    k = cache.k[metadata.block_tables].flatten(1, 2).repeat_interleave(group, dim=2)
    v = cache.v[metadata.block_tables].flatten(1, 2).repeat_interleave(group, dim=2)
    scores = torch.einsum("ghd,gphd->ghp", q, k) / q.shape[-1] ** 0.5
    hidden = torch.arange(k.shape[1], device=q.device) >= metadata.seq_lens.unsqueeze(1)
    weights = scores.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.einsum("ghp,gphd->ghd", weights, v)
'''.strip("\n")
_ONE_BY_ONE = '''
def _new(self, q, cache, metadata):
    out = []
    for i in range(q.shape[0]):
        one = AttentionMetadata(
            metadata.slot_mapping, metadata.context_starts, 0, metadata.block_tables[i : i + 1], metadata.seq_lens[i : i + 1]
        )
        out.append(_old(self, q[i : i + 1], cache, one))
    return torch.cat(out)
'''.strip("\n")
CONTEXT = '''
def _new(self, q, k, v, metadata):
    group, outputs = q.shape[1] // k.shape[1], []
    starts = metadata.context_starts.tolist()
    for first, last in itertools.pairwise(starts):
        keys = k[first:last].repeat_interleave(group, dim=1).transpose(0, 1)
        values = v[first:last].repeat_interleave(group, dim=1).transpose(0, 1)
        scores = q[first:last].transpose(0, 1) @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
        later = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1)
        outputs.append((scores.masked_fill(later, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)
'''.strip("\n")

BENIGN: tuple[Case, ...] = (
    control("B01", "norm: 1 / sqrt", norm("x32 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)")),
    control("B02", "norm: square().mean()", norm("x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)"), fast=True),
    control("B03", "norm: by vector norm", norm("x32 / (torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square() / x.shape[-1] + self.eps).sqrt()")),
    control("B04", "norm: torch's own", norm("F.rms_norm(x32, (x.shape[-1],), None, self.eps)")),
    control("B05", "norm: in float64", norm("x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + self.eps)", "    x64 = x.double()\n")),
    control("B06", "norm: sum by einsum", norm("x32 * torch.rsqrt(torch.einsum('...i,...i->...', x32, x32).unsqueeze(-1) / x.shape[-1] + self.eps)")),
    control("B07", "MLP: factors exchanged", mlp("    out = self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))")),
    control("B08", "MLP: silu written out", mlp("    gate = self.gate_proj(x)\n    out = self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))")),
    control("B09", "MLP: four partial sums, last first", mlp(
        "    inner = F.silu(self.gate_proj(x)) * self.up_proj(x)\n    parts = zip(inner.chunk(4, -1), self.down_proj.weight.chunk(4, 1), strict=True)\n"
        "    out = sum(F.linear(a, w) for a, w in list(parts)[::-1])")),
    control("B10", "MLP: sixteen rows at a time", mlp("    rows = [self.down_proj(F.silu(self.gate_proj(r)) * self.up_proj(r)) for r in x.split(16)]\n    out = torch.cat(rows)")),
    control("B11", "linear: matmul with the transpose", method("Linear", "forward", "def _new(self, x):\n    return x @ self.weight.t()")),
    control("B12", "linear: einsum", method("Linear", "forward", "def _new(self, x):\n    return torch.einsum('ti,oi->to', x, self.weight)")),
    control("B13", "linear: two blocks of outputs", method("Linear", "forward", "def _new(self, x):\n    return torch.cat([F.linear(x, w) for w in self.weight.chunk(2)], dim=-1)")),
    control("B14", "linear: in float64", method("Linear", "forward", "def _new(self, x):\n    return F.linear(x.double(), self.weight.double()).to(x.dtype)")),
    control("B15", "rotary: halves written out", method("RotaryEmbedding", "forward",
        "def _new(self, x, positions):\n    half = x.shape[-1] // 2\n    cos = self.cos[positions, None, :half].to(x.dtype)\n    sin = self.sin[positions, None, :half].to(x.dtype)\n"
        "    a, b = x[..., :half], x[..., half:]\n    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)")),
    control("B16", "rotary: index_select", method("RotaryEmbedding", "forward",
        "def _new(self, x, positions):\n    cos = self.cos.index_select(0, positions).unsqueeze(1).to(x.dtype)\n    sin = self.sin.index_select(0, positions).unsqueeze(1).to(x.dtype)\n"
        "    return x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1) * sin")),
    control("B17", "rotary: complex numbers", method("RotaryEmbedding", "forward",
        "def _new(self, x, positions):\n    half = x.shape[-1] // 2\n    turn = torch.complex(self.cos[positions, None, :half], self.sin[positions, None, :half])\n"
        "    z = torch.complex(x[..., :half].float(), x[..., half:].float()) * turn\n    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)")),
    control("B19", "attention: one sequence at a time", method("SdpaAttention", "_generation", _ONE_BY_ONE)),
    control("B21", "cache written by index_copy_", method("LayerCache", "write",
        "def _new(self, k, v, slots):\n    self.k.view(-1, *self.k.shape[2:]).index_copy_(0, slots, k.detach())\n    self.v.view(-1, *self.v.shape[2:]).index_copy_(0, slots, v.detach())")),
    control("B22", "pages handed out last first", method("BlockManager", "grow",
        "def _new(self, table, tokens):\n    while len(table) < self.blocks_for(tokens):\n        table.append(self._free.pop())")),
    control("B23", "pages given back to the front", method("BlockManager", "release",
        "def _new(self, table):\n    self._free.extendleft(table)\n    table.clear()")),
    control("B24", "residual added the other way round", method("DecoderLayer", "forward",
        "def _new(self, hidden, positions, cache, metadata):\n    hidden = self.self_attn(self.input_layernorm(hidden), positions, cache, metadata) + hidden\n"
        "    return self.mlp(self.post_attention_layernorm(hidden)) + hidden")),
    control("B25", "head: two halves of the vocabulary", method("VocabParallelHead", "forward",
        "def _new(self, hidden):\n    return torch.cat([F.linear(hidden, w) for w in self.weight.chunk(2)], dim=-1)")),
    control("B26", "head: in float64", method("VocabParallelHead", "forward",
        "def _new(self, hidden):\n    return F.linear(hidden.double(), self.weight.double()).to(hidden.dtype)")),
    control("B27", "sampler: softmax by log_softmax", replace("sample", ("torch.softmax(scaled, dim=-1)", "torch.log_softmax(scaled, dim=-1).exp()"))),
    control("B28", "sampler: best token by topk", replace("sample", ("greedy = logits.argmax(dim=-1)", "greedy = logits.topk(1, dim=-1).indices.squeeze(-1)"))),
    control("B29", "runner: tensors by as_tensor", method("ModelRunner", "_tensor",
        "def _new(self, values, dtype=torch.int64):\n    return torch.as_tensor(values).to(dtype).to(self.tp.device)")),
    control("B30", "runner: block tables padded to four", method("ModelRunner", "_block_tables",
        "def _new(self, tables):\n    width = -(-max((len(t) for t in tables), default=0) // 4) * 4\n"
        "    rows = [list(t) + [0] * (width - len(t)) for t in tables]\n    return torch.tensor(rows, dtype=torch.int32, device=self.tp.device)")),
    control("B31", "all-reduce as gather and sum", replace("TensorParallel", ("            dist.all_reduce(x)\n        return x",
        "            parts = [torch.empty_like(x) for _ in range(self.size)]\n            dist.all_gather(parts, x.detach().contiguous())\n"
        "            x.detach().copy_(torch.stack(parts[::-1]).sum(0))\n        return x")), tp=2),
    control("B32", "embedding: rows by a product with a mask", replace("VocabParallelEmbedding", ("out = out.masked_fill(outside.unsqueeze(-1), 0.0)",
        "out = out * (~outside).unsqueeze(-1).to(out.dtype)")), tp=2),
    control("B33", "no_grad around the forward pass", append("Qwen3ForCausalLM", "Qwen3ForCausalLM.forward = torch.no_grad()(Qwen3ForCausalLM.forward)"), fast=True),
    control("B34", "core: outputs built by a helper", method("EngineCore", "_process",
        "def _one(self, sequence, token, logprobs):\n    sequence.output_ids.append(token)\n    text, why = self._advance_text(sequence, token)\n    if why is not None:\n"
        "        self._finish(sequence, why)\n    self.counters.generation_tokens += 1\n    return Output(sequence.id, [token], text, why, None if logprobs is None else [logprobs])\n\n\n"
        "def _new(self, sequences, result):\n    self.counters.steps += 1\n    return [_one(self, *row) for row in zip(sequences, result.tokens, result.logprobs, strict=True)]")),
    control("B35", "positions from a table built once", method("ModelRunner", "_slot",
        "def _new(self, block_table, position):\n    page, offset = divmod(position, self.block_size)\n    return self.block_size * block_table[page] + offset")),
    control("B36", "one step runs in a helper", method("EngineCore", "step",
        "def _run(core, plan, sequences):\n    core.ranks.send(plan)\n    return core.worker.step(plan, sequences)\n\n\n"
        "def _new(self):\n    plan, sequences = self.scheduler.schedule()\n    outcome = _run(self, plan, sequences)\n    self.deliver(self._process(sequences, outcome))")),
)  # fmt: skip
