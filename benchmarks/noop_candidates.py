"""Patches that do nothing, through the whole loop: `python -m benchmarks.noop_candidates --engine fake|tiny`.

`fake`: the target without torch, real ledger, repository, patching and judge; pair times are the fake engine's with
noise that was recorded here (`record_noise`) or a model's. `tiny`: the real engine, sandbox, gates, oracle and clock.
None may be accepted. The last line is one JSON object. Not for: rates of rare errors (`decision_rules.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import noise
from benchmarks.noops import NoOp, noops
from optimizer.loop import Loop
from optimizer.patching import edits_from
from optimizer.run import Limits, Run
from optimizer.runrepo import unfrozen
from optimizer.services import NoProposal, Question, Services
from optimizer.types import LaunchSpec, Pair, Patch, Series, Stage

ROOT = Path(__file__).resolve().parent.parent
ENDS = ("accepted", "rejected", "undecided", "parked")


class Script:
    """Proposes no-ops of the incumbent's sources, one an attempt."""

    def __init__(self, count: int, seed: int, frozen: tuple[str, ...]) -> None:
        self.count, self.seed, self.frozen = count, seed, frozen
        self.made: list[NoOp] = []

    def propose(self, question: Question) -> Series | NoProposal:
        if not self.made:
            self.made = noops(unfrozen(question.sources, self.frozen), self.count, self.seed)
        if question.attempt > self.count:
            return NoProposal("all no-ops were tried")
        noop = self.made[question.attempt - 1]
        finding = question.findings[0]
        edits = edits_from({noop.file: question.sources[noop.file]}, {noop.file: noop.text})
        bound = finding.bound_us or 1.0
        return Series((Patch(edits, (finding.id,), f"noop_{noop.kind}", min(bound, 1.0), title=noop.title),), "noops")


def outcome(run: Run, seconds: float) -> dict[str, Any]:
    """Verdicts by kind and reason, and what they cost."""
    lines = run.ledger.lines()
    ends = [line for line in lines if line["kind"] in ENDS]
    pairs = Counter(line["attempt"] for line in lines if line["kind"] == "pair" and line["attempt"] is not None)
    kinds = {line["attempt"]: line["data"]["mechanism"] for line in lines if line["kind"] == "proposed"}
    return {
        "candidates": len(ends),
        "accepted": sum(line["kind"] == "accepted" for line in ends),
        "verdicts": dict(Counter(f"{e['kind']}:{e['data'].get('stage', '')}:{e['data'].get('reason')}" for e in ends)),
        "kinds": dict(Counter(kinds.values())),
        "mean_pairs": sum(pairs.values()) / max(1, len(ends)),
        "seconds_per_candidate": seconds / max(1, len(ends)),
    }


def fake(count: int, protocol: str, noise_name: str, seed: int, place: Path) -> dict[str, Any]:
    """Through the fake engine of the tests."""
    sys.path.insert(0, str(ROOT / "tests" / "optimizer"))
    import loop_fakes  # pyright: ignore[reportMissingImports]

    sources = {**noise.MODELS, **noise.recorded()}
    if noise_name not in sources:
        raise SystemExit(f"no noise {noise_name!r}; there are: {', '.join(sources)}")
    source, rng = sources[noise_name], np.random.default_rng(seed)
    run = loop_fakes.new_run(place / "run", Limits(), protocol=protocol)
    fakes = loop_fakes.Fakes(run, protocol=protocol)

    def run_pair(a: LaunchSpec, b: LaunchSpec, stage: Stage, index: int, order: str) -> Pair:
        pair = loop_fakes.Fakes.run_pair(replace(fakes, noise=0.0), a, b, stage, index, order)
        gain, guard = (float(g) for g in source.gains(1, 2, rng)[0])
        slower = np.exp(-gain)
        return replace(
            pair,
            b_us_per_token=pair.b_us_per_token * slower,
            guards={k: (x, y * float(np.exp(-guard))) for k, (x, y) in pair.guards.items()},
        )

    return _go(run, replace(fakes.services(), run_pair=run_pair), Script(count, seed, run.target.frozen))


def tiny(count: int, protocol: str, seed: int, tp: int, place: Path) -> dict[str, Any]:
    """Through the real engine, gates and measurement."""
    from optimizer import start
    from optimizer.wiring import real

    run = start.prepare(
        start.Options(protocol=protocol, tp=tp, seed=seed, run_dir=place / "run", max_rejections=None, device="cpu")
    )
    with real(run, _View()) as services:
        return _go(run, services, Script(count, seed, run.target.frozen))


def _go(run: Run, services: Services, script: Script) -> dict[str, Any]:
    began = time.monotonic()
    why = Loop(replace(services, propose=script.propose), run).go()
    return {"stopped": why, **outcome(run, time.monotonic() - began)}


class _View:
    """One line for everything worth it."""

    def step(self, text: str, seconds: float | None = None) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, flush=True)

    def show(self, renderable: Any) -> None:
        pass


@contextmanager
def _place(keep: Path | None):
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=("fake", "tiny"), default="fake")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--protocol", choices=("quick", "full"), default="quick")
    parser.add_argument("--noise", default="typical", help="of the fake engine: a model or a recorded series")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder that keeps the run")
    args = parser.parse_args(argv)
    with _place(args.keep) as place:
        if args.engine == "fake":
            found = fake(args.count, args.protocol, args.noise, args.seed, place)
        else:
            found = tiny(args.count, args.protocol, args.seed, args.tp, place)
    print(json.dumps({"engine": args.engine, "protocol": args.protocol, "noise": args.noise, **found}))
    if found["accepted"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
