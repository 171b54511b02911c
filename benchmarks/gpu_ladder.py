"""The GPU skills one on top of the other, each engine started in the sandbox and timed over HTTP. A first look, no verdict.

    python -m benchmarks.gpu_ladder OUT --place DIR [--only graph,skinny]
    python -m benchmarks.gpu_ladder --place DIR --build

Qwen3-8B dimensions, random bf16 weights. For each rung: seconds to start, median step and time to the first token
of each cell (batches, long prompts); then every stream's gap to the float32 oracle, and how many streams
equal the first rung's. Traces of the rungs go to OUT. One sitting, one launch a rung: no interval, so nothing here is a
gain; those are the loop's to state (`benchmarks/gpu_loop.py`). Not for: accepting anything.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import QWEN3_8B, emit, named
from optimizer.confine.launch import Server, launch
from optimizer.proposers import skillbook
from optimizer.target import load_target
from optimizer.traffic.client import Request
from optimizer.traffic.prompts import PromptSource
from optimizer.truth import weights
from optimizer.truth.oracle import Oracle
from optimizer.types import LaunchSpec, Stream

REPO = Path(__file__).resolve().parent.parent
RUNGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plain", ()),
    ("graph", ("cuda-graph-capture",)),
    ("fused", ("merge-projections", "fused-kernels", "fused-kernels", "fused-kernels")),
    ("skinny", ("skinny-gemm",)),
    ("ahead", ("overlap-scheduling",)),
    ("inference", ("inference-mode",)),
    ("no host reads", ("remove-host-reads",)),
    ("last rows", ("last-layer-rows",)),
)
CELLS = {
    "batch 1": ([128], 65),
    "batch 8": ([128] * 8, 33),
    "batch 32": ([128] * 32, 17),
    "mixed batch of 8": ([16, 17, 33, 48, 64, 100, 128, 257], 16),
    "prompt 1024": ([1024], 4),
    "prompt 4096": ([4096], 33),
}
PAGES = 4096


def rungs(place: Path, model: Path, more: tuple[tuple[str, tuple[str, ...]], ...] = ()) -> dict[str, LaunchSpec]:
    """A tree for each rung, and how to start it on one GPU. Raises SystemExit when a skill declines."""
    skills = skillbook.load_all()
    target = load_target(REPO / "engine")
    files = [p for p in (REPO / "engine").glob("**/*.py") if "tiny_qwen3" not in p.parts]
    sources = {p.relative_to(REPO).as_posix(): p.read_text("utf-8") for p in files}
    found = {}
    for name, wanted in (*RUNGS, *more):
        for skill in wanted:
            rewrites = skillbook.run(skills[skill], sources, {"bound_us": 1.0, "id": "", "device": "cuda"})
            if isinstance(rewrites, str):
                raise SystemExit(f"{skill} declined: {rewrites}")
            sources = rewrites[-1].after
        tree = place / name.replace(" ", "-")
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(REPO / "engine", tree / "engine")
        for file, text in sources.items():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            (tree / file).write_text(text, "utf-8")
        found[name] = LaunchSpec(
            tree=tree, target=target, python=Path(sys.executable), model_dir=model, tp=1, device="cuda", devices=(0,),
            label=name, extra_args=("--num-kv-blocks", str(PAGES)),
        )  # fmt: skip
    return found


def random_model(place: Path, seed: int = 7) -> Path:
    """Qwen3-8B's shape with random weights, written to the place once."""
    config = place / "config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "config.json").write_text(json.dumps(QWEN3_8B))
    return weights.write_random(config, (place / "weights").resolve(), seed)


def climb(server: Server, name: str, prompts: PromptSource, out: Path) -> tuple[list[Stream], dict[str, Any]]:
    """Every cell three times (the last is kept), then a trace of batch 1."""
    streams: list[Stream] = []
    row: dict[str, Any] = {"rung": name, "start_s": round(server.start_s, 2), "cuda_graph": server.metadata.get("cuda_graph")}
    for cell, (lengths, new) in CELLS.items():
        for turn in ("first", "second", "third"):
            requests = [Request(ids, new) for ids in prompts.draw(f"{cell}/{turn}", len(lengths), lengths)]
            got = server.client.complete(requests, 120.0)
            if errors := [s.error for s in got if s.error]:
                raise SystemExit(f"{name}, {cell}: {errors[0]}\n{server.log_tail(15)}")
            streams += got if turn == "third" else []
        steps = [b - a for s in got for a, b in zip(s.arrivals_ns[1:], s.arrivals_ns[2:], strict=False)]
        row[f"{cell}, ms a step"] = round(statistics.median(steps) / 1e6, 3)
        row[f"{cell}, ms to first token"] = round((got[0].arrivals_ns[0] - got[0].sent_ns) / 1e6, 1)
    server.client.start_profile(record_shapes=True)
    server.client.complete([Request(prompts.draw("trace", 1, 128)[0], 12)], 60.0)
    server.client.stop_profile()
    for path in server.collect_traces(out):
        path.rename(out / f"{name}.json.gz")
    return streams, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--place", type=Path, required=True, help="folder on a disk with 20 GB")
    parser.add_argument("--build", action="store_true", help="only write the trees, each a target folder, to PLACE/trees; needs no GPU")
    parser.add_argument("--only", default=",".join(name for name, _ in RUNGS), help="rungs to start; the others are only climbed over")
    options = parser.parse_args()
    if options.build:
        for name, spec in rungs(options.place / "trees", options.place).items():
            emit({"rung": name, "target": str(spec.tree / "engine")})
        return
    if options.out is None:
        parser.error("OUT is needed unless --build is given")
    began, only = time.monotonic(), named(options.only, [name for name, _ in RUNGS], "rung")
    model = random_model(options.place)
    emit({"weights_s": round(time.monotonic() - began, 1)})
    prompts = PromptSource(b"not secret: a look", model)
    kept: dict[str, list[Stream]] = {}
    with Oracle(model, "cuda", engine_dtype="bfloat16") as oracle:
        for name, spec in rungs(options.place / "trees", model).items():
            if name not in only:
                continue
            with launch(spec) as server:
                kept[name], row = climb(server, name, prompts, options.out)
            gaps = sorted((score.max_gap for score in oracle.score(kept[name])), reverse=True)
            same = sum(a.token_ids == b.token_ids for a, b in zip(kept[name], next(iter(kept.values())), strict=True))
            emit(row | {"oracle": oracle.dtype, "largest gaps": [round(g, 3) for g in gaps[:5]],
                        "streams as the first rung's": f"{same} of {len(gaps)}"})  # fmt: skip


if __name__ == "__main__":
    main()
