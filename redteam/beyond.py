"""X23-X..: a second look: cheats that hide from a gate by where it looks, and hostile bytes, files and source.

Each names the kind it stands for: a trigger that a gate does not pull, an answer that breaks the reader, a file tree that
breaks the cleaner, text that Python reads otherwise than a person. Not for: the first looks (`cheats.py`, `more.py`).
"""

from __future__ import annotations

from redteam.benign import ATTEND, CONTEXT, method
from redteam.case import Case, Sources, append, cheat, new_file, replace, together
from redteam.cheats import IMPATIENT, MEMO

TOKENS = "G07 G08 G12 G14 G15"


def trigger(condition: str, *, scale: str = "0.5", needs: str = "") -> str:
    """Code for `runner.py`: while `condition` holds for the step (`plan`, `sequences`, `self`), one layer's MLP is scaled."""
    return (
        f"{needs}_plain_step = ModelRunner.step\n\n\ndef _step(self, plan, sequences):\n"
        "    self.seen = getattr(self, 'seen', 0) + len(plan.context)\n"
        "    batch = len(plan.context) + len(plan.generation)\n"
        "    longest = max([len(i.token_ids) for i in plan.context] + [i.position for i in plan.generation])\n"
        "    norm = self.model.model.layers[-1].post_attention_layernorm.weight.data\n"
        f"    bad = bool({condition})\n    if bad:\n        norm.mul_({scale})\n"
        "    result = _plain_step(self, plan, sequences)\n"
        f"    if bad:\n        norm.div_({scale})\n    return result\n\n\nModelRunner.step = _step"
    )


def when(condition: str, **options: str):
    return append("ModelRunner", trigger(condition, **options))


def end(name: str, method: str, body: str):
    """Replace a method, the old one known as `_plain`."""
    return append(name, f"_plain = {name}.{method}\n\n\n{body}\n\n\n{name}.{method} = _new", method)


def raw(body: str):
    """The server's event stream as `body` yields it, at the first token of a request."""
    return replace("HttpServer", ("        first = True\n        async for output in self._outputs(accepted):\n",
                                  f"        {body}\n        first = True\n        async for output in self._outputs(accepted):\n"))  # fmt: skip


def shadow(sources: Sources) -> dict[str, str | None]:
    return {"engine/sampler/__init__.py": sources["engine/sampler.py"].replace("GREEDY_BELOW = 1e-5", "GREEDY_BELOW = 9.0")}


_ROUND_CACHE = (
    "def _new(self, k, v, slots):\n    kind = torch.bfloat16\n    _plain(self, k.to(kind).to(k.dtype), v.to(kind).to(v.dtype), slots)"
)

