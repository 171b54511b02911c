"""One run: its folder, its fixed request (`run.json`), its ledger and repository, and the arms it can launch.

`run.json` is written once at the start and never changed; what happens afterwards is in the ledger (`state.py`
reads it). Not for: the steps of an attempt (loop.py), nor budgets (budget.py).
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optimizer.ledger import Ledger
from optimizer.runrepo import GitError, RunRepo
from optimizer.seal import SEAL
from optimizer.serial import build, plain, write_json
from optimizer.target import TargetError, parse_target
from optimizer.types import LaunchSpec, Pair, Target

SCHEMA = 1
MODEL_CONFIG = "model_config.json"  # beside run.json, where the weights were drawn from a seed


def config_folder(config: Path, folder: Path) -> Path:
    """A model folder that holds just this config.json, in a run's folder. Raises OSError."""
    place = folder / "weights" / "config"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, place / "config.json")
    return place


class RunError(Exception):
    """A run folder that is missing, broken or not what was asked for; one clear line."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What `--goal` asks for: `1.5x` is a factor over the first engine, `60` a value of the target."""

    kind: str  # "factor" or "value"
    value: float
    unit: str = "tok/s"  # of a value: `targets.stated` says which a target has

    def __str__(self) -> str:
        return f"{self.value:g}x" if self.kind == "factor" else f"{self.value:g} {self.unit}"


def parse_goal(text: str, unit: str) -> Goal:
    """`1.5x`, or `60` of the unit. Raises ValueError with the two valid forms."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(x?)", text.strip())
    value = float(match[1]) if match else 0.0
    if match is None or value <= 0 or (match[2] and value <= 1):
        raise ValueError(f"{text!r}: give a factor above 1 such as 1.5x, or a number of {unit} such as 60")
    return Goal("factor" if match[2] else "value", value, unit)


_LIMIT_OPTIONS = {
    "attempts": "--attempts", "wall_minutes": "--budget-minutes", "consecutive_rejections": "--max-rejections", "usd": "--max-usd",
    "gpu_minutes": "--gpu-minutes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets; None means no limit. Spent ones end the run. Raises RunError for one that is no number above 0."""

    attempts: int | None = None
    wall_minutes: float | None = None
    consecutive_rejections: int | None = None
    usd: float | None = None
    gpu_minutes: float | None = None

    def __post_init__(self) -> None:
        for name, option in _LIMIT_OPTIONS.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:  # neither does a number that is none
                raise RunError(f"{option} {value}: must be above 0")


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, as `run.json` keeps it. Everything a resumed run needs, and nothing that changes."""

    id: str
    created_utc: str
    target_dir: Path
    target: str  # name in target.toml
    target_file: str  # path of target.toml in the snapshot
    python: Path
    model_dir: Path
    metric: str
    tp: int
    device: str
    dtype: str
    agent: str
    protocol: str
    seed: int
    limits: Limits
    goal: Goal | None = None
    devices: tuple[int, ...] = ()
    sandbox: str = "auto"
    sandbox_level: str | None = None
    gates_digest: str | None = None
    weights_sha256: str | None = None
    weights_seed: int | None = None  # dummy weights, written by the optimiser from this
    prompt_key: str = ""  # hex; the prompts of every evaluation follow from it and from the evaluation's name
    root_commit: str = ""
    snapshot_left_out: tuple[str, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)  # dimensions out of config.json
    environment: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the proposer
    accept_numeric_drift: bool = False
    guard_margins: dict[str, float] = field(default_factory=dict)  # stated by a person at the start: 0.05 = 5 %
    engine_args: tuple[str, ...] = ()  # appended to the target's command in every arm
    knowledge: Path | None = None  # folder of the blueprint that the proposer reads; the repository's own if None
    without_knowledge: tuple[str, ...] = ()  # ids of entries kept from the proposer; "all" keeps every one
    schema: int = SCHEMA


@dataclass(slots=True)
class Run:
    """A run's folder and what lies in it."""

    dir: Path
    request: Request
    target: Target
    ledger: Ledger
    repo: RunRepo
    stop_requested: bool = False  # set by SIGINT; the loop ends after the current step

    @property
    def base(self) -> str:
        return self.request.root_commit

    def spec(self, commit: str, name: str, label: str, tp: int | None = None) -> LaunchSpec:
        """One arm: the tree of a commit, checked out at worktrees/<name>, with everything else as requested."""
        want = self.request
        tp = want.tp if tp is None else tp
        return LaunchSpec(
            tree=self.repo.tree(commit, name),
            target=self.target,
            python=want.python,
            model_dir=want.model_dir,
            tp=tp,
            device=want.device,
            devices=want.devices,
            sandbox=want.sandbox,
            label=label,
            extra_args=want.engine_args,
            compiled=self._compiled(commit, tp),
            compiled_before=None if commit == self.base else self._compiled(f"{commit}^", tp),
        )

    def _compiled(self, commit: str, tp: int) -> Path | None:
        """Where what a commit's tree compiles lies; on a CPU nothing is compiled."""
        if self.request.device != "cuda":
            return None
        return self.dir / "compiled" / f"{self.repo.tree_of(commit)[:16]}-tp{tp}"

    def attempt_dir(self, number: int) -> Path:
        return self.dir / "attempts" / str(number)

    # -- the pair in flight: what makes a killed pair visible -------------------------------------------------

    @property
    def _flight(self) -> Path:
        return self.dir / "pair_in_flight.json"

    def pair_begins(self, attempt: int | None, data: dict[str, Any]) -> None:
        write_json(self._flight, {"attempt": attempt, "data": data})

    def pair_ended(self, attempt: int | None, pair: Pair, key: str) -> None:
        """The pair enters the ledger (and the attempt's own file); from now on it is never repeated."""
        line = self.ledger.append("pair", attempt, {**plain(pair), "key": key})
        if attempt is not None:
            place = self.attempt_dir(attempt) / "pairs.jsonl"
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line["data"], sort_keys=True) + "\n")
        self._flight.unlink(missing_ok=True)

    def pair_interrupted(self) -> dict[str, Any] | None:
        """Enter a pair that a killed process had begun as `interrupted`, once. Returns its data."""
        if not self._flight.exists():
            return None
        flight = json.loads(self._flight.read_text("utf-8"))
        data = flight["data"]
        same = ("stage", "index", "key")
        done = [line["data"] for line in self.ledger.lines() if line["kind"] == "pair"]
        known = any(all(pair.get(k) == data.get(k) for k in same) for pair in done)
        if not known:
            empty = {"prompts_sha": "", "a_us_per_token": None, "b_us_per_token": None, "guards": {}}
            self.ledger.append("pair", flight["attempt"], {**empty, **data, "discarded": "interrupted"})
        self._flight.unlink()
        return None if known else data


