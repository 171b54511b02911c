"""What every engine behind `serve.py` needs: jobs from HTTP, one thread that owns the model, and its profiler.

An engine of your own derives from `Engine` and writes `complete`. Not for: HTTP (serve.py), or any one model
(generate.py).
"""

import json
import queue
from pathlib import Path

from tokenizers import Tokenizer
from torch.profiler import ProfilerActivity, profile, record_function


class Refused(Exception):
    """A request that cannot be served; becomes a 400."""


class Job:
    """One request on its way: what is asked, and a queue on which its events arrive. `gone` is set on hang-up."""

    def __init__(self, kind, body):
        self.kind, self.body, self.events, self.gone = kind, body, queue.Queue(), False


class Marks:
    """Names the steps in a trace: a forward pass opens a range that the next one, or the end, closes.

    `argument`: the keyword under which the model gets its token ids [batch, tokens]; the first positional one else.
    """

    def __init__(self, model, argument="input_ids"):
        self.open, self.argument = None, argument
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def before_forward(self, module, args, kwargs):
        ids = kwargs[self.argument] if self.argument in kwargs else args[0]
        tokens = ids.shape[1]
        first = self.open is None or tokens > 1
        self.close()
        self.open = record_function(f"execute_context_1({tokens})_generation_0(0)" if first else "execute_context_0(0)_generation_1(1)")
        self.open.__enter__()

    def close(self):
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


class Words:
    """Turns the tokens of one request into events, one a token, and says when the request is over."""

    def __init__(self, job, tokenizer, ends):
        stop = job.body.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else stop
        self.job, self.tokenizer, self.ends = job, tokenizer, ends
        self.limit, self.sent, self.ids = job.body.get("max_tokens", 16), 0, []

    def put(self, token):
        """Hand one token on; True when it is the last."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids) if self.tokenizer else "".join(f" {i}" for i in self.ids)
        stopped = [text.index(word) for word in self.stop if word in text]
        text = text[: min(stopped)] if stopped else text
        reason = "stop" if stopped or token in self.ends else "length" if len(self.ids) == self.limit else None
        # Part of a character waits for the rest of it, and so does what may begin a stop string.
        late = max((len(word) for word in self.stop), default=1) - 1
        ready = text if reason else text[: len(text) - max(late, 3 if text.endswith("\ufffd") else 0)]
        self.job.events.put({"index": 0, "text": ready[self.sent :], "token_ids": [token], "finish_reason": reason})
        self.sent = max(self.sent, len(ready))
        return reason is not None or self.job.gone


class Engine:
    """The loop that serves jobs until the process ends. `metadata` is what /v1/models says about the choices made."""

    def __init__(self, model_dir, vocabulary, max_len, ends, trace_dir, metadata):
        words = Path(model_dir, "tokenizer.json")
        self.tokenizer = Tokenizer.from_file(str(words)) if words.is_file() else None
        self.vocabulary, self.max_len, self.ends = vocabulary, max_len, ends
        self.trace_dir, self.starts, self.profiler = trace_dir, 0, None
        self.jobs, self.marks = queue.Queue(), None
        self.metadata = {"tp": 1, "cuda_graph": False, "max_model_len": max_len} | metadata

    def complete(self, job):
        """Answer one request: `Words(job, ...).put(token)` for every token, until that is true."""
        raise NotImplementedError

    def run(self):
        """The thread that calls this owns the profiler: it records what its own thread does."""
        while True:
            self.serve(self.jobs.get())

    def serve(self, job):
        try:
            {"complete": self.complete, "start_profile": self.start_profile, "stop_profile": self.stop_profile}[job.kind](job)
            job.events.put(None)
        except Exception as error:  # noqa: BLE001  (one bad request must not end the server)
            job.events.put(error)
        finally:
            if self.marks:
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

    def start_profile(self, job):
        if self.profiler is not None:
            raise Refused("the profiler is on already")
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.metadata["device"] == "cuda" else [])
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
