"""`optimize reproduce`: an accepted patch of a run, or all of them, applied, gated and timed again on this machine.

Everything is taken out of the record (base commit, edits, engine's arguments), checked against the commits that the record
holds, and judged by the gates of this checkout on fresh secret prompts, in a run folder of its own; the record itself is
only read. Not for: `optimize verify` (offline: was the record judged as it says?), or accepting anything.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optimizer import accept, fingerprint, seal, state
from optimizer.candidate import incumbent_name
from optimizer.judge import failures, order_of
from optimizer.patching import EditMismatch, apply_edits
from optimizer.recorded import Incomplete, whole_copy
from optimizer.run import MODEL_CONFIG, Request, Run, config_folder, load, new_id
from optimizer.runrepo import Conflict, RunRepo
from optimizer.serial import build, plain, write_json
from optimizer.services import Services, Stop, View
from optimizer.start import DEFAULT_MODEL
from optimizer.truth import weights
from optimizer.types import GateResult, LaunchSpec, Pair, Patch, Stage


class ReproduceError(RuntimeError):
    """It cannot be reproduced here; nothing was timed. One clear line."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for."""

    attempt: int | None = None  # one accepted attempt; None: the first engine against the final one
    model: Path | None = None
    pairs: int | None = None  # as many as the protocol's confirmation, or its headline
    devices: tuple[int, ...] = ()
    keep: Path | None = None  # folder of the new run; `<record>/../<id>-again-<time>` if left out; the command puts it among the runs
    unsafe_no_sandbox: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """Which ones were used, and how they relate to the record's."""

    directory: Path
    sha256: str
    seed: int | None
    words: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate time over incumbent time."""

    ratio: float
    ci95: tuple[float, float]
    pairs: int

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.ci95[0]:.3f}, {self.ci95[1]:.3f}], {self.pairs} pairs"


@dataclass(slots=True)
class Reproduced:
    """What came out. `agree` is None where the record holds no interval to agree with, or a gate failed."""

    what: str
    weights: Weights
    applied: list[str]
    gates: list[GateResult] = field(default_factory=list)
    recorded: Ratio | None = None
    here: Ratio | None = None
    agree: bool | None = None
    machine: str = ""
    folder: Path | None = None

    @property
    def ok(self) -> bool:
        return _passed(self.gates) and self.here is not None and self.agree is not False and self.resolved

    @property
    def resolved(self) -> bool:
        """Whether the interval here is below 1 where the recorded one is: a wide one agrees with everything."""
        return self.here is not None and (self.here.ci95[1] < 1 or self.recorded is None or self.recorded.ci95[1] >= 1)


def _passed(gates: Sequence[GateResult]) -> bool:
    """What waits for a person waited in the record, too."""
    return all(gate.passed or gate.parked for gate in gates)


@dataclass(frozen=True, slots=True)
class Arms:
    """What is compared, and the commits in between, oldest first."""

    what: str
    before: str
    after: str
    commits: tuple[str, ...]
    stage: Stage
    recorded: Ratio | None


ServicesOf = Callable[[Run, View], AbstractContextManager[Services]]


def reproduce(record: Run, options: Options, view: View, services: ServicesOf | None = None) -> Reproduced:
    """Apply, gate and time again. Raises ReproduceError before anything is started where it cannot be done here."""
    arms = arms_of(record, options.attempt)
    _device(record, options)
    folder = options.keep or record.dir.parent / f"{record.request.id}-again-{new_id()}"
    if (folder / "run.json").exists():
        raise ReproduceError(f"{folder} already holds a run; give another --keep")
    chosen = weights_for(record, options.model, folder)
    run = _fresh(record, options, chosen, folder)
    applied = reapply(record, run.repo, arms)
    if services is None:
        from optimizer.wiring import real as services
    found = Reproduced(arms.what, chosen, applied, recorded=arms.recorded, machine=_machine(record, run), folder=folder)
    view.note(f"{arms.what}: {chosen.words}")
    with services(run, view) as do:
        try:
            with failures(run, arms.stage):
                found.gates = _gates(run, do, arms)
                if _passed(found.gates):
                    found.here = _time(run, do, arms, options.pairs)
        except Stop as stop:  # it broke while it was timed, or started
            found.gates.append(GateResult("while it ran", "", False, stop.reason, stop.detail))
    if found.here is not None and found.recorded is not None:
        found.agree = agree(found.recorded, found.here)
    write_json(folder / "reproduced.json", {"record": str(record.request.id), **plain(found), "ok": found.ok})
    return found


def said(found: Reproduced) -> list[str]:
    """What a person is told, a line each."""
    lines = [f"{found.what}, {found.machine}", f"weights: {found.weights.words}"]
    lines += [f"applied {line}" for line in found.applied]
    passed = [g for g in found.gates if g.passed]
    lines.append(f"gates passed: {', '.join(dict.fromkeys(g.gate for g in passed)) or 'none'}")
    lines += [f"gate {g.gate} {'waits for a person' if g.parked else 'FAILED'}: {g.detail}" for g in found.gates if not g.passed]
    lines.append(f"time ratio recorded:   {found.recorded or 'no interval in the record'}")
    lines.append(f"time ratio reproduced: {found.here or 'none: it was not timed, or too many pairs were lost'}")
    if found.agree is not None and found.here is not None:
        gain = "the gain is there" if found.here.ci95[1] < 1 else "no gain is shown here"
        wide = "" if found.resolved else ", but the one here is too wide to show the gain: --pairs"
        lines.append(f"they agree within their intervals{wide}" if found.agree else f"they do NOT agree within their intervals; {gain}")
    return [*lines, f"kept in {found.folder}"]


# -- what the record says ---------------------------------------------------------------------------------------


def arms_of(record: Run, attempt: int | None) -> Arms:
    """The two trees that are compared. Raises ReproduceError naming the accepted attempts."""
    lines = record.ledger.lines()
    accepted = {a.number: a for a in state.attempts(lines) if a.end is not None and a.end["kind"] == "accepted"}
    if not accepted:
        raise ReproduceError(f"run {record.request.id} accepted nothing: there is nothing to reproduce")
    if attempt is None:
        final = state.incumbent(lines, record.base)
        commits = tuple(record.repo.log(record.base, final))
        return Arms(f"all {len(accepted)} accepted attempts", record.base, final, commits, Stage.HEADLINE, _recorded_whole(lines))
    if attempt not in accepted:
        raise ReproduceError(f"attempt {attempt} of run {record.request.id} was not accepted; accepted were: {', '.join(map(str, accepted))}")
    end = accepted[attempt].end
    assert end is not None
    commits = tuple(end["data"]["commits"])
    before = record.repo.git("rev-parse", f"{commits[0]}^").strip()
    confirmed = [d for d in accepted[attempt].data("confirmed") if d.get("member") is None]
    recorded = _ratio(confirmed[-1]) if confirmed else None
    return Arms(f"attempt {attempt} ({end['data'].get('mechanism', '?')})", before, commits[-1], commits, Stage.CONFIRM, recorded)


def _ratio(data: dict[str, Any]) -> Ratio | None:
    low, high = data.get("ci95") or (None, None)
    if not data.get("ratio") or not low or not high:
        return None
    return Ratio(float(data["ratio"]), (float(low), float(high)), int(data.get("pairs") or 0))


def _recorded_whole(lines: Sequence[dict[str, Any]]) -> Ratio | None:
    """The record's headline; without one the product of its confirmations, their half-widths added in quadrature."""
    for line in reversed(lines):
        if line["kind"] == "finished" and (found := _ratio(line["data"].get("headline") or {})):
            return found
    parts = [_ratio(line["data"]) for line in lines if line["kind"] == "accepted"]
    if not parts or any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    middle, half = sum(math.log(p.ratio) for p in known), math.sqrt(sum(_half(p) ** 2 for p in known))
    return Ratio(math.exp(middle), (math.exp(middle - half), math.exp(middle + half)), min(p.pairs for p in known))


