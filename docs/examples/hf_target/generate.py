"""Runs requests through transformers' `generate`, one at a time.

Every forward pass, with the host work up to the next one, is marked with vLLM's range names, so that one rule reads
steps in every trace. Not for: HTTP (serve.py), jobs and the profiler (loop.py).
"""

import importlib.util

import loop
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList


def model_class():
    """transformers' own choice; or the copy of its Qwen3 file in this folder, where a patch can change it."""
    if importlib.util.find_spec("modeling") is None:
        return AutoModelForCausalLM
    from modeling import Qwen3ForCausalLM

    return Qwen3ForCausalLM


class Stream(StoppingCriteria):
    """Called by `generate` after each token: hands it on, and says whether to stop."""

    def __init__(self, words):
        self.words = words

    def __call__(self, input_ids, scores, **_):
        last = self.words.put(int(input_ids[0, -1]))
        return torch.tensor([last], device=input_ids.device)


class Engine(loop.Engine):
    """transformers' model and its `generate`."""

    def __init__(self, model_dir, device, max_len, trace_dir):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model, self.device = model_class().from_pretrained(model_dir, dtype=dtype).to(device).eval(), device
        config, ends = self.model.config, self.model.generation_config.eos_token_id
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        self.model.generation_config = GenerationConfig()  # or its defaults fill in what a request leaves out
        about = {"engine": "transformers", "dtype": str(dtype).removeprefix("torch."), "device": device}
        about["attention_backend"] = config._attn_implementation
        super().__init__(model_dir, config.vocab_size, min(max_len, config.max_position_embeddings), ends, trace_dir, about)
        self.marks = loop.Marks(self.model)

    def options(self, body, ends):
        temperature = body.get("temperature", 1.0)
        chosen = {"do_sample": temperature > 0}
        if temperature > 0:
            top_k = body.get("top_k") or 0
            chosen |= {"temperature": temperature, "top_p": body.get("top_p") or 1.0, "top_k": max(0, top_k)}
        most, least = body.get("max_tokens", 16), body.get("min_tokens")
        return GenerationConfig(max_new_tokens=most, min_new_tokens=least, eos_token_id=ends or None, pad_token_id=0, **chosen)

    def complete(self, job):
        ids = torch.tensor([self.check(job.body)], device=self.device)
        if job.body.get("seed") is not None:
            torch.manual_seed(job.body["seed"])
        else:
            torch.seed()
        ends = [] if job.body.get("ignore_eos") else self.ends
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self.options(job.body, ends),
            stopping_criteria=StoppingCriteriaList([Stream(loop.Words(job, self.tokenizer, ends))]),
        )
