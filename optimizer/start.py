"""From command-line options to a run: check the request, pin what it rests on, make the run's folder.

Every mistake is a `Refused` with one clear line that names the option and the valid values. Not for: working on the
run (session.py).
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optimizer import fingerprint, run
from optimizer.run import Limits, Request, Run
from optimizer.runrepo import GitError, SnapshotError
from optimizer.target import FILE, TargetError, load_target
from optimizer.types import Target

HERE = Path(__file__).resolve().parent.parent
DEFAULT_TARGET = HERE / "engine"
DEFAULT_MODEL = DEFAULT_TARGET / "tiny_qwen3"
PROTOCOLS = ("quick", "full")
MAX_REJECTIONS = 8  # in a row; a run that brings nothing ends
MOST_MARGIN = 0.5  # that may be stated for a guard
MODELS = Path(__file__).with_name("models")  # dimensions of models that can be named: a folder each, config.json alone
LOAD_FORMATS = ("auto", "safetensors", "dummy")


class Refused(Exception):
    """The request cannot be run; one clear line."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; None means not given."""

    metric: str = "tok/s"
    goal: str | None = None
    target_dir: Path | None = None
    python: Path | None = None
    tp: int | None = None
    model: Path | None = None  # a folder, or with load_format "dummy" the name of one in MODELS
    load_format: str = "auto"  # "auto": the folder's weights, random ones where it has none
    device: str | None = None
    devices: str | None = None
    agent: str = "playbook"
    protocol: str = "quick"
    attempts: int | None = None
    budget_minutes: float | None = None
    max_rejections: int | None = MAX_REJECTIONS
    max_usd: float | None = None
    gpu_minutes: float | None = None
    seed: int | None = None
    sandbox: str = "auto"
    unsafe_no_sandbox: bool = False
    accept_numeric_drift: bool = False
    guard_margins: tuple[str, ...] = ()  # NAME=SHARE
    run_dir: Path | None = None
    runs: Path = Path("runs")
    trust_skills: tuple[Path, ...] = ()
    skills: str = ""  # names, comma-separated: all others stay out
    engine_args: str = ""  # for every arm: such as a fixed size of the KV cache, so that memory can be compared
    agent_options: tuple[str, ...] = ()  # KEY=VALUE
    knowledge: Path | None = None  # another blueprint than the repository's
    without_knowledge: str = ""  # ids, comma-separated, or all


def prepare(options: Options) -> Run:
    """Check everything that can be checked without starting an engine, then make the run. Raises Refused."""
    try:
        target = load_target(options.target_dir or DEFAULT_TARGET)
    except TargetError as error:
        raise Refused(str(error)) from None
    device, devices = _device(options, target)
    tp = _tp(options, target, devices)
    metric, goal = _metric(options, device)
    model = _model(options, target)
    level = _sandbox(options)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    name = options.run_dir.name if options.run_dir else run.new_id()
    place = options.run_dir or options.runs / name
    if (place / "run.json").exists():
        raise Refused(f"{place} already holds a run; `optimize resume {place}` goes on with it")
    # Before the weights, which may take half a minute to write:
    python, agent, agent_options, knowledge = _python(options), _agent(options), _agent_options(options), _knowledge(options)
    protocol, limits, guard_margins, engine_args = _protocol(options), _limits(options), _guard_margins(options, device), _engine_args(options)
    sealed = _seal()
    model, weights_seed = _weights(options.load_format, model, place, seed)
    request = Request(
        id=name,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        target_dir=target.directory,
        target=target.name,
        target_file=(target.directory / FILE).relative_to(target.root).as_posix(),
        python=python,
        model_dir=model,
        metric=metric,
        tp=tp,
        device=device,
        dtype=target.dtype[device],
        agent=agent,
        protocol=protocol,
        seed=seed,
        limits=limits,
        goal=goal,
        devices=devices,
        sandbox=level,
        sandbox_level=level,
        gates_digest=sealed,
        weights_sha256=_weights_sha(model),
        weights_seed=weights_seed,
        prompt_key=secrets.token_hex(32),
        model=_dimensions(model),
        environment=fingerprint.fingerprint(device, level, devices),
        options=agent_options,
        accept_numeric_drift=options.accept_numeric_drift,
        guard_margins=guard_margins,
        engine_args=engine_args,
        knowledge=knowledge,
        without_knowledge=tuple(name.strip() for name in options.without_knowledge.split(",") if name.strip()),
    )
    try:
        return run.create(options.runs, request, target, place)
    except (run.RunError, SnapshotError, GitError, OSError) as error:
        raise Refused(str(error)) from error


