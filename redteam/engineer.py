"""B37-B..: what an engineer would really send: larger than a variant of a formula, and right. All must pass.

Not for: forms of one expression (`benign.py`), the controls of the list (`controls.py`).
"""

from __future__ import annotations

from redteam.benign import method
from redteam.case import Case, append, control

_SPECULATE = '''
from engine.request import ContextItem, StepPlan

_one_step = EngineCore.step


def _guess(ids):
    """What followed the last two tokens when they came before: at most three more."""
    for at in range(len(ids) - 1, 1, -1):
        if ids[at - 2 : at] == ids[-2:]:
            return ids[at : at + 3]
    return []


def _draft(self):
    """The one running sequence and a guess of its next tokens, where one may be tried."""
    running = self.scheduler.running
    if len(running) != 1 or self.scheduler.waiting or self.worker.tp.size > 1:
        return None, []
    sequence, params = running[0], running[0].params
    if params.temperature > 0 or params.logprobs is not None or params.min_tokens > 0:
        return None, []
    left = params.max_tokens - len(sequence.output_ids) - 1
    guess = _guess(sequence.token_ids())[: max(0, left)]
    if not self.scheduler.blocks.can_grow(sequence.block_table, len(sequence) + len(guess)):
        return None, []
    return sequence, guess


def _step(self):
    """A guess is computed together with the tokens it follows; only what the model itself says is kept."""
    sequence, guess = _draft(self)
    if not guess:
        return _one_step(self)
    known, runner = len(sequence), self.worker.runner
    self.scheduler.blocks.grow(sequence.block_table, known + len(guess))
    item = ContextItem(sequence.id, sequence.token_ids() + guess, list(sequence.block_table))
    plan = StepPlan([item], [], self.scheduler._finished)
    self.scheduler._finished = []
    inputs = runner.prepare(plan)
    hidden = runner.model(inputs.input_ids, inputs.positions, runner.caches, inputs.attention)
    best = runner.model.compute_logits(hidden[known - 1 :]).argmax(dim=-1).tolist()
    right = 0
    while right < len(guess) and guess[right] == best[right]:
        right += 1
    runner.remember(StepPlan([item], [], plan.finished), [best[right]])
    for token in best[: right + 1]:
        self.deliver(self._process([sequence], StepResult([token], [None])))
        if sequence.finish_reason is not None:
            return
    sequence.num_cached = known + right


EngineCore.step = _step
'''
_STORE = '''
_plain_runner_step = ModelRunner.step
_stored = {}


def _copied(self, plan):
    """Key, slots and stored step of a plan that is one short prompt."""
    if len(plan.context) != 1 or plan.generation or len(plan.context[0].token_ids) > 64 or self.tp.size > 1:
        return None, None, None
    item = plan.context[0]
    slots = [self._slot(item.block_table, position) for position in range(len(item.token_ids))]
    return tuple(item.token_ids), self._tensor(slots), _stored.get(tuple(item.token_ids))


def _step(self, plan, sequences):
    """A prompt that was computed before is not computed again: its keys, values and logits are copied."""
    key, slots, stored = _copied(self, plan)
    if key is None:
        return _plain_runner_step(self, plan, sequences)
    if stored is None:
        inputs = self.prepare(plan)
        hidden = self.model(inputs.input_ids, inputs.positions, self.caches, inputs.attention)
        logits = self.model.compute_logits(hidden[inputs.last_tokens]).detach()
        flat = [(c.k.flatten(0, 1)[slots].clone(), c.v.flatten(0, 1)[slots].clone()) for c in self.caches]
        while len(_stored) >= 8:
            _stored.pop(next(iter(_stored)))
        _stored[key] = (logits, flat)
    else:
        logits, flat = stored
        for cache, (k, v) in zip(self.caches, flat, strict=True):
            cache.write(k, v, slots)
    tokens = self.sample(logits, sequences)
    self.remember(plan, tokens)
    return StepResult(tokens, sampler.logprobs_of(logits, tokens, sequences))


ModelRunner.step = _step
'''
_BLOCKS = '''
def _new(self, q, k, v, metadata):
    starts, outputs = metadata.context_starts.tolist(), []
    for first, last in itertools.pairwise(starts):
        keys, values = (x[first:last].transpose(0, 1).unsqueeze(0) for x in (k, v))
        for at in range(first, last, 128):
            rows = q[at : min(at + 128, last)].transpose(0, 1).unsqueeze(0)
            seen = at - first + rows.shape[2]
            mask = torch.ones(rows.shape[2], seen, dtype=torch.bool, device=q.device).tril(at - first)
            out = F.scaled_dot_product_attention(rows, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, enable_gqa=True)
            outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)
'''.strip("\n")
_TOGETHER = '''
def _new(self, q, k, v, metadata):
    starts = metadata.context_starts.tolist()
    lengths = {b - a for a, b in itertools.pairwise(starts)}
    if len(lengths) != 1 or len(starts) < 3:
        return _old(self, q, k, v, metadata)
    batch = [x.unflatten(0, (len(starts) - 1, -1)).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
'''.strip("\n")
_MERGED = '''
def _new(self, hidden, positions, cache, metadata):
    if not hasattr(self, "merged"):
        parts = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        self.merged, self.sizes = torch.cat(parts).detach(), [p.shape[0] for p in parts]
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in F.linear(hidden, self.merged).split(self.sizes, dim=-1))
    q, k = self.rotary(self.q_norm(q), positions), self.rotary(self.k_norm(k), positions)
    cache.write(k, v, metadata.slot_mapping)
    out = self.backend.attend(q, k, v, cache, metadata)
    return self.tp.all_reduce(self.o_proj(out.reshape(-1, self.num_heads * self.head_dim)))
'''.strip("\n")
_COALESCE = '''
async def _new(self, accepted):
    """What has come while the client was slow goes out as one event."""
    held = None
    async for output in _old(self, accepted):
        held = output if held is None else Output(
            output.seq_id, held.token_ids + output.token_ids, held.text + output.text, output.finish_reason
        )
        if accepted.outputs.empty() or output.logprobs is not None or output.finish_reason is not None:
            yield held
            held = None
'''.strip("\n")