def _half(ratio: Ratio) -> float:
    """Half of the interval, in logarithms."""
    return (math.log(ratio.ci95[1]) - math.log(ratio.ci95[0])) / 2


def agree(recorded: Ratio, here: Ratio) -> bool:
    """Whether the difference of the logarithms is within the two intervals, added in quadrature."""
    return abs(math.log(here.ratio) - math.log(recorded.ratio)) <= math.hypot(_half(recorded), _half(here))


def reapply(record: Run, repo: RunRepo, arms: Arms) -> list[str]:
    """Apply every recorded patch to its parent's sources, and all commits to the base: the same must come out.

    repo: a copy of the record's. Returns a line for each. Raises ReproduceError where the record's edits do not give the
    record's commit.
    """
    globs, said = record.target.editable, []
    patches = _patches(record)
    for commit in arms.commits:
        title = repo.message(commit).splitlines()[0]
        patch = patches.get(commit)
        if patch is None:  # a commit that ablation replayed: its edits are judged by the replay below
            said.append(f"{commit[:12]} {title}: as a commit")
            continue
        parent = repo.git("rev-parse", f"{commit}^").strip()
        try:
            after = apply_edits(repo.sources(parent, globs), patch)
        except EditMismatch as error:
            raise ReproduceError(f"{commit[:12]} {title}: its edits do not apply: {error}") from error
        if after != repo.sources(commit, globs):
            raise ReproduceError(f"{commit[:12]} {title}: its edits give other sources than its commit holds")
        said.append(f"{commit[:12]} {title}: {len(patch.edits)} edits")
    try:
        again = repo.replay(repo.log(record.base, arms.after), record.base)
    except Conflict as error:
        raise ReproduceError(f"the commits do not apply to the base: {error}") from error
    if repo.tree_of(again) != repo.tree_of(arms.after):
        raise ReproduceError("the commits, applied to the base one after the other, give another tree than the record's")
    return said


