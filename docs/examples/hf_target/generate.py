"""Runs requests through transformers' `generate`, one at a time, on the thread that owns the model and the profiler.

Every forward pass, with the host work up to the next one, is marked with vLLM's range names, so that one rule reads
steps in every trace. Not for: HTTP (serve.py).
"""

import json
import queue
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList


class Refused(Exception):
    """A request that cannot be served; becomes a 400."""


class Job:
    """One request on its way: what is asked, and a queue on which its events arrive. `gone` is set on hang-up."""

    def __init__(self, kind, body):
        self.kind, self.body, self.events, self.gone = kind, body, queue.Queue(), False


class Marks:
    """Names the steps in a trace: a forward pass opens a range that the next one, or the end, closes."""

    def __init__(self, model):
        self.open = None
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def before_forward(self, module, args, kwargs):
        tokens = kwargs["input_ids"].shape[1]
        name = f"execute_context_1({tokens})_generation_0(0)" if self.open is None else "execute_context_0(0)_generation_1(1)"
        self.close()
        self.open = record_function(name)
        self.open.__enter__()

    def close(self):
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


class Stream(StoppingCriteria):
    """Called by `generate` after each token: hands it on, says why it is the last one, and whether to stop."""

    def __init__(self, job, prompt_tokens, tokenizer, ends):
        stop = job.body.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else stop
        self.job, self.start, self.tokenizer, self.ends = job, prompt_tokens, tokenizer, ends
        self.limit, self.sent = job.body.get("max_tokens", 16), 0

    def __call__(self, input_ids, scores, **_):
        ids = input_ids[0, self.start :].tolist()
        text = self.tokenizer.decode(ids) if self.tokenizer else "".join(f" {i}" for i in ids)
        stopped = any(word in text for word in self.stop)
        reason = "stop" if stopped or ids[-1] in self.ends else "length" if len(ids) == self.limit else None
        # Part of a character waits for the rest of it.
        ready = text if reason or not text.endswith("\ufffd") else text[:-3]
        self.job.events.put({"index": 0, "text": ready[self.sent :], "token_ids": ids[-1:], "finish_reason": reason})
        self.sent = max(self.sent, len(ready))
        return torch.tensor([stopped or self.job.gone], device=input_ids.device)


class Engine:
    """The model, and the loop that serves jobs until the process ends."""

    def __init__(self, model_dir, device, max_len, trace_dir):
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=self.dtype).to(device).eval()
        config = self.model.config
        self.vocabulary, self.max_len = config.vocab_size, min(max_len, config.max_position_embeddings)
        ends = self.model.generation_config.eos_token_id
        self.ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        self.model.generation_config = GenerationConfig()  # or its defaults fill in what a request leaves out
        words = Path(model_dir, "tokenizer.json")
        self.tokenizer = Tokenizer.from_file(str(words)) if words.is_file() else None
        self.device, self.trace_dir, self.starts, self.profiler = device, trace_dir, 0, None
        self.jobs, self.marks = queue.Queue(), Marks(self.model)
        self.metadata = {
            "engine": "transformers",
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": device,
            "tp": 1,
            "attention_backend": config._attn_implementation,
            "cuda_graph": False,
            "max_model_len": self.max_len,
        }

    def run(self):
        """The thread that calls this owns the profiler: it records what its own thread does."""
        while True:
            job = self.jobs.get()
            try:
                {"complete": self.complete, "start_profile": self.start_profile, "stop_profile": self.stop_profile}[job.kind](job)
                job.events.put(None)
            except Exception as error:  # noqa: BLE001  (one bad request must not end the server)
                job.events.put(error)
            finally:
                self.marks.close()

    def check(self, body):
        """The prompt's token ids. Raises Refused."""
        ids, count = body.get("prompt"), body.get("max_tokens", 16)
        if isinstance(ids, str) and self.tokenizer:
            ids = self.tokenizer.encode(ids).ids
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < self.vocabulary for i in ids):
            raise Refused("prompt must be text or a list of token ids")
        if type(count) is not int or count < 1 or len(ids) + count > self.max_len:
            raise Refused(f"prompt and max_tokens must fit into {self.max_len} tokens")
        for name, low, high in (("temperature", 0, 100), ("top_p", 0, 1), ("top_k", -1, 1e9)):
            value = body.get(name)
            if value is not None and (not isinstance(value, int | float) or not low <= value <= high):
                raise Refused(f"{name} must lie between {low} and {high}")
        return ids

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
            stopping_criteria=StoppingCriteriaList([Stream(job, ids.shape[1], self.tokenizer, ends)]),
        )

    def start_profile(self, job):
        if self.profiler is not None:
            raise Refused("the profiler is on already")
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device == "cuda" else [])
        self.profiler = profile(
            activities=activities,
            record_shapes=bool(job.body.get("record_shapes")),
            with_stack=bool(job.body.get("with_stack")),
        )
        self.profiler.start()

    def stop_profile(self, job):
        if self.profiler is None:
            raise Refused("the profiler is off")
        active, self.profiler = self.profiler, None
        active.add_metadata_json("engine", json.dumps(self.metadata))
        active.add_metadata_json("distributedInfo", json.dumps({"rank": 0, "world_size": 1}))
        active.stop()
        active.export_chrome_trace(str(Path(self.trace_dir, f"rank0.{self.starts}.pt.trace.json.gz")))
        self.starts += 1
