"""Runs requests through reasoning-from-scratch's own generator, one at a time.

The package generates greedily; a request with a temperature is sampled here, from the same model and cache. Not for:
HTTP (serve.py), jobs and the profiler (loop.py).
"""

import json
from pathlib import Path

import loop
import torch
from reasoning_from_scratch import ch02, qwen3
from safetensors.torch import load_file


def settings(config, max_len):
    """The package's settings for a Hugging Face config."""
    rope = config.get("rope_parameters") or config
    return {
        "vocab_size": config["vocab_size"],
        "context_length": max_len,
        "emb_dim": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "n_layers": config["num_hidden_layers"],
        "hidden_dim": config["intermediate_size"],
        "head_dim": config["head_dim"],
        "qk_norm": True,
        "n_kv_groups": config["num_key_value_heads"],
        "rope_base": rope["rope_theta"],
        "dtype": torch.float32,
    }


class Engine(loop.Engine):
    """The package's Qwen3Model behind its `generate_text_basic_stream_cache`."""

    def __init__(self, model_dir, device, max_len, trace_dir):
        config = json.loads(Path(model_dir, "config.json").read_text("utf-8"))
        max_len = min(max_len, config["max_position_embeddings"])
        chosen = settings(config, max_len)
        weights = {}
        for file in sorted(Path(model_dir).glob("*.safetensors")):
            weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
        self.model = qwen3.Qwen3Model(chosen)
        qwen3.load_hf_weights_into_qwen(self.model, chosen, weights)
        self.model.eval()
        ends = config.get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        about = {"engine": "reasoning-from-scratch", "dtype": "float32", "device": device, "attention_backend": "written out"}
        super().__init__(model_dir, config["vocab_size"], max_len, ends, trace_dir, about)
        self.marks = loop.Marks(self.model)

    def complete(self, job):
        ids = torch.tensor([self.check(job.body)])
        words = loop.Words(job, self.tokenizer, [] if job.body.get("ignore_eos") else self.ends)
        least = job.body.get("min_tokens") or 0
        if job.body.get("temperature", 1.0) > 0 or least:
            tokens = self.sampled(ids, job.body, least)
        else:
            tokens = ch02.generate_text_basic_stream_cache(self.model, ids, job.body.get("max_tokens", 16))
        for token in tokens:
            if words.put(int(token)):
                break

    @torch.inference_mode()
    def sampled(self, ids, body, least):
        random = torch.Generator()
        random.manual_seed(body["seed"]) if body.get("seed") is not None else random.seed()
        cache = qwen3.KVCache(n_layers=self.model.cfg["n_layers"])
        self.model.reset_kv_cache()
        for count in range(body.get("max_tokens", 16)):
            scores = self.model(ids, cache=cache)[0, -1].float()
            if count < least:
                scores[self.ends] = -torch.inf
            ids = draw(scores, body, random).view(1, 1)
            yield ids


def draw(scores, body, random):
    """One token of scores [vocabulary], by temperature, top_k and top_p; the likeliest at temperature 0."""
    temperature = body.get("temperature", 1.0)
    if temperature == 0:
        return scores.argmax()
    scores, order = (scores / temperature).sort(descending=True)
    if (body.get("top_k") or 0) > 0:
        scores[body["top_k"] :] = -torch.inf
    shares = scores.softmax(0)
    if body.get("top_p") is not None:
        shares[shares.cumsum(0) - shares >= body["top_p"]] = 0.0
    return order[torch.multinomial(shares, 1, generator=random)]
