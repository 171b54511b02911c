"""The engine on several GPUs of one host: right against one GPU, timed and traced, replayed, and with ranks held up.

    python -m benchmarks.gpu_ranks OUT --place DIR --tp 2 [--steps engines,delays,replays] [--only plain,ranks]

Qwen3-8B dimensions, random bf16 weights, in the sandbox, over HTTP. Engines: plain on one GPU and on all, all GPU skills
on one GPU, on all with the library's collectives, with steps launched ahead on every rank, with all-reduces through
symmetric memory, and with those inside the norms.
For each: median and mean step at batch 1 and 32, streams that equal the one-GPU engine's, the largest gap to the float32
oracle, and from a trace of every rank how long its all-reduces wait and transfer. Then the last engine: `delays` holds ranks
up at random (SIGSTOP) and `replays` decodes `--replays` steps over all batch buckets: in float32 both must give the tokens of
the first time, in 16 bits what differs must be near ties (`wrong`: streams with a token that is none, by bands from the first
engine's streams). One launch each, no interval: gains are the loop's to state. Microseconds of one all-reduce:
`all_reduce.py`. Not for: accepting anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import emit, named
from benchmarks.gpu_ladder import random_model, rungs
from optimizer.awake import awake
from optimizer.confine.launch import Server, launch
from optimizer.gates.races import held_ranks
from optimizer.traffic.client import Request
from optimizer.traffic.prompts import PromptSource
from optimizer.truth.oracle import Oracle, Score, calibrated
from optimizer.types import LaunchSpec, Stream
from trace_diff.api import analyse, load

MORE = (("ranks", ("overlap-scheduling",)), ("symmetric memory", ("custom-all-reduce",)), ("fused sums", ("all-reduce-rms-fusion",)))
ON_ALL = ("plain", "no host reads", "ranks", "symmetric memory", "fused sums")  # rungs that run on all GPUs
ENGINES = ("one", "one with all skills", *ON_ALL)
BUCKETS = (1, 2, 4, 8, 16, 24, 32)  # as cuda-graph-capture writes them
STEPS = ("engines", "delays", "replays")
CELLS = {"batch 1": (1, 65), "batch 32": (32, 33)}
PROMPT = 24


def engines(options: argparse.Namespace, model: Path) -> dict[str, LaunchSpec]:
    """By name, the one-GPU reference first."""
    found = rungs(options.place / "trees", model, MORE)
    all_gpus = {"device": options.device, "tp": options.tp, "devices": tuple(range(options.tp)) if options.device == "cuda" else ()}
    one = replace(found["plain"], label="plain, one", **{**all_gpus, "tp": 1, "devices": all_gpus["devices"][:1]})
    all_skills = replace(found["last rows"], label="all skills, one", tp=1, device=one.device, devices=one.devices)
    named = {"one": one, "one with all skills": all_skills} | {name: replace(found[name], **all_gpus) for name in ON_ALL}
    return named if options.device == "cuda" else {name: replace(spec, extra_args=()) for name, spec in named.items()}


def served(server: Server, prompts: PromptSource, name: str, batch: int, new: int) -> list[Stream]:
    """One batch of greedy streams; the same name gives every engine the same prompts. Raises SystemExit for an error."""
    got = server.client.complete([Request(p, new) for p in prompts.draw(name, batch, PROMPT)], 300.0)
    if errors := [s.error for s in got if s.error]:
        raise SystemExit(f"{name}: {errors[0]}\n{server.log_tail(15)}")
    return got


def timed(server: Server, prompts: PromptSource, label: str, out: Path) -> tuple[list[Stream], dict[str, Any]]:
    """Both cells three times (the last counts), then a trace of every rank."""
    streams: list[Stream] = []
    row: dict[str, Any] = {"engine": label, "start_s": round(server.start_s, 2), "all_reduce": server.metadata.get("all_reduce_backend")}
    for cell, (batch, new) in CELLS.items():
        for turn in range(3):
            got = served(server, prompts, f"{cell}/{turn}", batch, new)
        gaps = [(b - a) / 1e6 for s in got for a, b in zip(s.arrivals_ns[1:], s.arrivals_ns[2:], strict=False)]
        row[f"{cell}, median ms"], row[f"{cell}, mean ms"] = round(statistics.median(gaps), 3), round(statistics.fmean(gaps), 3)
        streams += got
    server.client.start_profile(record_shapes=True)
    served(server, prompts, "trace", 1, 10)
    server.client.stop_profile()
    files = server.collect_traces(out / label.replace(" ", "-"))
    return streams, row | collectives(files)


def collectives(files: list[Path]) -> dict[str, Any]:
    """Microseconds of a decode step that collectives wait and transfer, by rank; nothing on one rank."""
    if len(files) < 2:
        return {}
    means = analyse(load(sorted(files))).breakdowns
    return {
        f"{what}_us": {rank: round(sum(getattr(row, f"{what}_ns") or 0.0 for row in mean.collectives) / 1e3, 1) for rank, mean in sorted(means.items())}
        for what in ("wait", "transfer")
    }


def truth(oracle: Oracle, scores: list[Score]) -> dict[str, Any]:
    """Against the float32 oracle: streams with a token that is no near tie, and the largest gap in logits."""
    wrong = sum(oracle.bands.name(score.max_gap) not in ("equal", "reorder") for score in scores)
    return {"wrong": wrong, "largest gap": round(max(score.max_gap for score in scores), 3)}


def others(first: list[Stream], again: list[Stream]) -> list[Stream]:
    """Streams that took another way: in 16 bits a batch that is made up otherwise moves near ties."""
    return [b for a, b in zip(first, again, strict=True) if a.token_ids != b.token_ids]


def delayed(server: Server, prompts: PromptSource, oracle: Oracle) -> Iterator[dict[str, Any]]:
    """Batches while ranks are stopped and let go at random."""
    for batch in (1, 8, 32):
        first = served(server, prompts, f"delays/{batch}", batch, 20)
        with held_ranks(server) as held:
            again = served(server, prompts, f"delays/{batch}", batch, 20)
        other = others(first, again)
        yield {"delays": f"batch {batch}", "holds": held[0], "streams": batch, "same": batch - len(other), **truth(oracle, oracle.score(first + other))}


def replayed(server: Server, prompts: PromptSource, oracle: Oracle, replays: int) -> Iterator[dict[str, Any]]:
    """The same prompts again and again in every bucket, twice at least, until so many decode steps have run."""
    new = 1 + min(100, max(2, replays // len(BUCKETS) // 2))
    for batch in BUCKETS:
        first, steps, other, began = served(server, prompts, f"replays/{batch}", batch, new), new - 1, {}, time.monotonic()
        while steps < replays / len(BUCKETS):
            again = served(server, prompts, f"replays/{batch}", batch, new)
            other |= {(s.prompt_ids, s.token_ids): s for s in others(first, again)}
            steps += new - 1
        row = {"replays": f"batch {batch}", "steps": steps, "seconds": round(time.monotonic() - began, 1), "other ways": len(other)}
        yield row | truth(oracle, oracle.score([*first, *other.values()]))


def look(found: dict[str, LaunchSpec], names: list[str], steps: list[str], oracle: Oracle, options: argparse.Namespace) -> None:
    """Each engine in turn; the last one also held up and replayed."""
    prompts, kept = PromptSource(b"not secret: a look", oracle.model_dir), {}
    for name in names:
        with launch(found[name]) as server:
            if "engines" in steps:
                kept[name], row = timed(server, prompts, name, options.out)
                scores = oracle.score(kept[name])
                if name == names[0] and options.device == "cuda":  # as a run does: what its first engine shows is benign
                    oracle.bands = calibrated([score.max_gap for score in scores], oracle.bands)
                same = len(kept[name]) - len(others(kept[names[0]], kept[name]))
                emit(row | {f"streams as {names[0]}'s": f"{same} of {len(kept[name])}", **truth(oracle, scores)})
            if name == names[-1]:
                for row in delayed(server, prompts, oracle) if "delays" in steps else ():
                    emit(row)
                for row in replayed(server, prompts, oracle, options.replays) if "replays" in steps else ():
                    emit(row)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--place", type=Path, required=True, help="folder on a disk with 20 GB")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", type=Path, default=None, help="folder with weights; random ones of Qwen3-8B's shape if left out")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--only", default=",".join(ENGINES), help="engines; the last one is held up and replayed")
    parser.add_argument("--replays", type=int, default=10_000)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    steps, names = named(options.steps, STEPS, "step"), named(options.only, ENGINES, "engine")
    model = options.model or random_model(options.place)
    found = engines(options, model)
    gpu = options.device == "cuda"
    with awake(range(options.tp) if gpu else None), Oracle(model, options.device, engine_dtype="bfloat16" if gpu else "float32") as oracle:
        look(found, names, steps, oracle, options)


if __name__ == "__main__":
    main()
