"""The plain engine on one NVIDIA GPU: correct against transformers, then timed and traced over HTTP.

    python -m benchmarks.gpu_engine OUT [--part check|time]

Qwen3-8B dimensions, bf16, dummy weights. Prints one JSON line per result, the last with everything; traces go
to OUT. Not for: accepting anything; figures of different machines or sittings do not compare.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from optimizer.start import MODELS
from optimizer.traffic.client import Client, Request

QWEN3_8B: dict[str, Any] = json.loads((MODELS / "qwen3-8b" / "config.json").read_text("utf-8"))


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, QWEN3_8B["vocab_size"], (count, length), generator=generator).tolist()


def check(model_dir: Path) -> dict[str, Any]:
    """Greedy tokens of the engine against transformers on the same weights, teacher-forced."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from engine.config import EngineConfig
    from engine.core import Add, EngineCore
    from engine.ranks import Ranks
    from engine.request import SamplingParams, Sequence
    from engine.worker import Worker

    started = time.perf_counter()
    options = EngineConfig(model=model_dir, device="cuda", load_format="dummy", num_kv_blocks=4000)
    worker = Worker(options, 0, Path("/nonexistent"))
    torch.cuda.synchronize()
    load_s = time.perf_counter() - started
    core = EngineCore(worker, Ranks(options, Path("/nonexistent")), None)
    tokens: dict[int, list[int]] = {}
    core.deliver = lambda outputs: [tokens.setdefault(o.seq_id, []).extend(o.token_ids) for o in outputs] and None

    with torch.device("meta"):
        reference = Qwen3ForCausalLM(Qwen3Config.from_pretrained(model_dir))
    state = {name: p.detach() for name, p in worker.runner.model.named_parameters()}
    missing = reference.load_state_dict(state, strict=False, assign=True)
    config = reference.config
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config).to("cuda")  # float32: stays exact
    reference = reference.eval()

    result: dict[str, Any] = {"load_s": load_s, "missing": list(missing.missing_keys), "cells": []}
    number = 0
    for batch, length, new in ((1, 12, 64), (8, 100, 32), (32, 33, 32), (1, 1024, 32), (2, 4096, 16)):
        wanted = prompts(batch, length, seed=batch * 10_000 + length)
        first = number
        for prompt in wanted:
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new)
            core._handle(Add(Sequence(number, prompt, params)))
            number += 1
        with torch.no_grad():  # only to spare memory here: the server itself runs as it is written
            while core.scheduler.has_work:
                core.step()
        gaps, equal, total, distinct = [], 0, 0, set()
        for i, prompt in enumerate(wanted):
            output = tokens[first + i]
            ids = torch.tensor([prompt + output], device="cuda")
            with torch.inference_mode():
                logits = reference(ids, logits_to_keep=len(output) + 1).logits[0, :-1].float()
            chosen = logits.gather(1, ids[0, -len(output) :, None]).squeeze(1)
            gap = logits.max(dim=-1).values - chosen
            gaps.append(gap.max().item())
            equal += int((gap == 0).sum())
            total += len(output)
            distinct.update(output)
        top2 = logits.topk(2, dim=-1).values
        cell = {
            "batch": batch, "prompt": length, "new": new, "max_gap": max(gaps), "argmax_equal": equal / total,
            "distinct_tokens": len(distinct), "median_top2_gap": (top2[:, 0] - top2[:, 1]).median().item(),
            "logit_std": logits.std().item(),
        }
        result["cells"].append(cell)
        emit({"check": cell})
    return result


def time_server(model_dir: Path, out: Path) -> dict[str, Any]:
    """Decode ms per step at batch 1, 8, 32, time to first token, and traces, over HTTP."""
    socket = Path(tempfile.mkdtemp()) / "s"
    traces = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "engine.serve", "--model", str(model_dir), "--device", "cuda",
               "--load-format", "dummy", "--uds", str(socket), "--trace-dir", str(traces)]
    started = time.perf_counter()
    server = subprocess.Popen(command)
    client = Client(socket_path=socket)
    while not (socket.exists() and client.health()):
        if server.poll() is not None:
            raise SystemExit(f"the engine ended with code {server.returncode}")
        time.sleep(0.2)
    result: dict[str, Any] = {"start_s": time.perf_counter() - started, "metadata": client.metadata()}
    try:
        for batch, length, new in ((1, 12, 64), (8, 12, 32), (32, 12, 32), (1, 1024, 8), (1, 4096, 8)):
            for warm in (True, False):
                requests = [Request(tuple(p), new) for p in prompts(batch, length, seed=batch + length + warm)]
                streams = client.complete(requests, 120.0)
            steps = [b - a for s in streams for a, b in zip(s.arrivals_ns[1:], s.arrivals_ns[2:], strict=False)]
            first = [s.arrivals_ns[0] - s.sent_ns for s in streams]
            cell = {"errors": [s.error for s in streams if s.error], "step_ms": statistics.median(steps) / 1e6,
                    "ttft_ms": statistics.median(first) / 1e6}
            result[f"bs{batch}_p{length}"] = cell
            emit({f"bs{batch}_p{length}": cell})
        for name, length, new in (("decode", 12, 8), ("prefill1024", 1024, 2)):
            client.start_profile(max_steps=new)
            client.complete([Request(tuple(prompts(1, length, 5)[0]), new)], 60.0)
            client.stop_profile()
            newest = max(traces.glob("*.json.gz"), key=lambda p: p.stat().st_mtime)
            newest.rename(out / f"plain_{name}.json.gz")
    finally:
        server.terminate()
        server.wait(30)
    return result


def emit(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def named(text: str, known: Collection[str], what: str) -> list[str]:
    """The names in a comma-separated option. Raises SystemExit with one line for one that is not known."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"no {what} {', '.join(unknown)}; there are: {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", choices=("check", "time"), default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model_dir = Path(tempfile.mkdtemp())
    (model_dir / "config.json").write_text(json.dumps(QWEN3_8B))
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if options.part in (None, "time"):
        result["time"] = time_server(model_dir, options.out)
    if options.part in (None, "check"):
        result["check"] = check(model_dir)
    (options.out / "gpu_engine.json").write_text(json.dumps(result, indent=1))
    emit(result)


if __name__ == "__main__":
    main()
