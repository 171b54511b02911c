"""One decode step of several engines, as the GPU alone sees it: their CUDA graphs in turns, and what each kernel adds.

    python -m benchmarks.gpu_step OUT TREE TREE ... [--batches 1,32] [--contexts 140,4100] [--rounds 7]

Each TREE is a folder with `engine/` in it that has `cuda-graph-capture` (`benchmarks.gpu_ladder --build` writes such), all in one process, with
the same random weights in Qwen3-8B's shape, without HTTP or scheduling. Milliseconds are medians over the rounds; ratios are to the first
tree within a round, their median, least and most. A kernel adds what the step's last end moves by when it ends: kernels that are launched while
the one before runs overlap, so their own durations add up to more than the step. For choosing between two ways of writing a
kernel. Not for: claims about an engine, or several ranks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_engine import QWEN3_8B, emit

PAGES = 1024
REPLAYS = 8  # between two events


def with_graphs(text: str) -> Path:
    """An argument that names a tree. Raises argparse.ArgumentTypeError for another folder."""
    if not (Path(text) / "engine/decode_graphs.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no engine/decode_graphs.py, which cuda-graph-capture writes")
    return Path(text)


def modules(tree: Path, *names: str) -> list[Any]:
    """Modules of the tree's own engine, beside those of other trees. Errors: ImportError without such a file."""
    for name in [n for n in sys.modules if n == "engine" or n.startswith("engine.")]:
        del sys.modules[name]
    sys.path.insert(0, str(tree.resolve()))
    importlib.invalidate_caches()
    try:
        return [importlib.import_module(f"engine.{name}") for name in names]
    finally:
        sys.path.pop(0)


@dataclass(frozen=True, slots=True)
class Made:
    """A tree's engine on the GPU."""

    runner: Any
    request: Any  # the module whose classes make plans
    skinny: Any  # the module of its products of few rows; None without it


def with_config(folder: str | Path) -> Path:
    """The folder, with Qwen3-8B's dimensions in it."""
    (Path(folder) / "config.json").write_text(json.dumps(QWEN3_8B))
    return Path(folder)


def runner_of(tree: Path, model_dir: Path, batches: tuple[int, ...], share: int = 1) -> Made:
    """Random weights on the GPU, of one of `share` ranks that do not meet. Graphs are recorded for these batches alone."""
    config, parallel, worker, request, graphs = modules(tree, "config", "parallel", "worker", "request", "decode_graphs")
    graphs.BUCKETS, graphs.DecodeGraphs.warm = batches, lambda self: None
    if share > 1:
        same = lambda self, x: x  # noqa: E731
        parallel.TensorParallel.all_reduce = parallel.TensorParallel.all_gather = parallel.TensorParallel.minimum = same
        parallel.join = lambda rank, size, kind, rendezvous: parallel.TensorParallel(rank, size, torch.device(kind, 0), "none")
    options = config.EngineConfig(model=model_dir, device="cuda", tp=share, load_format="dummy", num_kv_blocks=PAGES)
    runner = worker.Worker(options, 0, Path("/nonexistent")).runner
    return Made(runner, request, sys.modules.get("engine.skinny"))


def with_weights_of(first: Made, other: Made) -> Made:
    """`other`, its parameters those of `first` where name and shape agree: many trees fit on one GPU."""
    own = dict(first.runner.model.named_parameters())
    for name, parameter in other.runner.model.named_parameters():
        if name in own and own[name].shape == parameter.shape:
            parameter.data = own[name].data
    return other


def pages(made: Made, context: int) -> int:
    """Pages of one sequence of `context` tokens."""
    return -(-context // made.runner.block_size)


def step_of(made: Made, batch: int, context: int) -> Any:
    """A decode step of `batch` sequences of `context` tokens each: its `graph` is filled and ready to replay while it is held."""
    runner, request, each = made.runner, made.request, pages(made, context)
    if batch * each > PAGES:
        raise SystemExit(f"{batch} sequences of {context} tokens need {batch * each} pages; there are {PAGES}")
    tables = [list(range(i * each, (i + 1) * each)) for i in range(batch)]
    runner.newest.update(dict.fromkeys(range(batch), 5))
    plan = request.StepPlan([], [request.GenerationItem(i, context - 1, table) for i, table in enumerate(tables)], [])
    with torch.inference_mode():
        step = runner.graphs.fitting(plan)
        step.fill(plan, runner.newest, runner.block_size)
    return step


def milliseconds(graph: Any) -> float:
    """Of one replay, the gap to the next included."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(REPLAYS):
        graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / REPLAYS


def added(kernels: Iterable[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """(name, start, end) in microseconds of one stream -> by name: how many, and what they add to the last end, longest first."""
    counts: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    last: float | None = None
    for name, start, end in sorted(kernels, key=lambda k: k[1]):
        counts[name] += 1
        sums[name] += max(0.0, end - (start if last is None else last))
        last = end if last is None else max(last, end)
    return {name: (counts[name], round(sums[name], 2)) for name in sorted(sums, key=lambda n: -sums[n])}


def profiled(graph: Any, replays: int = 3) -> dict[str, tuple[int, float]]:
    """What each kernel adds to one replay, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text("utf-8"))["traceEvents"]
    rows = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = added((f"{e['name'][:60]} {e['args'].get('grid', '')}".strip(), e["ts"], e["ts"] + e["dur"]) for e in rows)
    return {name: (count // replays, round(us / replays, 2)) for name, (count, us) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("trees", type=with_graphs, nargs="+")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--contexts", default="140,4100", help="tokens of each sequence; a pair that does not fit is left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-kernels", action="store_true", help="leave out what each kernel adds, which takes a second a step")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    batches = tuple(sorted(map(int, options.batches.split(","))))
    with tempfile.TemporaryDirectory() as place:
        config = with_config(place)
        made: dict[str, Made] = {}
        for tree in options.trees:
            one = runner_of(tree, config, batches)
            made[tree.name] = with_weights_of(next(iter(made.values())), one) if made else one
    for batch in batches:
        for context in map(int, options.contexts.split(",")):
            if batch * max(pages(one, context) for one in made.values()) > PAGES:
                continue
            graphs = {name: step_of(one, batch, context).graph for name, one in made.items()}
            for graph in graphs.values():
                milliseconds(graph)  # clocks rise
            rounds = [{name: milliseconds(graph) for name, graph in graphs.items()} for _ in range(options.rounds)]
            base = next(iter(graphs))
            for name, graph in graphs.items():
                ratios = [turn[name] / turn[base] for turn in rounds]
                emit({"tree": name, "batch": batch, "context": context, "ms": round(statistics.median(turn[name] for turn in rounds), 4),
                      "ratio": [round(f(ratios), 4) for f in (statistics.median, min, max)]})  # fmt: skip
                if options.no_kernels:
                    continue
                (options.out / f"{name}-{batch}-{context}.json").write_text(json.dumps(profiled(graph), indent=1))


if __name__ == "__main__":
    main()
