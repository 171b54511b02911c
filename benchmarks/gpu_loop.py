"""One sitting of the loop on a GPU whose time is counted: begin or go on, stop in time, pack what is to be kept.

    python -m benchmarks.gpu_loop OUT --place DIR [--seconds 1300] [--minutes 60] [--skills a,b] [--tp 2 --gpu 0,1] [--reference] [--give-up WHY]

Begins a run in DIR/run on Qwen3-8B dimensions with random bf16 weights, or goes on with the one that is there. After
`--seconds` it asks the loop to stop after its present step, as Ctrl-C does; then OUT/run.tgz holds the run without
weights, compiled code and traces, OUT/traces.tgz the traces. Both unpacked in DIR of another machine, it goes on there: the weights are
drawn again from the run's seed, and another environment is calibrated anew. What to call when is in docs/gpu.md. Not for: a machine that stays; there
`optimize` and `optimize resume` do the same.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.gpu_engine import QWEN3_8B
from optimizer import fingerprint, gates, run, seal, start, state, summary
from optimizer.gates.context import Lab
from optimizer.loop import Loop
from optimizer.resume import reopen, weights_there
from optimizer.run import Limits, Run
from optimizer.services import Interrupted
from optimizer.session import greet, interruptible
from optimizer.truth import weights
from optimizer.view import Terminal

GPU_SKILLS = "inference-mode,cuda-graph-capture,paged-attention-backend,fused-kernels,skinny-gemm,merge-projections,overlap-scheduling,custom-all-reduce,all-reduce-rms-fusion"
PREPARING_S = 45.0  # weights and the first look at the machine, before a run's time counts
PAGES = 4096  # the same KV cache in every arm: 65,536 tokens, 9.7 GB


class Log(Terminal):
    """Steps as lines too: what a sitting spent its seconds on must be readable afterwards."""

    def step(self, text: str, seconds: float | None = None) -> None:
        self.note(text)


def begin(options: argparse.Namespace) -> Run:
    """A new run; its weights are written on the way (16 GB, half a minute on 16 cores)."""
    return start.prepare(
        start.Options(
            model=Path("qwen3-8b"), load_format="dummy", device="cuda", tp=options.tp, devices=options.gpu, protocol="quick", run_dir=options.place / "run",
            budget_minutes=minutes(options, 0.0), skills=options.skills, engine_args=f"--num-kv-blocks {PAGES}",
        )
    )  # fmt: skip


def minutes(options: argparse.Namespace, spent_s: float) -> float:
    """The run's budget. That of one sitting ends with it, its headline included: with more the loop goes on until it is stopped."""
    return options.minutes or (spent_s + options.seconds - PREPARING_S) / 60


def go_on(options: argparse.Namespace, console: Console) -> Run:
    """The run that is there, repaired, with the new limit."""
    found = run.load(options.place / "run")
    want = found.request
    seal.verify()
    if seal.digest() != want.gates_digest:
        raise SystemExit("this run was judged under another seal; a new one has to begin")
    if note := weights_there(found):
        console.print(note, highlight=False)
    environment = fingerprint.fingerprint(want.device, want.sandbox_level or "none", want.devices)
    limits = Limits(wall_minutes=minutes(options, state.wall_s(found.ledger.lines())))
    for note in reopen(found, environment, limits, options.give_up):
        console.print(note, highlight=False)
    return found


def write_secret_weights(found: Run, prompts: object) -> None:
    """What the gates would write when they first need it, ahead of time: nothing is being timed yet."""
    spec = found.spec(found.base, "ahead", "ahead")
    context = gates.GateContext(
        candidate=spec, incumbent=spec, repo=found.repo.git_dir, base_commit=found.base, candidate_commit=found.base,
        target=found.target, oracle=None, prompts=prompts, protocol=None, run_dir=found.dir,  # type: ignore[arg-type]
    )  # fmt: skip
    lab = Lab(context)
    lab.model_dir("secret")
    lab.model_dir("perturbed")


def work(found: Run, options: argparse.Namespace, console: Console) -> str:
    """The loop until it ends or the sitting does. Returns why it stopped."""
    from optimizer.traffic.prompts import PromptSource
    from optimizer.wiring import real

    prompts = PromptSource(bytes.fromhex(found.request.prompt_key), found.request.model_dir)
    ahead = threading.Thread(target=write_secret_weights, args=(found, prompts))
    ahead.start()
    view = Log(console)
    timer = threading.Timer(options.seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    with interruptible(found, view), real(found, view) as services:
        ahead.join()
        if not options.reference:
            services = replace(services, references=lambda traces, capture: [])
        try:
            return Loop(services, found).go()
        except Interrupted:
            return "the sitting is over; it can be resumed"
        finally:
            timer.cancel()


def pack(place: Path, out: Path) -> None:
    """Two archives: the run without weights and working trees, and its traces."""
    with tarfile.open(out / "run.tgz", "w:gz") as archive:
        archive.add(place, "run", filter=lambda item: None if item.name.split("/")[1:2] in (["weights"], ["worktrees"], ["compiled"], ["traces"]) else item)
    with tarfile.open(out / "traces.tgz", "w:gz", compresslevel=1) as archive:
        archive.add(place / "traces", "run/traces")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--place", type=Path, required=True, help="folder on a disk with 60 GB")
    parser.add_argument("--seconds", type=float, default=540.0, help="ask the loop to stop after so long")
    parser.add_argument("--minutes", type=float, default=None, help="budget of the whole run, when more sittings follow; left out: it ends with this one, headline included")
    parser.add_argument("--skills", default=GPU_SKILLS)
    parser.add_argument("--tp", type=int, default=1, help="ranks, one on each of --gpu")
    parser.add_argument("--gpu", default="0", help="indices, comma-separated")
    parser.add_argument("--reference", action="store_true", help="also capture transformers on the same cell")
    parser.add_argument("--give-up", help="why the attempt that the last sitting left open is to end undecided")
    options = parser.parse_args()
    console = Console(width=150)
    began = time.monotonic()
    there = (options.place / "run" / "run.json").is_file()
    found = go_on(options, console) if there else begin(options)
    options.seconds -= time.monotonic() - began
    greet(found, console)
    console.print(f"prepared in {time.monotonic() - began:.0f} s", highlight=False)
    try:
        why = work(found, options, console)
        console.print(summary.table(found.ledger.lines()))
        console.print(f"Stopped after {time.monotonic() - began:.0f} s: {why}", highlight=False)
    finally:
        if (options.place / "run" / "traces").is_dir():
            pack(options.place / "run", options.out)
    assert weights.layers(found.request.model_dir) == QWEN3_8B["num_hidden_layers"]
    sys.exit(0)


if __name__ == "__main__":
    main()
