"""Runs one request at a time through `net.Net`: a pass over the prompt, then one pass a token.

Not for: HTTP (serve.py), jobs and the profiler (loop.py), the arithmetic (net.py).
"""

import json
import random
from pathlib import Path

import loop
import torch
from loop import Job, Refused  # noqa: F401  (serve.py takes them from here)
from net import PAGE, Step, load


class Engine(loop.Engine):
    def __init__(self, model_dir, device, max_len, trace_dir):
        settings = json.loads(Path(model_dir, "config.json").read_text("utf-8"))
        length = min(max_len, settings["max_position_embeddings"])
        self.model, c = load(model_dir, length)
        ends = settings.get("eos_token_id")
        generation = Path(model_dir, "generation_config.json")
        if generation.is_file():
            ends = json.loads(generation.read_text("utf-8")).get("eos_token_id", ends)
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        about = {"engine": "second", "dtype": "float32", "device": device, "attention_backend": "written out"}
        super().__init__(model_dir, c["vocab_size"], length, ends, trace_dir, about)
        self.marks = loop.Marks(self.model)

    def complete(self, job):
        ids, body = self.check(job.body), job.body
        ends = [] if body.get("ignore_eos") else self.ends
        draws = random.Random(body.get("seed"))
        words, known, fresh = loop.Words(job, self.tokenizer, ends), 0, ids
        while True:
            logits = self.forward(fresh, known)
            known += len(fresh)
            early = len(words.ids) < (body.get("min_tokens") or 0)
            token = choose(logits, body, self.ends if early else [], draws)
            if words.put(token):
                return
            fresh = [token]

    def forward(self, fresh, known):
        """Logits after `fresh` tokens that follow `known` cached ones."""
        places = list(range(known, known + len(fresh)))
        step = Step(
            slot_ids=torch.tensor(places),
            positions=torch.tensor(places),
            reach=torch.tensor([place + 1 for place in places]),
            block_table=torch.tensor(list(range(places[-1] // PAGE + 1))),
        )
        return self.model(torch.tensor([fresh]), step)


def choose(logits, body, forbidden, draws):
    """One token id: the likeliest, or one drawn from what temperature, top_k and top_p leave."""
    if forbidden:
        logits = logits.index_fill(0, torch.tensor(forbidden), float("-inf"))
    temperature = body.get("temperature", 1.0)
    if temperature < 1e-5:
        return int(logits.argmax().item())
    odds, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True, stable=True)
    top_k, top_p = body.get("top_k") or 0, body.get("top_p") or 1.0
    if top_k > 0:
        odds[top_k:] = 0.0
    odds = odds / odds.sum()
    odds[1:][(odds.cumsum(0) - odds)[1:] >= top_p] = 0.0
    reached = odds.cumsum(0)
    at = int((reached <= draws.random() * reached[-1]).sum().item())
    return int(order[min(at, len(order) - 1)].item())