def _engine_args(options: Options) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options.engine_args))
    except ValueError as error:
        raise Refused(f"--engine-args {options.engine_args}: {error}") from None


def _guard_margins(options: Options, device: str) -> dict[str, float]:
    from optimizer.guard_names import possible
    from optimizer.targets import PROTOCOLS as KNOWN
    from optimizer.targets import protocol_for

    known = possible(protocol_for(KNOWN[_protocol(options)], options.metric, device))
    found: dict[str, float] = {}
    for text in options.guard_margins:
        name, _, share = text.partition("=")
        try:
            found[name] = float(share)
        except ValueError:
            raise Refused(f"--guard-margin {text}: NAME=SHARE, for example peak_memory_bytes=0.05") from None
        if not name or not 0 < found[name] <= MOST_MARGIN:
            raise Refused(f"--guard-margin {text}: the share lies above 0 and is {MOST_MARGIN:g} at most (0.05 is 5 %)")
        if name not in known:
            raise Refused(f"--guard-margin {text}: no guard of that name here; there are: {', '.join(sorted(known))}")
    return found


def _device(options: Options, target: Target) -> tuple[str, tuple[int, ...]]:
    gpus = fingerprint.gpus() if "cuda" in target.devices and options.device != "cpu" else []
    device = options.device or ("cuda" if gpus else target.devices[0])
    if device not in target.devices:
        raise Refused(f"--device {device}: {target.name} runs on {', '.join(target.devices)}")
    if device == "cuda" and not gpus:
        raise Refused("--device cuda: no NVIDIA GPU is visible here (nvidia-smi lists none)")
    if options.devices is None:
        return device, tuple(int(gpu["index"]) for gpu in gpus)[: options.tp or len(gpus)] if device == "cuda" else ()
    try:
        chosen = tuple(int(part) for part in options.devices.split(","))
    except ValueError:
        raise Refused(f"--devices {options.devices}: give indices such as 0,1") from None
    known = {int(gpu["index"]) for gpu in gpus}
    if device == "cuda" and (missing := sorted(set(chosen) - known)):
        raise Refused(f"--devices: there is no GPU {', '.join(map(str, missing))}; there are {sorted(known)}")
    return device, chosen if device == "cuda" else ()


def _tp(options: Options, target: Target, devices: tuple[int, ...]) -> int:
    tp = options.tp if options.tp is not None else target.tp[0]
    if tp not in target.tp:
        raise Refused(f"--tp {tp}: {target.name} allows {', '.join(map(str, target.tp))}")
    if devices and len(devices) < tp:
        raise Refused(f"--tp {tp} needs {tp} GPUs, --devices gives {len(devices)}")
    return tp


def _metric(options: Options, device: str) -> tuple[str, run.Goal | None]:
    from optimizer.targets import PROTOCOLS as KNOWN
    from optimizer.targets import protocol_for, stated

    try:
        protocol_for(KNOWN["quick"], options.metric, device)
    except ValueError as error:
        raise Refused(f"--target: {error}") from None
    if options.goal is None:
        return options.metric, None
    try:
        return options.metric, run.parse_goal(options.goal, stated(options.metric, 1.0)[1])
    except ValueError as error:
        raise Refused(f"--goal {error}") from None


def _model(options: Options, target: Target) -> Path:
    model = options.model
    if model is None:
        if target.directory != DEFAULT_TARGET:
            raise Refused(f"--model is needed: the weights that {target.name} is to serve")
        model = DEFAULT_MODEL
    if options.load_format not in LOAD_FORMATS:
        raise Refused(f"--load-format {options.load_format}: there are {', '.join(LOAD_FORMATS)}")
    named = MODELS / str(model).lower()
    if not model.exists() and (named / "config.json").is_file():
        if options.load_format != "dummy":
            raise Refused(f"--model {model}: of that name only the dimensions are here; --load-format dummy draws random weights, or give its folder")
        return named
    if not (model / "config.json").is_file():
        known = ", ".join(sorted(place.name for place in MODELS.iterdir()))
        raise Refused(f"--model {model}: no config.json there; give a Hugging Face model folder, or with --load-format dummy one of: {known}")
    if options.load_format == "safetensors" and not any(model.glob("*.safetensors")):
        raise Refused(f"--load-format safetensors: no *.safetensors in {model}")
    return model.resolve()


