"""Does what one engine taught help another? `python -m benchmarks.knowledge_transfer --seeds 5 --jobs 2 --cpus-per-job 1`

1. One run of the loop on the bundled engine teaches (`learn`, or a run that is there already: --learned RUN).
2. Its entries are accepted for the second engine (benchmarks/second_engine, written apart, behind the server of
   docs/examples/hf_target): a reviewer's decision, taken here by rule so that the experiment can be repeated. Each scope is
   rewritten to exactly that engine, by the same code as `optimize review accept --scope`.
3. On the second engine each seed runs twice with the same budget, with the entries and without any.

Printed: per seed the attempts and seconds until 90 % of the final gain, their ratio with its interval, and one line of
JSON. All runs stay in --out; called again, only what is missing there is run. Not for: one entry's worth (`optimize
knowledge ablate ENTRY`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from optimizer import run as runs
from optimizer import start, state
from optimizer.knowledge import learning, trials, writeback
from optimizer.knowledge.ablation import WITH
from optimizer.knowledge.blueprint import Blueprint, Entry, Scope, Status
from optimizer.knowledge.trials import Job, Plan
from optimizer.review import queue as review

ROOT = Path(__file__).resolve().parents[1]
SECOND, SERVER = ROOT / "benchmarks" / "second_engine", ROOT / "docs" / "examples" / "hf_target"
MODEL = ROOT / "engine" / "tiny_qwen3"
REVIEWER = "benchmarks.knowledge_transfer"
CLAIM = 1 / 3  # of the attempts, for 90 % of the final gain


def engine(place: Path) -> Path:
    """The second engine as a target: its files, and the server that the worked example is served by."""
    place.mkdir(parents=True, exist_ok=True)
    for file in (*SECOND.glob("*.py"), SECOND / "target.toml", SERVER / "serve.py", SERVER / "loop.py"):
        shutil.copyfile(file, place / file.name)
    return place


def learn(place: Path, options: argparse.Namespace) -> Path:
    """The folder of a finished run on the bundled engine. Raises AblationError when it fails."""
    if options.learned is not None:
        return options.learned
    run_dir = (place / "learn").resolve()
    if not trials.finished(run_dir):
        command = (sys.executable, "-m", "optimizer.cli", "--target-dir", str(ROOT / "engine"), "--tp", str(options.tp),
                   "--attempts", str(options.learn_attempts), "--protocol", options.protocol, "--seed", "0",
                   "--run-dir", str(run_dir), "--without-knowledge", "all", "--device", "cpu")  # fmt: skip
        if (run_dir / "run.json").is_file():
            command = (sys.executable, "-m", "optimizer.cli", "resume", str(run_dir))
        trials.spawn(Job(0, "learn", run_dir, command))
    return run_dir


def accept(learned: Path, folder: Path, given: start.Options) -> list[str]:
    """Accept every entry of the run for exactly the engine of `given`; what the validator blocks stays out. Ids."""
    facts = learning.facts(start.prepare(given))
    scope = {name: [facts[name]] for name in Scope.model_fields}
    folder.mkdir(parents=True, exist_ok=True)
    done = {e.id: e.status for e in Blueprint.load(folder).entries()}
    writeback.ship(learned, folder)
    for item in review.queue(folder / "no-runs", folder):
        if done.get(item.entry.id, Status.PROPOSED) is Status.PROPOSED:
            review.accept(item, REVIEWER, "to see whether it holds on another engine", scope, folder)
    return [e.id for e in Blueprint.load(folder).entries() if e.status is Status.ACCEPTED]


def main() -> int:
    options = _options()
    out, console = options.out.resolve(), Console(width=160)
    given = start.Options(target_dir=engine(out / "second"), model=MODEL, tp=1, device="cpu", protocol=options.protocol,
                          attempts=options.attempts, budget_minutes=options.budget_minutes)  # fmt: skip
    learned = learn(out, options)
    taught = [(e.mechanism, e.helps) for e in _entries(learned)]
    console.print("learned: " + ("; ".join(f"{name} {'helps' if helps else 'brings nothing'}" for name, helps in taught) or "nothing"))
    shutil.rmtree(out / "probe", ignore_errors=True)
    accept(learned, out / "knowledge", replace(given, run_dir=out / "probe", seed=0))
    plan = Plan(out / "runs", out / "knowledge", trials.arguments(given), tuple(range(1, options.seeds + 1)), jobs=options.jobs, cpus_per_job=options.cpus_per_job)
    trials.check(plan)
    found = trials.ablate(plan, say=lambda text: console.print(text, highlight=False))
    trials.show(found, console)
    ratio = found.attempts
    there = ratio is not None and ratio.mean <= CLAIM + 1e-9 and not ratio.never[WITH]
    console.print(f"90 % of the final gain in at most a third of the attempts: {'yes' if there else 'no'}")
    console.out(trials.to_json(found, {"what": "knowledge transfer", "tp": 1, "learned": taught, "a_third": there}), highlight=False)
    return 0 if there else 1


def _entries(learned: Path) -> list[Entry]:
    run = runs.load(learned)
    lines = run.ledger.lines()
    return [e for a in state.attempts(lines) for e in writeback.entries_of(run, lines, a)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tp", type=int, default=2, help="of the run that teaches; the second engine has one rank")
    parser.add_argument("--attempts", type=int, default=4, help="budget of each run on the second engine")
    parser.add_argument("--learn-attempts", type=int, default=4)
    parser.add_argument("--budget-minutes", type=float, default=None, help="wall time of each run on the second engine")
    parser.add_argument("--protocol", choices=["quick", "full"], default="quick")
    parser.add_argument("--learned", type=Path, default=None, help="folder of a finished run on the bundled engine")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--cpus-per-job", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs") / "transfer")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (trials.AblationError, start.Refused, review.ReviewError) as error:
        sys.exit(f"knowledge_transfer: {error}")