def _patches(record: Run) -> dict[str, Patch]:
    """Commit -> its patch as the attempt's folder keeps it; commits without one are absent."""
    found: dict[str, Patch] = {}
    for attempt in state.attempts(record.ledger.lines()):
        file = record.attempt_dir(attempt.number) / "patch.json"
        if attempt.end is None or attempt.end["kind"] != "accepted" or not file.is_file():
            continue
        texts = json.loads(file.read_text("utf-8"))["patches"]
        found |= dict(zip(attempt.end["data"]["commits"], (build(Patch, text) for text in texts), strict=False))
    return found


# -- this machine -----------------------------------------------------------------------------------------------


def _device(record: Run, options: Options) -> None:
    want = record.request
    if want.device != "cuda":
        return
    here = fingerprint.gpus()
    had = ", ".join(g["name"] for g in want.environment.get("gpus") or []) or "an NVIDIA GPU"
    if len(here) < max(want.tp, len(options.devices)):
        raise ReproduceError(
            f"run {want.id} was taken on {had} with TP={want.tp}; this machine shows {len(here)} NVIDIA GPUs (nvidia-smi). "
            "`optimize verify` checks the record without one"
        )


def weights_for(record: Run, given: Path | None, folder: Path) -> Weights:
    """The record's weights where they are here, else those of --model, else random ones from the record's seed.

    Raises ReproduceError where none can be had, or where --model is another architecture.
    """
    want = record.request
    if given is not None and not (given / "config.json").is_file():
        raise ReproduceError(f"--model {given}: no config.json there")
    if given is not None and list(given.glob("*.safetensors")):
        _same_dimensions(want, given)
        sha = weights.digest(given)
        same = "the record's own" if sha == want.weights_sha256 else f"not the record's ({_short(want.weights_sha256)})"
        return Weights(given.resolve(), sha, None, f"real weights of {given}, sha256 {_short(sha)}: {same}")
    for place in (want.model_dir, DEFAULT_MODEL):
        if given is None and list(place.glob("*.safetensors")) and weights.digest(place) == want.weights_sha256:
            kind = "real weights" if want.weights_seed is None else f"random weights of seed {want.weights_seed}"
            return Weights(place.resolve(), str(want.weights_sha256), want.weights_seed, f"{kind}, the record's own, sha256 {_short(want.weights_sha256)}")
    config = given or (config_folder(record.dir / MODEL_CONFIG, folder) if (record.dir / MODEL_CONFIG).is_file() else None)
    if want.weights_seed is None or config is None:
        need = "the folder of that model" if want.weights_seed is None else f"a folder with its config.json (random weights follow from seed {want.weights_seed})"
        raise ReproduceError(f"the weights of run {want.id} (sha256 {_short(want.weights_sha256)}) are not here: give --model, {need}")
    _same_dimensions(want, config)
    made = weights.write_random(config, folder / "weights" / "dummy", want.weights_seed)
    sha = weights.digest(made)
    same = "the record's own" if sha == want.weights_sha256 else f"other files than the record's ({_short(want.weights_sha256)}): another config.json"
    return Weights(made.resolve(), sha, want.weights_seed, f"random weights of seed {want.weights_seed}, sha256 {_short(sha)}: {same}")