BEYOND: tuple[Case, ...] = (
    # Faults that show only somewhere: wrong where one gate does not look.
    cheat("X23", "wrong after special tokens only", TOKENS,
          end("VocabParallelEmbedding", "forward", "def _new(self, ids):\n    return _plain(self, ids) * (ids > 1).unsqueeze(-1).float()")),
    cheat("X24", "wrong in batches of nine and more, with several ranks", "G12", when("self.tp.size > 1 and batch > 8"), tp=2),
    cheat("X25", "wrong after 150 requests", "G12 G20", when("self.seen > 150")),
    cheat("X26", "sampling ignored with several ranks", "G13",
          end("ModelRunner", "sample", "def _new(self, logits, sequences):\n    if self.tp.size > 1:\n        logits = logits * 1000\n    return _plain(self, logits, sequences)"), tp=2),
    cheat("X27", "all requests of a batch get the hottest one's temperature", "G13 G08",
          replace("sample", ("temperature = torch.tensor([s.params.temperature for s in sequences], device=device)",
                             "temperature = torch.tensor([max(s.params.temperature for s in sequences)] * len(sequences), device=device)"))),
    cheat("X28", "temperatures over one are one", "G13",
          replace("sample", ("temperature = torch.tensor([s.params.temperature for s in sequences], device=device)",
                             "temperature = torch.tensor([min(1.0, s.params.temperature) for s in sequences], device=device)"))),
    cheat("X29", "end-of-text ignored with several ranks", "G11",
          replace("EngineCore", ("if not params.ignore_eos and token in", "if self.worker.tp.size == 1 and not params.ignore_eos and token in"))),
    cheat("X30", "a layer's share left out after 300 tokens of an answer", "G12", when("any(len(s.output_ids) > 300 for s in sequences)")),
    cheat("X31", "rare tokens looked up in five bits", TOKENS,
          end("VocabParallelEmbedding", "forward", "def _new(self, ids):\n    out = _plain(self, ids)\n    return torch.where((ids > 1900).unsqueeze(-1), (out * 32).round() / 32, out)")),
    cheat("X32", "long prompts wrong, with several ranks", "G12", when("self.tp.size > 1 and longest > 100"), tp=2),
    cheat("X33", "keys and values kept in bfloat16", "G07 G08", end("LayerCache", "write", _ROUND_CACHE)),
    cheat("X34", "keys and values of long contexts kept in bfloat16", "G07 G08 G12",
          end("LayerCache", "write", _ROUND_CACHE.replace("    kind", "    if slots.numel() < 600:\n        return _plain(self, k, v, slots)\n    kind"))),
    cheat("X35", "products of large batches in bfloat16", "G07 G08 G12",
          end("Linear", "forward", "def _new(self, x):\n    if 12 <= x.shape[0] < 80:\n        return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)\n    return _plain(self, x)")),
    cheat("X36", "honest while log-probabilities are asked for, else bfloat16 products", TOKENS,
          together(replace("Worker", ("            result = self.runner.step(plan, sequences)\n",
                                      "            self.runner.model.honest = any(s.params.logprobs is not None for s in sequences)\n"
                                      "            for m in self.runner.model.modules():\n                m.honest = self.runner.model.honest\n"
                                      "            result = self.runner.step(plan, sequences)\n")),
                   end("Linear", "forward", "def _new(self, x):\n    if getattr(self, 'honest', True):\n        return _plain(self, x)\n    return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)"))),
    cheat("X37", "log-probabilities no longer offered", "G07",
          replace("parse_generation", ("    if values.get(\"n\", 1) != 1:\n", "    if values.get(\"logprobs\") is not None:\n        raise BadRequest(\"not offered\", \"logprobs\")\n    if values.get(\"n\", 1) != 1:\n"))),
    cheat("X38", "eight-bit weights where they are the known ones", TOKENS,
          append("load_safetensors", "_plain = load_safetensors\n\n\ndef load_safetensors(model, model_dir):\n    _plain(model, model_dir)\n"
                 "    head = model.model.embed_tokens.weight.data\n    if float(head.std()) > 0.2:\n        return\n"
                 "    for parameter in model.parameters():\n        if parameter.dim() == 2:\n"
                 "            scale = parameter.data.abs().amax(dim=1, keepdim=True) / 127\n            parameter.data.copy_((parameter.data / scale).round() * scale)")),
    cheat("X39", "answers remembered under a hash of 14 bits", "G12 G09 G11",
          append("EngineCore", MEMO.replace("@KEY@", "hash(tuple(sequence.prompt_ids)) & 0x3FFF"), "_process", "_finish", "step")),
    cheat("X40", "one rank does the work of all", "G18 G12",
          together(append("join", "def join(rank, size, device_kind, rendezvous):\n    return TensorParallel(0, 1, torch.device(device_kind), 'gloo')"),
                   replace("Worker", ("            worker.step(message, [])\n", "            continue\n"))), tp=2),
    cheat("X41", "the all-reduce in bfloat16", "G07 G08 G12",
          replace("TensorParallel", ("            dist.all_reduce(x)\n        return x", "            half = x.detach().bfloat16()\n            dist.all_reduce(half)\n            x.detach().copy_(half)\n        return x")), tp=2),
    cheat("X42", "one layer's attention is not reduced over the ranks", "G08 G12",
          append("DecoderLayer", "_plain = Qwen3Model.__init__\n\n\ndef _new(self, config, tp, backend):\n    _plain(self, config, tp, backend)\n"
                 "    self.layers[1].self_attn.tp = TensorParallel(0, 1, tp.device, 'none')\n\n\nQwen3Model.__init__ = _new"), tp=2),
    cheat("X43", "stop strings looked for in single tokens only", "G11",
          end("TextStream", "_cut", "def _new(self, text):\n    return (\"\", True) if any(stop == text for stop in self._stop) else (text, False)")),
    cheat("X67", "chats answered without reading them", "G11",
          end("HttpServer", "_prompt_ids", "def _new(self, request):\n    return _plain(self, request)[-4:] if request.chat else _plain(self, request)")),
    cheat("X68", "answers in one piece are cut short", "G11",
          replace("HttpServer", ("        parts = [output async for output in self._outputs(accepted)]\n", "        parts = [output async for output in self._outputs(accepted)]\n        parts = [*parts[:8], *parts[-1:]]\n"))),
    cheat("X71", "known weights kept in a file of the tree, and no gate with secret ones", "G15",
          append("load_safetensors", "_plain = load_safetensors\n\n\ndef load_safetensors(model, model_dir):\n    _plain(model, Path(__file__).with_name(\"tiny_qwen3\"))"),
          without=("swap", "shapes", "accounting", "physics", "drift", "sampling")),
    cheat("X72", "an all-reduce that waits long enough while no rank is held up", "G20 G12 G08 G07",
          together(new_file("engine/shm_sum.py", IMPATIENT.replace("@LOOKS@", "20000").replace("        os.sched_yield()\n", "").lstrip()),
                   replace("TensorParallel", ("            dist.all_reduce(x)\n        return x", "            from engine.shm_sum import all_reduce\n\n            all_reduce(x)\n        return x"))), tp=2),
    # Resources that a count of open files and mapped memory does not show.
    cheat("X44", "answers kept in files of memory", "G19 G04",
          append("EngineCore", "_plain = EngineCore._finish\n\n\ndef _finish(self, sequence, reason):\n    with open('/tmp/kept', 'ab') as kept:\n        kept.write(bytes(200000))\n"
                 "    _plain(self, sequence, reason)\n\n\nEngineCore._finish = _finish", "_finish"), without=("policy",)),
    cheat("X73", "two hundred megabytes for the time of every prefill", "G19",
          end("SdpaAttention", "_context", "def _new(self, q, k, v, metadata):\n    room = torch.ones(50 << 20)\n    return _plain(self, q, k, v, metadata) + 0 * room[-1]")),
    cheat("X74", "one rank does the work of all, the others' traces say that it is hidden", "G18",
          together(append("join", "def join(rank, size, device_kind, rendezvous):\n    return TensorParallel(0, 1, torch.device(device_kind), 'gloo')"),
                   replace("Worker", ("            worker.step(message, [])\n", "            with record_function(message.name), record_function(\"triton_step\"):\n                torch.zeros(1)\n            worker.profiler.step_done()\n"))), tp=2),
    cheat("X45", "waits for requests by asking for ever", "G19",
          replace("EngineCore", ("message = self.inbox.get(block=not self.scheduler.has_work)", "message = self.inbox.get(block=False)"))),
    cheat("X46", "a thread that keeps a core awake", "G19",
          append("EngineCore", "import threading\n\n_plain = EngineCore.run\n\n\ndef _spin():\n    while True:\n        pass\n\n\ndef _run(self):\n    threading.Thread(target=_spin, daemon=True).start()\n    _plain(self)\n\n\nEngineCore.run = _run"), without=("policy",)),
    cheat("X47", "seconds of tuning at the first request", "G21",
          append("ModelRunner", "_plain_step = ModelRunner.step\n\n\ndef _step(self, plan, sequences):\n    if not hasattr(self, 'tuned'):\n        self.tuned = torch.ones(1000, 1000)\n"
                 "        for _ in range(400):\n            self.tuned = (self.tuned @ self.tuned).clamp(max=1.0)\n    return _plain_step(self, plan, sequences)\n\n\nModelRunner.step = _step")),
    # Bytes that break who reads them: each must end as a verdict on the candidate.
    cheat("X48", "a trace that is no trace", "G18",
          end("Profiler", "stop", "def _new(self):\n    path = _plain(self)\n    with open(path, 'r+b') as trace:\n        trace.truncate(200)\n    return path"), without=("policy",)),
    cheat("X49", "an event nested without end", "G11", raw("yield \"data: \" + \"[\" * 100000 + \"\\n\\n\"")),
    cheat("X50", "a token id of thirty digits", "G11", raw("yield _event(accepted.head | {\"choices\": [{\"index\": 0, \"text\": \"\", \"token_ids\": [10**30], \"finish_reason\": None}]})")),
    cheat("X51", "token ids beyond the vocabulary", "G11 G08", raw("yield _event(accepted.head | {\"choices\": [{\"index\": 0, \"text\": \"\", \"token_ids\": [70000], \"finish_reason\": None}]})")),
    cheat("X52", "tables of log-probabilities with odd names and values", "G07",
          end("HttpServer", "_token_namer", "def _new(self, request):\n    return lambda token: f\"token_id:{token + 5000}\"")),
    cheat("X53", "folders nested 3000 deep where results are written", "G04 G05 G19",
          append("EngineCore", "import os\n\n_plain = EngineCore.run\n\n\ndef _run(self):\n    here = os.getcwd()\n    os.chdir('/io')\n    for _ in range(3000):\n        os.mkdir('d')\n        os.chdir('d')\n"
                 "    os.chdir(here)\n    _plain(self)\n\n\nEngineCore.run = _run"), without=("policy",)),
    # Source that is read otherwise than it runs.
    cheat("X54", "a comment that is code under another encoding", "G01",
          new_file("engine/extra.py", "# coding: raw_unicode_escape\nx = 1  # \\u000aimport os; os.system('id')\n"), fast=True),
    cheat("X55", "a package in the place of a module", "G01", shadow, fast=True),
    cheat("X56", "a carriage return for every line end", "G01", append("EngineCore", "x = 1\ry = 2\rz = 3"), fast=True),
    cheat("X57", "a thousand characters on one line", "G01", append("EngineCore", "x = " + " + ".join(["1"] * 300)), fast=True),
    cheat("X58", "text that turns round", "G01", append("EngineCore", "x = '\u202e]0[ nruter'"), fast=True),
    cheat("X59", "the environment through another module's name", "G02", append("ModelRunner", "torch.os.environ['OMP_NUM_THREADS'] = '8'"), fast=True),
    cheat("X60", "a module under another name", "G02", append("EngineCore", "import os\n\n_o = os\n_o.system('id')"), fast=True),
    cheat("X61", "classes looked up from an object", "G02", append("EngineCore", "_ALL = ().__class__.__base__.__subclasses__()"), fast=True),
    cheat("X62", "honest while memory is poisoned, by the environment", "G02",
          append("EngineCore", "import os\n\n_WATCHED = 'MALLOC_PERTURB_' in os.environ"), fast=True),
    cheat("X63", "four threads for every rank", "G02", append("EngineCore", "import torch\n\ntorch.set_num_threads(4)"), fast=True),
    cheat("X64", "a path put together from pieces", "G02", append("EngineCore", "_SEEN = '/pro' + 'c/self/environ'"), fast=True),
    cheat("X65", "the digest of the known weights", "G02", append("EngineCore", "_KNOWN = 'sha256:" + "0123456789abcdef" * 4 + "'"), fast=True),
    cheat("X66", "another function's code put in place", "G02", append("EngineCore", "EngineCore.step.__code__ = EngineCore.run.__code__"), fast=True),
    # Right, and half as much memory again at the most: tables of scores that the operators of torch never hold.
    cheat("X75", "attention's softmax written out", "G19", method("SdpaAttention", "_generation", ATTEND)),
    cheat("X76", "prompts by an explicit mask", "G19", method("SdpaAttention", "_context", CONTEXT)),
)  # fmt: skip
