"""The oracle's own process: transformers' model, answering questions about token streams.

Reads length-prefixed msgpack requests from standard input and answers on standard output. Imports neither the
engine nor anything of ours. Every answer is computed by a full forward pass without a key-value cache over prompt and
generated tokens (`score`, `logprobs`, `distribution`), so that it shares no decode path with what it judges.

Not for: verdicts; it returns numbers, `oracle.py` turns them into bands.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

import msgspec
import numpy as np
import torch

MAX_TOKENS_PER_FORWARD = 8192
MAX_ROWS_PER_HEAD = 512


class Worker:
    def __init__(self, device: str, dtype: str) -> None:
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        self.models: dict[str, Any] = {}
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.set_grad_enabled(False)

    def load(self, model_dir: str, keep: int) -> Any:
        """The model of a directory; at most `keep` stay in memory, the least recently used goes first."""
        if model_dir in self.models:
            self.models[model_dir] = self.models.pop(model_dir)
            return self.models[model_dir]
        from transformers import AutoModelForCausalLM

        while len(self.models) >= keep:
            self.models.pop(next(iter(self.models)))
        if self.device.type == "cpu":
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=self.dtype, local_files_only=True)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype="auto", local_files_only=True, device_map=self.device
            )
            if self.dtype == torch.float32:
                widen(model)
        self.models[model_dir] = model.eval()
        return self.models[model_dir]

    def rows(self, model: Any, prompts: list[list[int]], outputs: list[list[int]]):
        """Yields (stream, hidden [outputs, H]): the states from which each output token was to be chosen."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(outputs[i]))
        batch: list[int] = []
        for i in [*order, None]:
            longest = 0 if i is None else len(prompts[i]) + len(outputs[i])
            if batch and (i is None or longest * (len(batch) + 1) > MAX_TOKENS_PER_FORWARD):
                yield from self._forward(model, batch, prompts, outputs)
                batch = []
            if i is not None and outputs[i]:
                batch.append(i)

    def _forward(self, model: Any, batch: list[int], prompts: list[list[int]], outputs: list[list[int]]):
        # What is no token counts as token 0 here: the verdict on it is its own, and those after it need a context.
        vocabulary = model.config.vocab_size
        full = [[t if t < vocabulary else 0 for t in prompts[i] + outputs[i][:-1]] for i in batch]
        width = max(len(ids) for ids in full)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        for row, tokens in enumerate(full):  # padded on the right: a causal model never looks there
            ids[row, : len(tokens)] = torch.tensor(tokens)
        hidden = model.model(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        for row, i in enumerate(batch):
            first = len(prompts[i]) - 1
            yield i, hidden[row, first : first + len(outputs[i])]

    def logits(self, model: Any, hidden: torch.Tensor):
        for start in range(0, len(hidden), MAX_ROWS_PER_HEAD):
            yield start, model.lm_head(hidden[start : start + MAX_ROWS_PER_HEAD]).float()

    def score(
        self, model: Any, prompts: list[list[int]], outputs: list[list[int]], **_: Any
    ) -> dict[str, Any]:
        """Per stream: `gaps` (top logit minus the emitted token's, >= 0) and `best` (the oracle's tokens)."""
        gaps: list[list[float]] = [[] for _ in outputs]
        best: list[list[int]] = [[] for _ in outputs]
        for i, hidden in self.rows(model, prompts, outputs):
            for start, logits in self.logits(model, hidden):
                top, arg = logits.max(dim=-1)
                emitted = torch.tensor(outputs[i][start : start + len(logits)], device=logits.device)
                inside = emitted.clamp(max=logits.shape[-1] - 1)
                gap = top - logits.gather(1, inside[:, None])[:, 0]
                gap[emitted >= logits.shape[-1]] = float("inf")
                gaps[i] += gap.tolist()
                best[i] += arg.tolist()
        return {"gaps": gaps, "best": best}

    def logprobs(
        self,
        model: Any,
        prompts: list[list[int]],
        outputs: list[list[int]],
        wanted: list[list[list[int]]],
        **_: Any,
    ) -> dict[str, Any]:
        """Per stream and position: log-probabilities of the `wanted` ids, and of the best token."""
        values: list[list[list[float]]] = [[] for _ in outputs]
        for i, hidden in self.rows(model, prompts, outputs):
            for start, logits in self.logits(model, hidden):
                table = torch.log_softmax(logits, dim=-1).cpu()
                for row in range(len(table)):
                    values[i].append(table[row, wanted[i][start + row]].tolist())
        return {"values": values}

    def mass(
        self, model: Any, prompts: list[list[int]], outputs: list[list[int]], temperature: float, **_: Any
    ) -> dict[str, Any]:
        """Per stream and position: (mass of all likelier tokens, the token's own mass) at `temperature`."""
        values: list[list[tuple[float, float]]] = [[] for _ in outputs]
        for i, hidden in self.rows(model, prompts, outputs):
            for start, logits in self.logits(model, hidden):
                table = torch.softmax(logits.double() / temperature, dim=-1).cpu()
                for row, probabilities in enumerate(table):
                    token = outputs[i][start + row]
                    own = probabilities[token] if token < len(probabilities) else probabilities.new_zeros(())
                    above = probabilities[probabilities > own].sum()
                    values[i].append((float(above), float(own)))
        return {"values": values}

    def distribution(self, model: Any, prompts: list[list[int]], **_: Any) -> dict[str, Any]:
        """float32 logits [prompts, vocabulary] of the token after each prompt."""
        rows = [np.empty(0, dtype=np.float32)] * len(prompts)
        for i, hidden in self.rows(model, prompts, [[0]] * len(prompts)):
            rows[i] = model.lm_head(hidden[-1:]).float()[0].cpu().numpy()
        table = np.stack(rows)
        return {"logits": table.tobytes(), "vocabulary": int(table.shape[1])}

    def generate(self, model: Any, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        """`n` greedy tokens after each prompt (end-of-text does not stop), with the model's own cache."""
        out = []
        for prompt in prompts:
            ids, cache = torch.tensor([prompt], device=self.device), None
            tokens: list[int] = []
            for _step in range(n):
                result = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = result.past_key_values
                ids = result.logits[:, -1:].argmax(dim=-1)
                tokens.append(int(ids))
            out.append(tokens)
        return {"tokens": out}

    def machine(self, model: Any, bytes_read: int, **_: Any) -> dict[str, Any]:
        """What one rank of this machine can do at best: `bytes_s` (reading `bytes_read` over and over), `flops_s`."""
        kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        data = torch.ones(max(1, bytes_read // kind.itemsize), dtype=kind, device=self.device)
        square = torch.ones(
            (1024, 1024) if self.device.type == "cpu" else (8192, 8192), dtype=kind, device=self.device
        )
        read_s = self._best(lambda: data.sum())
        product_s = self._best(lambda: square @ square)
        return {"bytes_s": data.nbytes / read_s, "flops_s": 2 * square.shape[0] ** 3 / product_s}

    def _best(self, work: Any, repeats: int = 7) -> float:
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)


def widen(model: Any) -> None:
    """Compute in float32 on weights that stay in 16 bits: each use widens its weight for the moment.

    Exact, and half the memory: three models of a run fit beside the candidate. Other parameters (norms) are small and
    become float32 themselves.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.forward = functools.partial(_wide_forward, module)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()


def _wide_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, torch.nn.Embedding):
        return torch.nn.functional.embedding(x, module.weight).float()
    bias = None if module.bias is None else module.bias.float()
    return torch.nn.functional.linear(x.float(), module.weight.float(), bias)


def choose(model_dir: str, device: str, dtype: str) -> str:
    """float32 where its weights, kept as stored, fit beside the candidate (a third of a GPU's free memory), else bfloat16."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    with os.scandir(model_dir) as entries:
        stored = sum(e.stat().st_size for e in entries if e.name.endswith(".safetensors"))
    free, _ = torch.cuda.mem_get_info()
    return "float32" if stored < free / 3 else "bfloat16"


def serve(source: Any, sink: Any) -> None:
    """Answer requests until standard input ends. An exception becomes an answer with `error`."""
    worker: Worker | None = None
    while head := source.read(4):
        request = msgspec.msgpack.decode(source.read(int.from_bytes(head, "big")))
        answer: dict[str, Any]
        try:
            if worker is None:
                dtype = choose(request["model_dir"], request["device"], request["dtype"])
                worker = Worker(request["device"], dtype)
            model = worker.load(request.pop("model_dir"), request.pop("keep", 3))
            ask = request.pop("ask")
            answer = {} if ask == "load" else getattr(worker, ask)(model, **request)
            answer["dtype"] = str(worker.dtype).removeprefix("torch.")
        except Exception as error:  # noqa: BLE001  whatever fails here is the oracle's answer to its parent
            answer = {"error": f"{type(error).__name__}: {error}"}
        data = msgspec.msgpack.encode(answer)
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not break the protocol
    serve(sys.stdin.buffer, answers)