def _weights(load_format: str, model: Path, place: Path, seed: int) -> tuple[Path, int | None]:
    """The model as it is, or a copy with random weights from the run's seed: by its config.json, whatever it has stored."""
    if load_format != "dummy" and any(model.glob("*.safetensors")):
        return model, None
    from optimizer.truth import weights

    with tempfile.TemporaryDirectory() as bare:
        for path in model.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
                (Path(bare) / path.name).symlink_to(path.resolve())
        made = weights.write_random(Path(bare), place / "weights" / "dummy", seed).resolve()
    shutil.copyfile(model / "config.json", place / run.MODEL_CONFIG)  # with the seed, all that it takes to have them again
    return made, seed


def _weights_sha(model: Path) -> str:
    from optimizer.truth import weights

    return weights.digest(model)


def _python(options: Options) -> Path:
    python = options.python or Path(sys.executable)
    if python.is_file():
        return Path.cwd() / python
    found = shutil.which(str(python))
    if found is None:
        raise Refused(f"--python {python}: no such interpreter")
    return Path(found)


def _sandbox(options: Options) -> str:
    """The highest level that works here, or a lower one that was asked for: one step for patches of our own skills, none
    for those of a model. Only the bottom needs a flag of its own."""
    from optimizer.confine import sandbox

    best = sandbox.detect()
    try:
        level = best if options.sandbox == "auto" else sandbox.resolve(options.sandbox)
    except sandbox.SandboxError as error:
        raise Refused(f"--sandbox {options.sandbox}: {error}") from None
    if level.name == "none" and not options.unsafe_no_sandbox:
        why = "; ".join(best.notes) if best.name == "none" else f"{best.name} works here"
        raise Refused(f"no sandbox ({why}): install bubblewrap, or say --unsafe-no-sandbox")
    steps = 1 if options.agent == "playbook" else 0
    if best.rank - level.rank > steps and not options.unsafe_no_sandbox:
        whose = "patches of our own skills may run one level lower" if steps else "patches that a model wrote run at the highest level"
        raise Refused(f"--sandbox {level.name}: {best.name} works here, and {whose}")
    return level.name


def _agent(options: Options) -> str:
    from optimizer.proposers import NAMES

    if options.agent not in NAMES:
        raise Refused(f"--agent {options.agent}: valid are {', '.join(NAMES)}")
    if options.agent == "claude":
        from optimizer.proposers.settings import SettingError, read

        given = {k: v for k, v in _agent_options(options).items() if k not in ("config", "folders")}
        try:
            read(given, _agent_options(options).get("config"))
        except SettingError as error:
            raise Refused(f"--agent-option: {error}") from error
    return options.agent


def _agent_options(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in options.agent_options:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise Refused(f"--agent-option {text}: give KEY=VALUE")
        try:
            found[key] = json.loads(value)  # numbers, true and false; everything else is text
        except ValueError:
            found[key] = value
    for folder in options.trust_skills:
        if not folder.is_dir():
            raise Refused(f"--trust-skills {folder}: no such folder")
    if options.skills:
        if options.agent != "playbook":
            raise Refused(f"--skills {options.skills}: only the playbook has skills to choose from, not {options.agent}")
        found["only"] = [name.strip() for name in options.skills.split(",")]
    if options.trust_skills:
        found["folders"] = [str(folder.resolve()) for folder in options.trust_skills]
    if found.get("only"):
        from optimizer.proposers.skillbook import BUILT_IN

        known = {path.parent.name for folder in (BUILT_IN, *options.trust_skills) for path in folder.glob("*/SKILL.md")}
        if unknown := sorted(set(found["only"]) - known):
            raise Refused(f"--skills: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return found


def _knowledge(options: Options) -> Path | None:
    if options.knowledge is not None and not options.knowledge.is_dir():
        raise Refused(f"--knowledge {options.knowledge}: no such folder")
    return options.knowledge.resolve() if options.knowledge else None


def _protocol(options: Options) -> str:
    if options.protocol not in PROTOCOLS:
        raise Refused(f"--protocol {options.protocol}: valid are {', '.join(PROTOCOLS)}")
    return options.protocol


def _limits(options: Options) -> Limits:
    try:
        return Limits(options.attempts, options.budget_minutes, options.max_rejections, options.max_usd, options.gpu_minutes)
    except run.RunError as error:
        raise Refused(str(error)) from None


def _seal() -> str:
    from optimizer import seal

    try:
        seal.verify()
        return seal.digest()
    except seal.SealBroken as error:
        raise Refused(f"the gates are not as they were sealed: {error}") from None


def _dimensions(model: Path) -> dict[str, Any]:
    """The numbers of config.json that say which model it is."""
    raw = json.loads((model / "config.json").read_text("utf-8"))
    return {k: v for k, v in raw.items() if isinstance(v, int | str | bool)}
