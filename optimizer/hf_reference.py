"""The Hugging Face reference, in a process of its own: `python -m optimizer.hf_reference SPEC.json`.

Runs transformers' own greedy `generate` on the prompts of the cell, at the same TP and dtype, once to warm up, once
timed without the profiler (the control), once under torch.profiler; writes one Kineto trace per rank and
`about/reference.json`. Each step of `generate`, its host work included, is marked with vLLM's range names. torch and
transformers are imported once and the ranks forked. Not for: judging tokens (oracle.py); it imports no engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class StepMarks(StoppingCriteria):
    """Called once at the end of every step: closes its range and opens the next one's; keeps the times."""

    def __init__(self, batch: int, prompt_tokens: int, marked: bool) -> None:
        self.batch, self.marked = batch, marked
        self.began_ns = time.perf_counter_ns()
        self.ends_ns: list[int] = []
        self.range: Any = None
        self.open(f"execute_context_{batch}({batch * prompt_tokens})_generation_0(0)")

    def open(self, name: str) -> None:
        if self.marked:
            self.range = record_function(name)
            self.range.__enter__()

    def close(self) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.Tensor:  # pyright: ignore
        self.close()
        self.ends_ns.append(time.perf_counter_ns())
        self.open(f"execute_context_0(0)_generation_{self.batch}({self.batch})")
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(model: Any, prompts: torch.Tensor, new_tokens: int, marked: bool) -> StepMarks:
    """Greedy generation of exactly `new_tokens`; returns the marks with one end per step."""
    marks = StepMarks(len(prompts), prompts.shape[1], marked)
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([marks]),
    )
    marks.close()
    return marks


def pace(marks: StepMarks) -> dict[str, float]:
    """Microseconds per decode step, and of the prefill step, host work included."""
    ends = marks.ends_ns
    return {"us_per_token": (ends[-1] - ends[0]) / 1000 / (len(ends) - 1), "prefill_us": (ends[0] - marks.began_ns) / 1000}


def run(spec: dict[str, Any], rank: int) -> None:
    """One rank: load, warm up, control, profile. Rank 0 writes reference.json last, when all traces are there."""
    tp, device = spec["tp"], spec["device"]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if tp > 1:
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": tp, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": spec["port"]}
        os.environ.update({key: str(value) for key, value in here.items()})
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=tp)
        options["tp_plan"] = "auto"
    elif device == "cuda":
        options["device_map"] = "cuda"
    model = AutoModelForCausalLM.from_pretrained(spec["model_dir"], dtype=getattr(torch, spec["dtype"]), **options)
    model.eval()
    prompts = torch.tensor(spec["prompts"], device=f"cuda:{rank}" if device == "cuda" else "cpu")
    generate(model, prompts, spec["new_tokens"], marked=False)
    control = generate(model, prompts, spec["new_tokens"], marked=False)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as profiler:
        traced = generate(model, prompts, spec["new_tokens"], marked=True)
    steps = len(control.ends_ns) - 1
    import transformers

    about = {
        "engine": f"transformers {transformers.__version__} generate",
        "tp": tp,
        "device": device,
        "dtype": spec["dtype"],
        "attention_backend": str(getattr(model.config, "_attn_implementation", "")),
    }
    profiler.add_metadata_json("reference", json.dumps(about | {"rank": rank}))
    if tp == 1:
        profiler.add_metadata_json("distributedInfo", json.dumps({"rank": 0, "world_size": 1}))
    out = Path(spec["out"])
    profiler.export_chrome_trace(str(out / f"rank{rank}.json.gz"))
    if tp > 1:
        torch.distributed.barrier()
    if rank == 0:
        clean = pace(control)
        result = {"metadata": about, "control_us_per_token": clean["us_per_token"], "clean": clean, "traced": pace(traced), "steps": steps}
        (out / "about" / "reference.json").write_text(json.dumps(result, sort_keys=True))
    if tp > 1:
        torch.distributed.destroy_process_group()


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    children = []
    for rank in range(1, spec["tp"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run(spec, rank)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    run(spec, 0)
    return max((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children), default=0)


if __name__ == "__main__":
    sys.exit(main())