ENGINEER: tuple[Case, ...] = (
    control("B37", "n-gram speculation, every token verified", append("EngineCore", _SPECULATE, "step", "_process")),
    control("B38", "keys, values and logits of a repeated prompt from a store", append("ModelRunner", _STORE, "step", "remember")),
    control("B39", "prompts attended to in blocks of 128 queries", method("SdpaAttention", "_context", _BLOCKS)),
    control("B40", "prompts of one length in one call", method("SdpaAttention", "_context", _TOGETHER)),
    control("B41", "queries, keys and values as one product", method("Attention", "forward", _MERGED), tp=2),
    control("B42", "MLP of long prompts in chunks of 256 tokens", method("MLP", "forward",
        "def _new(self, x):\n    return torch.cat([_old(self, part) for part in x.split(256)])")),
    control("B43", "tokens that wait for the client go out together", method("HttpServer", "_outputs", _COALESCE)),
    control("B44", "buffers of the step's inputs made once", append("ModelRunner",
        "_rooms = {}\n\n\ndef _tensor(self, values, dtype=torch.int64):\n    room = _rooms.get(dtype)\n    if room is None or room.numel() < len(values):\n"
        "        room = _rooms[dtype] = torch.empty(max(4096, 2 * len(values)), dtype=dtype)\n"
        "    return room[: len(values)].copy_(torch.tensor(values, dtype=dtype)).clone().to(self.tp.device)\n\n\nModelRunner._tensor = _tensor", "_tensor")),
    control("B45", "residual and norm in one function", method("DecoderLayer", "forward",
        "def _new(self, hidden, positions, cache, metadata):\n    def added(norm, x, y):\n        z = x + y\n        return z, norm(z)\n\n"
        "    a = self.self_attn(self.input_layernorm(hidden), positions, cache, metadata)\n"
        "    hidden, normed = added(self.post_attention_layernorm, hidden, a)\n    return hidden + self.mlp(normed)")),
)  # fmt: skip
