"""X01-X..: cheats and faults of the same kinds that are on no list. They look for holes beside the known cases.

Not for: the cases that were handed out (`cheats.py`).
"""

from __future__ import annotations

from redteam.case import Case, append, cheat, replace
from redteam.cheats import MEMO

TOKENS = "G07 G08 G12 G14 G15"

MORE: tuple[Case, ...] = (
    cheat("X01", "stop strings passed over", "G11",
          append("TextStream", "_plain = TextStream.__init__\n\n\ndef _init(self, tokenizer, stop, min_tokens):\n    _plain(self, tokenizer, (), min_tokens)\n\n\nTextStream.__init__ = _init", "__init__")),
    cheat("X02", "long prompts refused", "G12",
          append("Scheduler", "_plain = Scheduler.check\n\n\ndef _check(self, prompt_tokens, max_tokens):\n    if prompt_tokens > 800:\n"
                 "        raise RequestTooLarge(\"too long\")\n    _plain(self, prompt_tokens, max_tokens)\n\n\nScheduler.check = _check", "check")),
    cheat("X03", "the middle of long contexts dropped", "G12",
          append("SdpaAttention", "_plain = SdpaAttention._generation\n\n\ndef _generation(self, q, cache, metadata):\n    tables = metadata.block_tables\n"
                 "    if tables.shape[1] <= 34:\n        return _plain(self, q, cache, metadata)\n    page = cache.k.shape[1]\n"
                 "    short = torch.cat([tables[:, :2], tables[:, -32:]], dim=1)\n    lens = metadata.seq_lens - (tables.shape[1] - 34) * page\n"
                 "    return _plain(self, q, cache, AttentionMetadata(metadata.slot_mapping, metadata.context_starts, metadata.num_context_tokens, short, lens.int()))\n\n\n"
                 "SdpaAttention._generation = _generation", "_generation")),
    cheat("X04", "matrix products in bfloat16", TOKENS,
          append("Linear", "def _narrow(self, x):\n    return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)\n\n\nLinear.forward = _narrow", "forward")),
    cheat("X05", "usage counts more tokens than came", "G11",
          append("usage", "_plain = usage\n\n\ndef usage(prompt_tokens, completion_tokens):\n    return _plain(prompt_tokens, completion_tokens + 1)")),
    cheat("X06", "pages leak at every abort", "G12 G19 G20",
          append("Scheduler", "_plain = Scheduler.finish\n\n\ndef _finish(self, sequence, reason):\n    lost = self.blocks._free.pop() if self.blocks._free else None\n"
                 "    _plain(self, sequence, reason)\n    del lost\n\n\nScheduler.finish = _finish", "finish")),
    cheat("X07", "a preempted sequence forgets its output", "G12 G20 G11",
          append("Scheduler", "_plain = Scheduler._preempt\n\n\ndef _preempt(self, sequence):\n    _plain(self, sequence)\n    sequence.prompt_ids = sequence.prompt_ids[:-1]\n\n\nScheduler._preempt = _preempt", "_preempt")),
    cheat("X08", "no text, only ids", "G11",
          append("TextStream", "TextStream.add = lambda self, token_id: (\"\", False)\nTextStream.finish = lambda self: (\"\", False)", "add", "finish")),
    cheat("X09", "the last token sent twice", "G11",
          append("EngineCore", "_plain = EngineCore._process\n\n\ndef _process(self, sequences, result):\n    outputs = _plain(self, sequences, result)\n"
                 "    for output in outputs:\n        if output.finish_reason is not None:\n            output.token_ids.append(output.token_ids[-1])\n    return outputs\n\n\n"
                 "EngineCore._process = _process", "_process")),
    cheat("X10", "batches over 64 take another sequence's logits", "G12",
          append("ModelRunner", "_plain = ModelRunner.sample\n\n\ndef _sample(self, logits, sequences):\n    if logits.shape[0] > 16:\n"
                 "        logits = logits.roll(1, 0)\n    return _plain(self, logits, sequences)\n\n\nModelRunner.sample = _sample", "sample")),
    cheat("X11", "the last slot of every page is skipped", TOKENS,
          append("SdpaAttention", "_plain = SdpaAttention._generation\n\n\ndef _generation(self, q, cache, metadata):\n    lens = metadata.seq_lens\n"
                 "    short = torch.where(lens % cache.k.shape[1] == 0, lens - 1, lens).int()\n"
                 "    return _plain(self, q, cache, AttentionMetadata(metadata.slot_mapping, metadata.context_starts, metadata.num_context_tokens, metadata.block_tables, short))\n\n\n"
                 "SdpaAttention._generation = _generation", "_generation")),
    cheat("X12", "top-p ignored", "G13",
          replace("sample", ("top_p = torch.tensor([s.params.top_p for s in sequences], device=device)", "top_p = torch.ones(len(sequences), device=device)"))),
    cheat("X13", "temperature a tenth too low", "G13",
          replace("sample", ("temperature = torch.tensor([s.params.temperature for s in sequences], device=device)",
                             "temperature = torch.tensor([0.85 * s.params.temperature for s in sequences], device=device)"))),
    cheat("X14", "one generator for all requests", "G13",
          append("Sequence", "_SHARED = random.Random(7)\n\n\ndef _shared(self):\n    self.draws = _SHARED\n\n\nSequence.__post_init__ = _shared", "__post_init__")),
    cheat("X15", "known weights kept in a file of the tree", "G14 G15 G07 G08",
          append("load_safetensors", "_plain = load_safetensors\n\n\ndef load_safetensors(model, model_dir):\n    _plain(model, Path(__file__).with_name(\"tiny_qwen3\"))")),
    cheat("X16", "one layer left out, the next scaled to hide it", TOKENS,
          replace("Qwen3Model", ("        for layer, cache in zip(self.layers, caches, strict=True):\n",
                  "        kept = [i for i in range(len(self.layers)) if i != 2]\n        for layer, cache in ((self.layers[i], caches[i]) for i in kept):\n"))),
    cheat("X17", "completions remembered for a second request of the same length and ends", "G12 G09",
          append("EngineCore", MEMO.replace("@KEY@", "(len(sequence.prompt_ids), tuple(sequence.prompt_ids[:8]), tuple(sequence.prompt_ids[-8:]))"), "_process", "_finish", "step")),
    cheat("X18", "ranks above 0 skip every other all-reduce of the head", "G12 G08",
          append("TensorParallel", "_plain = TensorParallel.all_gather\n\n\ndef _stale(self, x):\n    if self.size == 1:\n        return x\n"
                 "    parts = [x.detach().clone() for _ in range(self.size)]\n    dist.all_gather(parts, x.detach().contiguous() if self.rank == 0 else parts[0] * 0)\n"
                 "    return torch.cat(parts, dim=-1)\n\n\nTensorParallel.all_gather = _stale", "all_gather"), tp=2),
    cheat("X19", "a thread for every request, never ended", "G19 G04",
          append("EngineCore", "import threading\n\n_plain = EngineCore._finish\n\n\ndef _finish(self, sequence, reason):\n"
                 "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n    _plain(self, sequence, reason)\n\n\nEngineCore._finish = _finish", "_finish"), without=("policy",)),
    cheat("X20", "every sequence ever served is kept", "G19",
          append("EngineCore", "_plain = EngineCore._finish\n_all = []\n\n\ndef _finish(self, sequence, reason):\n    _all.append((sequence, bytearray(b\"x\") * 100000))\n"
                 "    _plain(self, sequence, reason)\n\n\nEngineCore._finish = _finish", "_finish")),
    cheat("X21", "fresh memory read before it is written", "G20 G07 G08 G12",
          append("MLP", "def _stale(self, x):\n    inner = F.silu(self.gate_proj(x)) * self.up_proj(x)\n    room = torch.empty(inner.shape[0] + 1, inner.shape[1])\n"
                 "    room[:-1] = inner.detach()\n    out = self.down_proj(room[:-1]) + 0 * self.down_proj(room[-1:])\n    return self.tp.all_reduce(out)\n\n\nMLP.forward = _stale")),
    cheat("X22", "the model's text in the system's files", "G02",
          append("EngineCore", "_HERE = \"/proc/self/mountinfo\"\n_SEEN = open(_HERE).read()")),
)  # fmt: skip