def _same_dimensions(want: Request, model: Path) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    other = {k: (v, config.get(k)) for k, v in want.model.items() if k in config and config[k] != v and k not in ("torch_dtype", "dtype")}
    if other:
        name, (had, has) = next(iter(other.items()))
        raise ReproduceError(f"--model {model} is another model: {name} is {has}, the run had {had}")


def _short(sha: str | None) -> str:
    return str(sha)[:12]


def _fresh(record: Run, options: Options, chosen: Weights, folder: Path) -> Run:
    """A run folder of its own: the record's repository and request, this machine's everything else."""
    from optimizer.confine import sandbox

    want = record.request
    level = sandbox.detect()
    if level.name == "none" and not options.unsafe_no_sandbox:
        raise ReproduceError("no sandbox works here: install bubblewrap, or say --unsafe-no-sandbox")
    seal.verify()
    devices = options.devices or (tuple(int(g["index"]) for g in fingerprint.gpus())[: want.tp] if want.device == "cuda" else ())
    python = want.python if want.python.is_file() else Path(sys.executable)
    request = replace(
        want, id=folder.name, python=python, model_dir=chosen.directory, weights_sha256=chosen.sha256, weights_seed=chosen.seed,
        devices=devices, sandbox=level.name, sandbox_level=level.name, gates_digest=seal.digest(), prompt_key=secrets.token_hex(32),
        environment=fingerprint.fingerprint(want.device, level.name, devices),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    try:
        whole_copy(record, folder / "repo.git", folder / "worktrees")
    except Incomplete as error:
        raise ReproduceError(str(error)) from error
    write_json(folder / "run.json", request)
    run = load(folder)
    shown = {k: v for k, v in plain(request).items() if k != "prompt_key"}
    run.ledger.append("run_started", None, {**shown, "reproduces": want.id})
    return run


def _machine(record: Run, run: Run) -> str:
    """Both machines in words, and whether they are of a kind."""
    had, has = record.request.environment, run.request.environment
    words = [", ".join(g["name"] for g in e.get("gpus") or []) or str(e.get("cpu", "?")) for e in (had, has)]
    return f"on {words[1]}, as recorded" if words[0] == words[1] else f"on {words[1]}; recorded on {words[0]}: another ratio is no surprise"


# -- judging it again -------------------------------------------------------------------------------------------


def _gates(run: Run, do: Services, arms: Arms) -> list[GateResult]:
    """Quick gates on every commit against its parent, the others on the last; stops at the first that fails."""
    found: list[GateResult] = []
    incumbent = run.spec(arms.before, incumbent_name(arms.before), "incumbent")
    with do.compiling([_candidate(run, commit) for commit in arms.commits[1:]]):
        for stage, commit in (*(("quick", commit) for commit in arms.commits), ("full", arms.commits[-1])):
            parent = run.repo.git("rev-parse", f"{commit}^").strip()
            do.check_seal()
            do.view.step(f"{stage} gates of {commit[:12]}")
            for result in do.gates(stage, _candidate(run, commit), incumbent, parent, commit):
                found.append(result)
                run.ledger.append("gate", None, {**plain(result), "stage": stage, "commit": commit})
                if not result.passed and not result.parked:
                    return found
    do.check_seal()
    return found


def _candidate(run: Run, commit: str) -> LaunchSpec:
    return run.spec(commit, f"again-{commit[:12]}", "candidate")


def _time(run: Run, do: Services, arms: Arms, wanted: int | None) -> Ratio | None:
    """Fresh launches of both arms in turns on fresh prompts, as in a confirmation; None when too many were lost."""
    count = wanted or (do.protocol.confirm_pairs if arms.stage is Stage.CONFIRM else do.protocol.headline_pairs)
    a, b = run.spec(arms.before, incumbent_name(arms.before), "incumbent"), _candidate(run, arms.after)
    kept: list[Pair] = []
    for index in range(2 * count):
        if len(kept) == count:
            break
        do.view.step(f"pair {len(kept) + 1} of {count}", do.budget.pair_s())
        pair = do.run_pair(a, b, arms.stage, index, order_of(run, arms.stage, arms.after, index))
        run.pair_ended(None, pair, arms.after)
        kept += [] if pair.discarded else [pair]
    if len(kept) < 2:
        return None
    ratio, ci95 = accept.interval(kept)
    return Ratio(ratio, ci95, len(kept))
