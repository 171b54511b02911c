"""Ours against the best of several vLLM configurations, in one sitting, over HTTP, interleaved.

    python -m benchmarks.gpu_headline OUT --place DIR --model DIR [--ours TREE|RUN_DIR] [--seconds 540] [--vllm-site SITE]

First the search: every setting of `headline_settings.py` is started and timed in six cells. Then ours and the best of
them, both up at once, take turns (ABBA) on the same fresh prompts; ratios are printed only when nothing speaks against
the comparison. The plain engine and transformers are timed once, for context. `--tp N` starts all of them on N ranks (on N
GPUs from `--gpu` on; transformers is left out); results of different N are kept apart. Every result is a JSON line in
OUT/headline.jsonl as soon as it is known; `--place` keeps them too, so that a second command on the same machine goes on
where the first stopped. Not for: accepting patches (`optimize`), or figures of different machines or sittings.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks import headline_cells as cells
from benchmarks.headline_sitting import Sitting, check_gpus, digest_of, gpus_of, our_arms
from benchmarks.headline_steps import bound, context, pairs, search, summary
from optimizer.awake import awake
from optimizer.run import load
from optimizer.traffic.prompts import PromptSource
from optimizer.truth import weights
from optimizer.vllm_server import PROGRAM, Common

REPO = Path(__file__).resolve().parent.parent
QWEN = "Qwen3-8B dimensions"


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path)
    add("--place", type=Path, required=True, help="folder on a disk with 40 GB; results and compiled code stay there")
    add("--model", type=Path, default=None, help="Hugging Face folder; with config.json alone random weights are written; left out: those of the run, or random ones of Qwen3-8B's shape")
    add("--ours", type=Path, default=REPO / "engine", help="folder with a target.toml, or a run: its last accepted engine")
    add("--ours-args", default=None, help="for our engine: '--num-kv-blocks 4096'; those of the run if left out")
    add("--seconds", type=float, default=540.0, help="stop after so long")
    add("--tp", type=int, default=1, help="ranks of ours, of the plain engine and of vLLM")
    add("--gpu", type=int, default=0, help="of ours; with --tp the first of them")
    add("--vllm-gpu", type=int, default=None, help="another GPU (with --tp the first of others): two settings at a time in the search, and vLLM there in the pairs")
    add("--same-card", action="store_true", help="in the pairs both on --gpu, whatever --vllm-gpu says: cards differ a little")
    add("--vllm-site", type=Path, default=None, help="folder with vLLM in it, for PYTHONPATH of its process only")
    add("--vllm-program", default=shlex.join(PROGRAM), help="what is started, before its flags")
    add("--vllm-python", type=Path, default=Path(sys.executable))
    add("--only", default="", help="settings by name, comma-separated; all if left out")
    add("--steps", default="bound,search,pairs,context", help="which of these, in this order")
    add("--pairs", type=int, default=12, help="of each cell; at least 6 for a result")
    add("--max-model-len", type=int, default=8192)
    add("--kv-tokens", type=int, default=65536)
    add("--start-timeout", type=float, default=180.0)
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--dtype", default="bfloat16")
    add("--shrink", type=int, default=1, help="divide prompts and answers by this: for trying it out")
    add("--seed", type=int, default=7, help="of random weights and of prompts")
    add("--sandbox", default="auto", help="of our engines")
    return parser.parse_args(argv)


def model_of(options: argparse.Namespace) -> Path:
    """The model with its weights: the folder that was given, those of the run, or random ones of its dimensions in the place."""
    if options.model is None and (options.ours / "run.json").is_file():
        used = load(options.ours).request.model_dir
        if list(used.glob("*.safetensors")):
            return used.resolve()
    if options.model is not None and list(options.model.glob("*.safetensors")):
        return options.model.resolve()
    if options.model is not None:
        return weights.write_random(options.model, (options.place / "weights").resolve(), options.seed)
    from benchmarks.gpu_ladder import random_model

    return random_model(options.place, options.seed)


def begin(options: argparse.Namespace, began: float) -> Sitting:
    """Everything that stays the same, and the first line of the record."""
    check_gpus(options)
    options.out.mkdir(parents=True, exist_ok=True)
    options.place.mkdir(parents=True, exist_ok=True)
    model = model_of(options)
    ours, plain = our_arms(options, model)
    common = Common(
        model=model, dtype=options.dtype, max_model_len=options.max_model_len, kv_tokens=options.kv_tokens, tp=options.tp,
        site=options.vllm_site and options.vllm_site.resolve(), cache=(options.place / "compiled").resolve(),
        program=tuple(shlex.split(options.vllm_program)),
    )  # fmt: skip
    sitting = Sitting(
        options=options, common=common, ours=ours, plain=plain, began=began, jobs=cells.shrunk(options.shrink),
        prompts=PromptSource(f"headline of seed {options.seed}".encode(), model), model_sha256=weights.digest(model),
        terms=cells.Terms(options.dtype, options.max_model_len, options.kv_tokens), ours_digest=digest_of(ours),
    )  # fmt: skip
    sitting.open()
    return sitting


def sit(options: argparse.Namespace, began: float) -> None:
    """The steps that were asked for, then the summary."""
    sitting = begin(options, began)
    steps = {"bound": bound, "search": search, "pairs": pairs, "context": context}
    wanted = [name.strip() for name in options.steps.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in steps]:
        raise SystemExit(f"no step {', '.join(unknown)}; there are: {', '.join(steps)}")
    for name in wanted:
        steps[name](sitting)
    for line in summary(sitting):
        print(line, flush=True)


def main(argv: list[str] | None = None) -> None:
    began = time.monotonic()
    options = options_of(argv)
    used = [first for first in (options.gpu, options.vllm_gpu) if first is not None]
    with awake([gpu for first in used for gpu in gpus_of(options, first)] if options.device == "cuda" else None):
        sit(options, began)


if __name__ == "__main__":
    main()
