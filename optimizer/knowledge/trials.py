"""Start the runs that an ablation of knowledge compares: two a seed, each a process of its own, resumable.

Arms of a seed run one after the other and change places from seed to seed. With `jobs`, several run side by side, each
bound to CPUs of its own: a neighbour on the same core would be noise. Not for: what the runs say (ablation.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from optimizer import start
from optimizer.knowledge import ablation, learning
from optimizer.knowledge.ablation import WITH, WITHOUT, Answer
from optimizer.knowledge.blueprint import Blueprint, Status
from optimizer.ledger import Ledger, Line
from optimizer.run import Run
from optimizer.serial import plain
from optimizer.start import Options

ROOT = Path(__file__).resolve().parents[2]


class AblationError(Exception):
    """An ablation that cannot be made; one clear line."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`options`: of `optimize`, the same for every run (--target-dir, --tp, --attempts, ...). `without`: the entries that
    the second arm does without; () for every accepted one. `place`: the folder of all runs and of their logs."""

    place: Path
    knowledge: Path
    options: tuple[str, ...]
    seeds: tuple[int, ...]
    without: tuple[str, ...] = ()
    share: float = ablation.SHARE
    jobs: int = 1
    cpus_per_job: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its folder, and the command that begins it or goes on with it."""

    seed: int
    arm: str
    run_dir: Path
    command: tuple[str, ...]
    cpus: frozenset[int] = field(default=frozenset())  # empty: any

    @property
    def log(self) -> Path:
        return self.run_dir.with_suffix(".log")


Execute = Callable[[Job], None]


def check(plan: Plan) -> None:
    """Raises AblationError for an entry that no proposer reads, and for a blueprint without accepted ones."""
    entries = {e.id: e for e in Blueprint.load(plan.knowledge).entries()}
    accepted = sorted(e.id for e in entries.values() if e.status is Status.ACCEPTED)
    for name in plan.without:
        if name not in entries:
            raise AblationError(f"no entry {name!r} in {plan.knowledge}; accepted are: {', '.join(accepted) or 'none'}")
        if entries[name].status is not Status.ACCEPTED:
            raise AblationError(f"{name} is {entries[name].status}: proposers read accepted entries only (`optimize review accept {name}`)")
    if not accepted:
        raise AblationError(f"{plan.knowledge} has no accepted entry: both arms would be the same")


def arguments(options: Options) -> tuple[str, ...]:
    """The same as words of a command line; paths made absolute, since a run starts in the repository's root."""
    flags = {
        "--target": options.metric, "--target-dir": options.target_dir, "--model": options.model, "--tp": options.tp,
        "--device": options.device, "--protocol": options.protocol, "--skills": options.skills or None,
        "--attempts": options.attempts, "--budget-minutes": options.budget_minutes,
    }  # fmt: skip
    found: list[str] = []
    for name, value in flags.items():
        if value is not None:
            found += [name, str(value.resolve() if isinstance(value, Path) else value)]
    return tuple(found)


def probe(plan: Plan, options: Options) -> None:
    """Make a run without starting it, see whether the entries speak of it, drop it. Raises AblationError or Refused."""
    plan.place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan.place) as folder:
        place = Path(folder) / "probe"
        in_scope(plan, start.prepare(replace(options, run_dir=place, knowledge=plan.knowledge, seed=0)))


def in_scope(plan: Plan, probe: Run) -> None:
    """Raises AblationError when the entries say nothing of this run: then both arms would be the same."""
    held = [e.id for mode in ("eager", "graph") for e in learning.accepted(probe, mode)]  # one becomes the other on the way
    missing = [name for name in plan.without if name not in held]
    if missing or not held:
        facts = ", ".join(f"{name}={value}" for name, value in learning.facts(probe).items())
        raise AblationError(f"the scope of {', '.join(missing) or 'every accepted entry'} does not hold for this run ({facts})")


