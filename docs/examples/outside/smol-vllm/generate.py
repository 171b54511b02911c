"""Runs requests through smol-vllm's own LLMEngine: its scheduler admits them, its `step` decodes all of them.

smol-vllm decodes greedily, takes any token that equals its padding for padding, and hands the first tokens of new
requests to those that are listed before them. So prompts are handed over one a step, nothing is called padding, and new
requests are listed first: then it answers rightly. It also calls a method that transformers has dropped since. A
temperature is refused. Not for: HTTP (serve.py), jobs and the profiler (loop.py).
"""

import queue

import loop
import modeling
from smol_vllm import LLMEngine, Scheduler
from transformers import AutoModelForCausalLM, DynamicCache

BLOCKS, BLOCK_SIZE, BATCH = 4096, 16, 32


DynamicCache.batch_split = lambda self, full_batch_size, split_size: [self]  # one prompt a step: nothing to split


class NoPadding:
    pad_token_id = eos_token_id = -1


class NewFirst(Scheduler):
    """smol-vllm's scheduler, with the requests that have no token yet listed first, as its engine takes them."""

    def schedule(self):
        chosen = super().schedule()
        chosen.scheduled_groups.sort(key=lambda group: bool(group.sequences[0].output_tokens))
        return chosen


class Engine(loop.Engine):
    """smol-vllm's engine; `AutoModelForCausalLM` finds the Qwen3 file of this folder."""

    def __init__(self, model_dir, device, max_len, trace_dir):
        AutoModelForCausalLM.register(modeling.Qwen3Config, modeling.Qwen3ForCausalLM, exist_ok=True)
        self.engine = LLMEngine(BLOCKS, BLOCK_SIZE, BATCH, use_real_model=True, model_name=str(model_dir), enable_metrics=False)
        self.engine.model.tokenizer = NoPadding()
        self.engine.scheduler = NewFirst(self.engine.block_manager, BATCH)
        model = self.engine.model.model
        config, ends = model.config, model.generation_config.eos_token_id
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        about = {"engine": "smol-vllm", "dtype": "float32", "device": device, "attention_backend": config._attn_implementation}
        super().__init__(model_dir, config.vocab_size, min(max_len, config.max_position_embeddings), ends, trace_dir, about)
        self.marks, self.words = loop.Marks(model), {}

    def run(self):
        """Admit one request that has come, step, hand out; sleep while there is nothing to do."""
        while True:
            if not self.words:
                self.marks.close()
            self.admit(block=not self.words)
            if self.words:
                self.step()

    def admit(self, block):
        """Take one job from the queue: smol-vllm pads prompts of different lengths, so one a step."""
        try:
            job = self.jobs.get(block)
        except queue.Empty:
            return
        if job.kind != "complete":
            while self.words:  # the profiler starts and stops between requests
                self.step()
            self.serve(job)
            return
        ends = [] if job.body.get("ignore_eos") else self.ends
        self.engine.add_request(self.check(job.body), max_tokens=job.body.get("max_tokens", 16), stop_token_ids=ends)
        self.words[self.engine.request_counter - 1] = loop.Words(job, self.tokenizer, ends)

    def check(self, body):
        ids = super().check(body)
        if body.get("temperature", 1.0) != 0:
            raise loop.Refused("this engine decodes greedily: temperature must be 0")
        if body.get("min_tokens") and not body.get("ignore_eos"):
            raise loop.Refused("this engine takes no token away: min_tokens needs ignore_eos")
        return ids

    def step(self):
        for out in self.engine.step():
            words = self.words[out.group_id]
            if words.put(out.output_tokens[-1]) or out.finished:
                words.job.events.put(None)
                del self.words[out.group_id], self.engine.groups[out.group_id]
                if not out.finished:
                    self.drop(out.group_id)

    def drop(self, group_id):
        """A client that has hung up, or a stop word: forget the request as the engine does at its end."""
        running = self.engine.scheduler.running
        running[:] = [g for g in running if g.group_id != group_id]
        self.engine.block_manager.free(group_id)
        self.engine.model.clear_cache(group_id)