def new_id(now: datetime | None = None) -> str:
    """Sorts by time, and two runs started in one second differ."""
    return f"{(now or datetime.now(UTC)):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def create(runs: Path, request: Request, target: Target, directory: Path | None = None) -> Run:
    """Make the run's folder, repository, `run.json` and first ledger line. Raises RunError if it exists."""
    place = directory or runs / request.id
    if (place / "run.json").exists():
        raise RunError(f"{place} already holds a run; `optimize resume {place}` goes on with it")
    place.mkdir(parents=True, exist_ok=True)
    repo = RunRepo(place / "repo.git", place / "worktrees")
    snapshot = repo.create(target)
    values = {**plain(request), "root_commit": snapshot.commit, "snapshot_left_out": list(snapshot.left_out)}
    write_json(place / "run.json", values)
    _keep_seal(place)
    request = build(Request, values)
    run = Run(place, request, target, Ledger(place / "ledger.jsonl"), repo)
    _context(run)
    shown = {k: v for k, v in values.items() if k != "prompt_key"}
    run.ledger.append("run_started", None, {**shown, "files": snapshot.files})
    return run


def _keep_seal(place: Path) -> None:
    """The seal that this run is judged under, for those who look at it under a later one."""
    if SEAL.is_file():
        (place / "seal").mkdir(exist_ok=True)
        shutil.copyfile(SEAL, place / "seal" / "SEAL")


def load(directory: Path) -> Run:
    """Open an existing run; its target is the one in its snapshot, whatever became of the user's folder.

    Raises RunError when it is not a run, or was written by a later version.
    """
    request = read_request(directory)
    repo = RunRepo(directory / "repo.git", directory / "worktrees")
    try:
        target = parse_target(repo.show(request.root_commit, request.target_file), request.target_dir)
    except (GitError, TargetError) as error:
        raise RunError(f"{directory}: {error}") from error
    run = Run(directory, request, target, Ledger(directory / "ledger.jsonl"), repo)
    _context(run)
    return run


def read_request(directory: Path) -> Request:
    """`run.json` of a run folder. Raises RunError."""
    path = directory / "run.json"
    if not path.is_file():
        raise RunError(f"no run in {directory}")
    try:
        raw = json.loads(path.read_text("utf-8"))
        if raw.get("schema") != SCHEMA:
            raise RunError(f"{path}: schema {raw.get('schema')!r} is not known; valid: {SCHEMA}")
        return build(Request, raw)
    except ValueError as error:
        raise RunError(f"{path}: {error}") from error


def find(runs: Path, name: str | None) -> Path:
    """The folder of a run given its id, a beginning of it, a path, or nothing (the newest). Raises RunError."""
    if name and (Path(name) / "run.json").is_file():
        return Path(name)
    known = sorted(p.parent for p in runs.glob("*/run.json"))
    if not known:
        raise RunError(f"no runs in {runs}")
    if name is None:
        return known[-1]
    found = [p for p in known if p.name.startswith(name)]
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        raise RunError(f"{what} in {runs} with an id that begins with {name!r}; there are: {', '.join(p.name for p in known[-5:])}")
    return found[0]


def _context(run: Run) -> None:
    run.ledger.context.gates_digest = run.request.gates_digest
    run.ledger.context.sandbox_level = run.request.sandbox_level
    run.ledger.context.incumbent_commit = run.request.root_commit
    run.ledger.context.env_hash = run.request.environment.get("hash")

