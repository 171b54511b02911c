"""Which sizes of the products of few rows make a whole decode step fastest on this GPU: for choosing the skills' sizes.

    python -m benchmarks.gpu_kernels OUT TREE [--batch 1] [--share 1] [--context 140] [--seconds 150]

TREE as for `benchmarks.gpu_step`, with both patches of `skinny-gemm` in it. Its products run by the kernels below, one changed after
the other, the best kept, then once more round the best: milliseconds of a replay beside those of the tree's own in turns, and their
ratio. A product by itself says too little: in a step it begins while another kernel ends, which it may hold up. `--share 2` is what one of two ranks
computes, without sums between them. Not for: claims about an engine, or for choosing anything at run time.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu_engine import QWEN3_8B, emit
from benchmarks.gpu_step import Made, milliseconds, runner_of, step_of, with_config

OFF = 0.08  # of the largest logit, by which a changed order of sums may move one
KEEP = 0.9985  # of the time before: less is noise


@triton.jit
def one_row(x, weight, out, outputs, inputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, EVICT: tl.constexpr,
            ROLLED: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    n, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    inside, at = (n < outputs)[:, None], weight + n[:, None] * K + k[None, :]
    part = tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    acc = tl.zeros([ROWS, STEP // FOLD], tl.float32)
    if AHEAD:  # the next weights are on their way before these are used
        for start in range(STEP, inputs if ROLLED else K, STEP):
            following = tl.load(at + start, mask=inside, other=0.0, eviction_policy=EVICT)
            acc += folded(tl.load(x + start - STEP + k).to(tl.float32)[None, :] * part.to(tl.float32), ROWS, STEP, FOLD)
            part = following
        acc += folded(tl.load(x + K - STEP + k).to(tl.float32)[None, :] * part.to(tl.float32), ROWS, STEP, FOLD)
    else:
        acc += folded(tl.load(x + k).to(tl.float32)[None, :] * part.to(tl.float32), ROWS, STEP, FOLD)
        for start in range(STEP, inputs if ROLLED else K, STEP):
            value = tl.load(x + start + k).to(tl.float32)[None, :]
            acc += folded(value * tl.load(at + start, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32), ROWS, STEP, FOLD)
    tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < outputs)


@triton.jit
def gated_row(x, weight, out, outputs, inputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, EVICT: tl.constexpr,
              ROLLED: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    n, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    kind = out.dtype.element_ty
    gate_at = weight + n[:, None] * K + k[None, :]
    up_at = gate_at + outputs * K
    gate, up = tl.load(gate_at, eviction_policy=EVICT), tl.load(up_at, eviction_policy=EVICT)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    gates, ups = tl.zeros([ROWS, STEP // FOLD], tl.float32), tl.zeros([ROWS, STEP // FOLD], tl.float32)
    if AHEAD:
        for start in range(STEP, inputs if ROLLED else K, STEP):
            next_gate, next_up = tl.load(gate_at + start, eviction_policy=EVICT), tl.load(up_at + start, eviction_policy=EVICT)
            value = tl.load(x + start - STEP + k).to(tl.float32)[None, :]
            gates += folded(value * gate.to(tl.float32), ROWS, STEP, FOLD)
            ups += folded(value * up.to(tl.float32), ROWS, STEP, FOLD)
            gate, up = next_gate, next_up
        value = tl.load(x + K - STEP + k).to(tl.float32)[None, :]
        gates += folded(value * gate.to(tl.float32), ROWS, STEP, FOLD)
        ups += folded(value * up.to(tl.float32), ROWS, STEP, FOLD)
    else:
        value = tl.load(x + k).to(tl.float32)[None, :]
        gates += folded(value * gate.to(tl.float32), ROWS, STEP, FOLD)
        ups += folded(value * up.to(tl.float32), ROWS, STEP, FOLD)
        for start in range(STEP, inputs if ROLLED else K, STEP):
            value = tl.load(x + start + k).to(tl.float32)[None, :]
            gates += folded(value * tl.load(gate_at + start, eviction_policy=EVICT).to(tl.float32), ROWS, STEP, FOLD)
            ups += folded(value * tl.load(up_at + start, eviction_policy=EVICT).to(tl.float32), ROWS, STEP, FOLD)
    g, u = tl.sum(gates, 1).to(kind).to(tl.float32), tl.sum(ups, 1).to(kind).to(tl.float32)
    tl.store(out + n, ((g / (1 + tl.exp(-g))).to(kind).to(tl.float32) * u).to(kind))


@triton.jit
def folded(values, ROWS: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr):
    """Sums of FOLD neighbours, which one thread holds: fewer registers until the end."""
    return tl.sum(tl.reshape(values, (ROWS, STEP // FOLD, FOLD)), 2) if FOLD > 1 else values


@triton.jit(do_not_specialize=["rows"])
def few_rows(x, weight, out, rows, outputs, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr):
    n, m, k = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.arange(0, M), tl.arange(0, STEP)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    inside, real = (n < outputs)[None, :], (m < rows)[:, None]
    acc = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        value = tl.load(x + m[:, None] * K + start + k[None, :], mask=real, other=0.0)
        acc = tl.dot(value, tl.load(weight + n[None, :] * K + start + k[:, None], mask=inside, other=0.0, eviction_policy=EVICT), acc)
    tl.store(out + m[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=real & inside)


@dataclasses.dataclass(frozen=True)
class One:
    """How a product of one row runs."""

    rows: int
    step: int
    warps: int
    fold: int = 1
    first_out: bool = False  # weights leave the L1 cache first
    rolled: bool = False  # the loop's end is a number of the launch, so it is not unrolled
    ahead: bool = False  # weights are loaded one step ahead

    def run(self, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
        """x [1, k], weight [n, k] -> [1, n], or of a gated product [1, n / 2]."""
        outputs, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        out = x.new_empty((1, outputs))
        (gated_row if gated else one_row)[(triton.cdiv(outputs, self.rows),)](
            x, weight, out, outputs, inputs, K=inputs, ROWS=self.rows, STEP=self.step, FOLD=self.fold, EVICT="evict_first" if self.first_out else "",
            ROLLED=self.rolled and inputs > self.step, AHEAD=self.ahead, launch_pdl=True, num_warps=self.warps,
        )  # fmt: skip
        return out


@dataclasses.dataclass(frozen=True)
class Few:
    """How a product of up to 32 rows runs."""

    outputs: int
    step: int
    stages: int = 4
    warps: int = 4
    first_out: bool = False

    def run(self, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
        rows, (outputs, inputs) = x.shape[0], weight.shape
        out = x.new_empty((rows, outputs))
        few_rows[(triton.cdiv(outputs, self.outputs),)](
            x, weight, out, rows, outputs, K=inputs, M=16 if rows <= 16 else 32, N=self.outputs, STEP=self.step, STAGES=self.stages,
            EVICT="evict_first" if self.first_out else "", launch_pdl=True, num_warps=self.warps,
        )  # fmt: skip
        return out


WHOLE = [One(2, 4096, 8), One(1, 4096, 8), One(4, 4096, 8, 8), One(2, 4096, 4, 8), One(4, 2048, 8), One(4, 2048, 4), One(4, 2048, 8, 8, False, True, True)]
CHOICES: dict[str, list[One]] = {
    "down": [One(1, 4096, 8, 8, False, True), One(1, 4096, 8, 8, False, True, True), One(1, 2048, 8, 8, False, True, True), One(2, 2048, 8, 8, False, True, True),
             One(4, 2048, 4, 8, True, True), One(4, 2048, 4, 8, False, True, True), One(1, 2048, 4, 8, False, True, True), One(1, 1024, 8, 1, True),
             One(1, 1024, 8, 1, False, True, True), One(2, 1024, 4, 8, False, True, True), One(1, 1024, 8, 1, False, False, True)],
    "o": WHOLE,
    "qkv": [One(4, 2048, 4), One(4, 2048, 8, 8, False, False), One(4, 2048, 4, 8, False, True, True), One(4, 1024, 4, 8, False, True, True),
            One(2, 2048, 4, 8, False, True, True), One(2, 4096, 8), One(1, 4096, 4, 8), One(4, 2048, 4, 1, False, False, True)],
    "gated": [One(1, 512, 8, 1, True), One(1, 512, 8, 1, True, False, True), One(1, 512, 8, 1, False, False, True), One(1, 1024, 4, 8, True, True, True),
              One(1, 1024, 8, 1, True, False, True), One(1, 2048, 4, 8, True), One(1, 1024, 8, 4, True, True, True), One(2, 512, 8, 1, True, False, True),
              One(1, 512, 4, 4, True, True, True)],
    "head": [One(1, 1024, 8, 1, True), One(1, 1024, 8, 1, True, False, True), One(1, 2048, 4, 8, True, True, True), One(1, 4096, 4, 8, True)],
}  # fmt: skip
MORE: dict[str, list[Few]] = {
    "o": [Few(32, 512), Few(32, 256), Few(16, 512), Few(32, 512, 4, 4, True)],
    "down": [Few(32, 512), Few(32, 512, 4, 4, True), Few(16, 512), Few(32, 256)],
    "qkv": [Few(64, 256), Few(32, 512), Few(64, 256, 4, 4, True), Few(64, 128)],
    "gated": [Few(64, 128), Few(64, 256, 3), Few(64, 128, 4, 4, True), Few(64, 128, 4, 8)],
    "head": [Few(64, 128), Few(64, 128, 4, 4, True)],
}


def shapes(share: int) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of each product of one of `share` ranks; gate and up are one."""
    c = QWEN3_8B
    hidden, inner, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    return {"qkv": ((q + 2 * kv) // share, hidden), "o": (hidden, q // share), "gated": (2 * inner // share, hidden),
            "down": (hidden, inner // share), "head": (-(-c["vocab_size"] // share), hidden)}  # fmt: skip


def near(best: One | Few) -> list[One | Few]:
    """The best with one thing changed."""
    if isinstance(best, Few):
        return [dataclasses.replace(best, stages=n) for n in (3, 5)]
    flipped = [dataclasses.replace(best, **{name: not getattr(best, name)}) for name in ("first_out", "rolled", "ahead")]
    return [*flipped, dataclasses.replace(best, fold=1 if best.fold > 1 else 8)]


def compile_some(jobs: list[tuple[str, One | Few]], batch: int, share: int) -> None:
    """Run each kernel once: its binary goes to the cache on disk that all processes share."""
    for name, how in jobs:
        outputs, inputs = shapes(share)[name]
        x, weight = (torch.zeros(n, inputs, dtype=torch.bfloat16, device="cuda") for n in (batch, outputs))
        try:
            how.run(x, weight, name == "gated")
        except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
            emit({"product": name, "how": str(how), "error": type(error).__name__})


class Search:
    """The tree's step as it is, and with its products run by what is chosen here."""

    def __init__(self, made: Made, table: dict[str, One | Few], options: argparse.Namespace) -> None:
        self.made, self.table, self.options = made, table, options
        self.own = self.step()
        self.logits = self.read(self.own)
        for _ in range(6):
            milliseconds(self.own.graph)  # clocks rise
        names = {shape: name for name, shape in shapes(options.share).items()}
        made.skinny.launch = made.skinny.launch_few = lambda x, weight: self.run(names[tuple(weight.shape)], x, weight, False)
        if options.batch == 1:
            made.skinny.gated = lambda x, weight, silu_mul: self.run("gated", x, weight, True)

    def run(self, name: str, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
        return self.table[name].run(x, weight, gated)

    def step(self) -> Any:
        """Recorded anew, with the products as they are chosen now."""
        self.made.runner.graphs.steps.clear()
        return step_of(self.made, self.options.batch, self.options.context)

    def read(self, step: Any) -> torch.Tensor:
        step.graph.replay()
        torch.cuda.synchronize()
        return step.logits.float().clone()

    def ratio(self, name: str, how: One | Few) -> float:
        """Time over the tree's own; infinite for one that fails, or whose logits are others."""
        try:
            step = self.step()
            off = ((self.read(step) - self.logits).abs().max() / self.logits.abs().max()).item()
        except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
            emit({"product": name, "how": str(how), "error": f"{type(error).__name__}: {error}"[:200]})
            return float("inf")
        own, new = [], []
        for _ in range(10):
            own.append(milliseconds(self.own.graph))
            new.append(milliseconds(step.graph))
        found = statistics.median(b / a for a, b in zip(own, new, strict=True))
        emit({"product": name, "how": str(how), "ms": round(statistics.median(new), 4), "own": round(statistics.median(own), 4), "ratio": round(found, 4), "off": round(off, 3)})
        return found if off < OFF else float("inf")

    def best(self, name: str, choices: list[One | Few], deadline: float) -> None:
        """Keep the choice that makes the step fastest."""
        before = self.table[name]
        top = self.ratio(name, before) * KEEP, before
        for how in choices:
            if time.monotonic() < deadline and how != before and shapes(self.options.share)[name][1] % how.step == 0:
                self.table[name] = how
                top = min(top, (self.ratio(name, how), how), key=lambda t: t[0])
        self.table[name] = top[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--share", type=int, default=1, help="ranks that the model is cut for; one of them is timed")
    parser.add_argument("--context", type=int, default=140)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    options = parser.parse_args()
    began = time.monotonic()
    choices: dict[str, list[One | Few]] = {name: list(found) for name, found in (CHOICES if options.batch == 1 else MORE).items()}
    table = {name: found[0] for name, found in choices.items()}
    sizes = shapes(options.share)
    jobs = [(name, how) for name, found in choices.items() for how in {*found, *near(found[0])} if sizes[name][1] % how.step == 0]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.starmap(compile_some, [(jobs[i :: options.processes], options.batch, options.share) for i in range(options.processes)])
    emit({"compiled": len(jobs), "s": round(time.monotonic() - began, 1)})
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        made = runner_of(options.tree, with_config(place), (options.batch,), options.share)
        search = Search(made, table, options)
        order = ("down", "o", "qkv", "gated", "head")
        for name in order:
            search.best(name, choices[name], began + 0.75 * options.seconds)
        for name in order:
            search.best(name, near(table[name]), began + options.seconds)
        for name in order:
            emit({"product": name, "chosen": str(table[name])})
        search.ratio("all as chosen", table["o"])


if __name__ == "__main__":
    main()
