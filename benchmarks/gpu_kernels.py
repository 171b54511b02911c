"""Which sizes of the products of few rows make a whole decode step fastest on this GPU: for choosing the skills' sizes.

    python -m benchmarks.gpu_kernels OUT TREE [--batch 1] [--share 1] [--context 140] [--seconds 150]

TREE as for `benchmarks.gpu_step`, with both patches of `skinny-gemm` in it. Its products run by the kernels below, one changed after
the other, the best kept, then once more round the best: milliseconds of a replay beside those of the tree's own in turns, and their
ratio. A product by itself says too little: in a step it begins while another kernel ends, which it may hold up. `--share 2` is what one of two ranks
computes, without sums between them. Not for: claims about an engine, or for choosing anything at run time.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu_engine import QWEN3_8B, emit, named
from benchmarks.gpu_step import Made, milliseconds, modules, runner_of, step_of, with_config, with_graphs

OFF = 0.08  # of the largest logit, by which a changed order of sums may move one
KEEP = 0.9985  # of the time before: less is noise
TO_L2 = tl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, $3; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


@triton.jit
def to_l2(at, size, threads):
    """Ask for `size` bytes (a multiple of 16) from each address of `at` on to come to L2; the first `threads` threads ask, one by one."""
    tl.inline_asm_elementwise(TO_L2, "=r,l,r,r", [at, size, threads], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def rows_to_l2(weight, n, outputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, LATER: tl.constexpr):
    """The first programs start while the kernel before ends. Each asks for the rest of its rows, or for the rows of a program
    that cannot have started: the memory is idle then. `n`: its first row."""
    if tl.program_id(0) < FIRST:
        start = n + FIRST * ROWS if LATER else n
        if start + ROWS <= outputs:
            to_l2(weight + start * K + (0 if LATER else STEP), (K if LATER else K - STEP) * 2 * ROWS, 1)


@triton.jit
def one_row(x, weight, out, outputs, inputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, EVICT: tl.constexpr,
            ROLLED: tl.constexpr, FIRST: tl.constexpr, LATER: tl.constexpr):  # fmt: skip
    n, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    inside, at = (n < outputs)[:, None], weight + n[:, None] * K + k[None, :]
    part = tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT)
    if FIRST:
        rows_to_l2(weight, tl.program_id(0).to(tl.int64) * ROWS, outputs, K, ROWS, STEP, FIRST, LATER)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    acc = folded(tl.load(x + k).to(tl.float32)[None, :] * part.to(tl.float32), ROWS, STEP, FOLD)
    for start in range(STEP, inputs if ROLLED else K, STEP):
        value = tl.load(x + start + k).to(tl.float32)
        acc += folded(value[None, :] * tl.load(at + start, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32), ROWS, STEP, FOLD)
    tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < outputs)


@triton.jit
def gated_row(x, weight, out, outputs, inputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, EVICT: tl.constexpr,
              ROLLED: tl.constexpr, FIRST: tl.constexpr, LATER: tl.constexpr):  # fmt: skip
    n, k = tl.program_id(0).to(tl.int64), tl.arange(0, STEP)
    kind = out.dtype.element_ty
    gate_at, up_at = weight + n * K + k, weight + (n + outputs) * K + k
    gate, up = tl.load(gate_at, eviction_policy=EVICT), tl.load(up_at, eviction_policy=EVICT)
    if FIRST:
        rows_to_l2(weight, n, outputs, K, 1, STEP, FIRST, LATER)
        rows_to_l2(weight + outputs * K, n, outputs, K, 1, STEP, FIRST, LATER)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    value = tl.load(x + k).to(tl.float32)
    gates, ups = folded(value * gate.to(tl.float32), 0, STEP, FOLD), folded(value * up.to(tl.float32), 0, STEP, FOLD)
    for start in range(STEP, inputs if ROLLED else K, STEP):
        value = tl.load(x + start + k).to(tl.float32)
        gates += folded(value * tl.load(gate_at + start, eviction_policy=EVICT).to(tl.float32), 0, STEP, FOLD)
        ups += folded(value * tl.load(up_at + start, eviction_policy=EVICT).to(tl.float32), 0, STEP, FOLD)
    g, u = tl.sum(gates, 0).to(kind).to(tl.float32), tl.sum(ups, 0).to(kind).to(tl.float32)
    tl.store(out + n, ((g / (1 + tl.exp(-g))).to(kind).to(tl.float32) * u).to(kind))


@triton.jit
def folded(values, ROWS: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr):
    """Sums of FOLD neighbours, which one thread holds: fewer registers until the end. ROWS 0: of a vector."""
    if FOLD > 1 and ROWS == 0:
        values = tl.sum(tl.reshape(values, (STEP // FOLD, FOLD)), 1)
    elif FOLD > 1:
        values = tl.sum(tl.reshape(values, (ROWS, STEP // FOLD, FOLD)), 2)
    return values


@triton.jit(do_not_specialize=["rows"])
def few_rows(x, weight, out, rows, outputs, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
             FETCH: tl.constexpr):  # fmt: skip
    n, m, k = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.arange(0, M), tl.arange(0, STEP)
    if FETCH:
        to_l2(weight + tl.minimum(n, outputs - 1) * K, FETCH, N)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    inside, real = (n < outputs)[None, :], (m < rows)[:, None]
    acc = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        value = tl.load(x + m[:, None] * K + start + k[None, :], mask=real, other=0.0)
        acc = tl.dot(value, tl.load(weight + n[None, :] * K + start + k[:, None], mask=inside, other=0.0, eviction_policy=EVICT), acc)
    tl.store(out + m[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=real & inside)


@dataclass(frozen=True)
class One:
    """How a product of one row runs."""

    rows: int
    step: int
    warps: int
    fold: int = 1
    first_out: bool = False  # weights leave the L1 cache first
    rolled: bool = False  # the loop's end is a number of the launch, so it is not unrolled
    regs: int = 0  # the most registers of a thread, which sets how many programs run at a time; 0: what the compiler takes
    first: int = 0  # so many programs ask L2, before they wait for the kernel before, for the rest of their rows
    later: bool = False  # or, where their rows are loaded whole, for those of the program so many later

    def fits(self, inputs: int, gated: bool) -> bool:
        """Whether the product's rows can be cut so."""
        rest = inputs > self.step and self.rows == 1
        return inputs % self.step == 0 and (self.rows == 1 or not gated) and (not self.first or self.later or rest)

    def run(self, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
        """x [1, k], weight [n, k] -> [1, n], or of a gated product [1, n / 2]."""
        outputs, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        out = x.new_empty((1, outputs))
        (gated_row if gated else one_row)[(triton.cdiv(outputs, self.rows),)](
            x, weight, out, outputs, inputs, K=inputs, ROWS=self.rows, STEP=self.step, FOLD=self.fold, EVICT="evict_first" if self.first_out else "",
            ROLLED=self.rolled and inputs > self.step, FIRST=self.first, LATER=self.later, launch_pdl=True, num_warps=self.warps, maxnreg=self.regs or None,
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class Few:
    """How a product of up to 32 rows runs."""

    outputs: int
    step: int
    stages: int = 4
    warps: int = 4
    first_out: bool = False
    fetch: int = 0  # bytes of each of its rows that a program asks L2 for before it waits for the kernel before

    def fits(self, inputs: int, gated: bool) -> bool:
        """Whether the product's rows can be cut so."""
        return inputs % self.step == 0 and self.fetch <= 2 * inputs

    def run(self, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
        rows, (outputs, inputs) = x.shape[0], weight.shape
        out = x.new_empty((rows, outputs))
        few_rows[(triton.cdiv(outputs, self.outputs),)](
            x, weight, out, rows, outputs, K=inputs, M=16 if rows <= 16 else 32, N=self.outputs, STEP=self.step, STAGES=self.stages,
            EVICT="evict_first" if self.first_out else "", FETCH=self.fetch, launch_pdl=True, num_warps=self.warps,
        )  # fmt: skip
        return out


ORDER = ("o", "gated", "down", "qkv", "head")  # in which products are searched
ALL = 1056  # programs of 8 warps that run at a time on 132 multiprocessors


def choices(own: One) -> list[One]:
    """What is tried of one product whose engine takes `own`, that first."""
    fewer = [replace(own, regs=n) for n in (80, 64, 40, 32)]
    asking = [replace(own, first=n, later=later) for later, n in itertools.product((True, False), (528, 660, ALL, 2 * ALL))]
    small = [One(1, 4096, 8), One(1, 2048, 8), One(1, 1024, 8, 1, True), One(1, 2048, 8, 8, False, True), One(1, 1024, 4, 8, True, True), One(2, 2048, 8), One(4, 4096, 8), One(8, 4096, 16)]
    return [own, *fewer, *asking, *small, *(replace(how, first=ALL, later=how.step == 4096) for how in small)]


MORE: dict[str, list[Few]] = {
    "o": [Few(32, 512), *(Few(32, 512, fetch=n) for n in (1024, 2048, 4096)), Few(16, 512, fetch=2048)],
    "gated": [Few(64, 128), *(Few(64, 128, fetch=n) for n in (512, 1024, 2048)), Few(64, 256, 3, fetch=1024)],
    "down": [Few(32, 512), *(Few(32, 512, fetch=n) for n in (1024, 2048, 4096)), Few(16, 512, fetch=4096)],
    "qkv": [Few(64, 256), *(Few(64, 256, fetch=n) for n in (512, 1024, 2048)), Few(32, 512, fetch=2048)],
    "head": [Few(64, 128), *(Few(64, 128, fetch=n) for n in (512, 1024))],
}  # fmt: skip


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
        return [replace(best, stages=n) for n in (3, 5)]
    flipped: list[One | Few] = [replace(best, **{name: not getattr(best, name)}) for name in ("first_out", "rolled")]
    return [*flipped, *(replace(best, first=best.first * n // 4) for n in (3, 6) if best.first)]


def fitting(ways: Iterable[One | Few], name: str, share: int) -> list[One | Few]:
    """Those that the product can be cut by, each once."""
    inputs = shapes(share)[name][1]
    return [how for how in dict.fromkeys(ways) if how.fits(inputs, name == "gated")]


def tried(tree: Path, batch: int, share: int) -> dict[str, list[One | Few]]:
    """By product what is tried; first as the tree has it."""
    (skinny,) = modules(tree, "skinny")
    found: dict[str, list[One | Few]] = {}
    for name, (outputs, inputs) in shapes(share).items():
        rows, step, warps, passing = skinny.sizes(outputs, inputs)
        long = step >= 2048 and inputs > 4096
        own = One(1, 512, 8, 1, True) if name == "gated" else One(rows, step, warps, 8 if long else 1, passing, long)
        found[name] = fitting(choices(own) if batch == 1 else MORE[name], name, share)
    return found


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
            if time.monotonic() < deadline and how != before:
                self.table[name] = how
                top = min(top, (self.ratio(name, how), how), key=lambda t: t[0])
        self.table[name] = top[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("tree", type=with_graphs)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--share", type=int, default=1, help="ranks that the model is cut for; one of them is timed")
    parser.add_argument("--context", type=int, default=140)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--products", default=",".join(ORDER), help="comma-separated; the others stay as the tree has them")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    options = parser.parse_args()
    began, products = time.monotonic(), named(options.products, ORDER, "product")
    found = tried(options.tree, options.batch, options.share)
    table = {name: ways[0] for name, ways in found.items()}
    jobs = [(name, how) for name, ways in found.items() if name in products for how in fitting([*ways, *near(ways[0])], name, options.share)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.starmap(compile_some, [(jobs[i :: options.processes], options.batch, options.share) for i in range(options.processes)])
    emit({"compiled": len(jobs), "s": round(time.monotonic() - began, 1)})
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        made = runner_of(options.tree, with_config(place), (options.batch,), options.share)
        search = Search(made, table, options)
        for name in products:
            search.best(name, found[name], began + 0.8 * options.seconds)
        for name in products:
            search.best(name, fitting(near(table[name]), name, options.share), began + options.seconds)
        for name in products:
            emit({"product": name, "chosen": str(table[name])})
        search.ratio("all as chosen", table["o"])


if __name__ == "__main__":
    main()