def ablate(plan: Plan, execute: Execute | None = None, say: Callable[[str], None] = lambda text: None) -> Answer:
    """Run what is not finished yet, then compare. Raises AblationError; an interrupted one goes on when called again."""
    check(plan)
    execute = execute or spawn
    free: queue.SimpleQueue[frozenset[int]] = queue.SimpleQueue()
    for cpus in shares(sorted(os.sched_getaffinity(0)), plan.jobs, plan.cpus_per_job):
        free.put(cpus)

    def one(seed: int, arm: str) -> None:
        cpus = free.get()
        try:
            if not finished(plan.place / f"{seed}-{arm}"):
                say(f"seed {seed}, {arm} knowledge")
                execute(job(plan, seed, arm, cpus))
        finally:
            free.put(cpus)

    plan.place.mkdir(parents=True, exist_ok=True)
    order = [(seed, arm) for n, seed in enumerate(plan.seeds) for arm in ((WITH, WITHOUT) if n % 2 == 0 else (WITHOUT, WITH))]
    with ThreadPoolExecutor(plan.jobs) as pool:
        for done in [pool.submit(one, *which) for which in order]:
            done.result()
    return read(plan)


def read(plan: Plan) -> Answer:
    """The answer of the seeds whose two runs are both finished."""
    ledgers = {}
    for seed in plan.seeds:
        folders = {arm: plan.place / f"{seed}-{arm}" for arm in (WITH, WITHOUT)}
        if all(finished(folder) for folder in folders.values()):
            ledgers[seed] = {arm: lines(folder) for arm, folder in folders.items()}
    return ablation.answer(ablation.trials(ledgers, plan.share), plan.share)


def job(plan: Plan, seed: int, arm: str, cpus: frozenset[int] = frozenset()) -> Job:
    """The command of one run: begun anew, or gone on with where its folder is there already."""
    place = plan.place / f"{seed}-{arm}"
    program = (sys.executable, "-m", "optimizer.cli")
    if (place / "run.json").is_file():
        return Job(seed, arm, place, (*program, "resume", str(place)), cpus)
    kept = () if arm == WITH else ("--without-knowledge", ",".join(plan.without) or "all")
    own = ("--seed", str(seed), "--knowledge", str(plan.knowledge.resolve()), "--run-dir", str(place.resolve()))
    return Job(seed, arm, place, (*program, *plan.options, *own, *kept), cpus)


def spawn(job: Job) -> None:
    """Run the command to its end, its output in the log beside the run's folder. Raises AblationError."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a", encoding="utf-8") as log, subprocess.Popen(job.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as child:
        if job.cpus:  # everything that it starts later inherits them
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(child.pid, job.cpus)
        code = child.wait()
    if code != 0:
        last = job.log.read_text("utf-8").strip().splitlines()
        raise AblationError(f"seed {job.seed}, {job.arm}: exit {code}: {last[-1] if last else 'no word'} ({job.log})")


def shares(cpus: Sequence[int], jobs: int, each: int | None) -> list[frozenset[int]]:
    """A set of CPUs for every job; any CPU where one job has them all. Raises AblationError when there are too few."""
    if jobs < 1 or (each is not None and each < 1):
        raise AblationError(f"--jobs {jobs} and --cpus-per-job {each}: both must be at least 1")
    if jobs == 1 and each is None:
        return [frozenset()]
    each = each or max(1, len(cpus) // jobs)
    if jobs * each > len(cpus):
        raise AblationError(f"--jobs {jobs} with {each} CPUs each need {jobs * each}; {len(cpus)} are there")
    return [frozenset(cpus[n * each : (n + 1) * each]) for n in range(jobs)]


def lines(run_dir: Path) -> list[Line]:
    return Ledger(run_dir / "ledger.jsonl").lines()


def finished(run_dir: Path) -> bool:
    """Whether the run ended by itself. What a person decided later comes after its last line."""
    place = run_dir / "ledger.jsonl"
    if not place.is_file():
        return False
    own = [line["kind"] for line in lines(run_dir) if line["kind"] != "reviewed"]
    return own[-1:] == ["finished"]


def show(found: Answer, console: Console) -> None:
    """The table and the answer."""
    table = Table(title=f"Attempts and seconds until {found.share:.0%} of the final gain", title_justify="left", box=None)
    for name in ("seed", "knowledge", "attempts", "seconds", "end", "tried, + accepted"):
        table.add_column(name, overflow="fold")
    for row in ablation.rows(found):
        table.add_row(*row)
    console.print(table)
    console.print(ablation.words(found), markup=False, highlight=False)


def to_json(found: Answer, about: Mapping[str, object]) -> str:
    """One line: the answer, and what it is of."""
    return json.dumps({**about, **plain(found)}, sort_keys=True)
