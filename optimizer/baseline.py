"""`optimize baseline capture`: another engine on a stated cell, timed cleanly, then traced, cut and kept with its provenance.

One path for all: start the reference, send the same prompts, time it several times with the profiler off, profile a short
answer, cut the trace to a few steps (`trace_diff.cut`), enter it in an index (`reports.baselines`). transformers has no
server and is driven in a process of its own (`capture.capture_reference`). Not for: the arms of a run (`capture.py`), or
a verdict: a baseline is context.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer import fingerprint, vllm_server
from optimizer.awake import awake
from optimizer.capture import (
    PROFILED_TOKENS,
    NoReference,
    capture_reference,
    complete,
    profiled,
    us_per_token,
)
from optimizer.confine.launch import LaunchError, Server, launch
from optimizer.outside import Outside, OutsideError, parse, serve
from optimizer.runrepo import RunRepo
from optimizer.target import load_target
from optimizer.traffic.client import ClientError, Request
from optimizer.traffic.prompts import PromptSource
from optimizer.truth import weights
from optimizer.types import Cell, LaunchSpec, Stream
from reports import baselines
from trace_diff.cut import CutError, cut

MODES = {"eager": "eager", "graph": "cuda graph"}
PHASES = ("decode", "prefill")
DECODE_STEPS = 4  # kept of a trace, with the prefill before them
CLEAN_TOKENS = 65  # of an answer that is timed: 64 decode steps
LICENCES = {"vllm": "Apache-2.0 (vLLM); trace recorded with this program", "hf": "Apache-2.0 (transformers); trace recorded with this program"}
NOT_STATED = "the engine's own; trace recorded with this program"
START_S = 240.0


class BaselineCaptureError(RuntimeError):
    """The baseline could not be taken; nothing was kept. One clear message."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to capture. `engine` is `vllm`, `hf`, a folder with a target.toml, or a command with {socket} or {port}."""

    engine: str
    mode: str
    model: Path
    phase: str = "decode"
    batch: int = 1
    prompt_tokens: int = 12
    device: str = "cpu"
    devices: tuple[int, ...] = ()
    dtype: str = "float32"
    tp: int = 1
    repeats: int = 5
    seed: int = 0
    python: Path = Path("python3")
    vllm_site: Path | None = None
    engine_args: tuple[str, ...] = ()
    id: str | None = None
    label: str | None = None
    model_name: str | None = None
    version: str | None = None
    licence: str | None = None
    sandbox: str = "auto"
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """What one reference showed."""

    engine: str
    version: str
    command: str
    traces: tuple[Path, ...]
    clean: dict[str, Any]
    observer: float | None  # profiled over clean, of what the phase is about
    prompts_sha: str
    dtype: str
    metadata: dict[str, Any]


def capture(want: Wanted, out: Path) -> baselines.BaselineTrace:
    """Take it and enter it in `out/index.json`. Raises BaselineCaptureError, or BaselineError when the id is taken."""
    _check(want)
    with awake(want.devices if want.device == "cuda" else None):
        return _captured(want, out, want.id or _id(want))


def _captured(want: Wanted, out: Path, name: str) -> baselines.BaselineTrace:
    try:
        known = [] if want.replace or not (out / "index.json").is_file() else [t.id for t in baselines.load_index(out, check=False)]
        if name in known:
            raise baselines.BaselineError(f"{out} has a baseline '{name}' already; give --id, or --replace")
        with tempfile.TemporaryDirectory(prefix="hotloop-baseline-") as tmp:
            taken = _hugging_face(want, Path(tmp)) if want.engine == "hf" else _served(want, Path(tmp))
            files = _cut(want, taken, Path(tmp) / "cut")
            return baselines.add(out, _entry(want, name, taken, files), files, replace=want.replace)
    except (NoReference, OutsideError, LaunchError, ClientError, CutError) as error:
        raise BaselineCaptureError(f"{want.engine}: {error}") from error


def _check(want: Wanted) -> None:
    if want.mode not in MODES:
        raise BaselineCaptureError(f"mode {want.mode!r}; valid: {', '.join(MODES)}")
    if want.phase not in PHASES:
        raise BaselineCaptureError(f"phase {want.phase!r}; valid: {', '.join(PHASES)}")
    if min(want.batch, want.prompt_tokens, want.repeats, want.tp) < 1:
        raise BaselineCaptureError("batch, prompt tokens, repeats and tp must be at least 1")
    if want.mode == "graph" and want.device == "cpu":
        raise BaselineCaptureError("a CPU has no CUDA graphs; --mode eager, or --device cuda")
    if want.engine == "hf" and want.mode != "eager":
        raise BaselineCaptureError("transformers' generate is captured eager; it has no graph mode here")
    if not (want.model / "config.json").is_file():
        raise BaselineCaptureError(f"{want.model} is no model folder: it has no config.json")
    if not list(want.model.glob("*.safetensors")):
        raise BaselineCaptureError(f"{want.model} has no weights; every engine must run the same ones")
    if kind(want.engine) == "unknown":
        raise BaselineCaptureError(
            f"engine {want.engine!r}: neither vllm, nor hf, nor a folder with a target.toml, nor a command that names {{socket}} or {{port}}"
        )


def kind(engine: str) -> str:
    """`vllm`, `hf`, `target`, `command`, or `unknown`."""
    if engine in ("vllm", "hf"):
        return engine
    if "{socket}" in engine or "{port}" in engine:
        return "command"
    return "target" if (Path(engine) / "target.toml").is_file() else "unknown"


# -- taking it ------------------------------------------------------------------------------------------------


def _requests(want: Wanted, prompts: PromptSource, turn: str, new: int) -> list[Request]:
    drawn = prompts.draw(f"baseline/{want.phase}/{turn}", want.batch, want.prompt_tokens)
    return [Request(ids, new) for ids in drawn]  # as `measure.py` sends them: an engine may go another way for others


def _source(want: Wanted) -> PromptSource:
    """The same prompts for whoever gives the same seed, shape and vocabulary: engines are compared on them."""
    return PromptSource(f"baseline prompts of seed {want.seed}".encode(), want.model)


def _served(want: Wanted, tmp: Path) -> Taken:
    prompts = _source(want)
    with _started(want, tmp) as (server, engine, version, command):
        long = CLEAN_TOKENS if want.phase == "decode" else 2
        turns = [_requests(want, prompts, f"clean/{i}", long) for i in range(want.repeats)]
        complete(server, _requests(want, prompts, "warm", long))  # compilation and lazily made buffers stay out
        streams = [complete(server, each) for each in turns]
        short = _requests(want, prompts, "traced", PROFILED_TOKENS if want.phase == "decode" else 2)
        complete(server, short)
        traces, traced = profiled(server, short, tmp / "raw", want.tp)
        said = vllm_server.stated(server.log(), server.client.metrics()) if isinstance(server, Outside) and want.engine == "vllm" else None
        metadata = dict(server.metadata)
    graph = metadata.get("cuda_graph")
    if isinstance(graph, bool) and graph != (want.mode == "graph"):
        raise BaselineCaptureError(f"the server says cuda_graph is {graph}; --mode {'graph' if graph else 'eager'} would say so, too")
    if said is not None:
        version, metadata = said.version or version, metadata | {"attention_backend": said.attention_backend, "kv_dtype": said.kv_dtype}
    clean = _clean(want, streams)
    value, unit = ("step_us", us_per_token(traced)) if want.phase == "decode" else ("ttft_ms", _ttft_ms(traced))
    observer = unit / clean[value] if unit and clean.get(value) else None
    dtype = (said.dtype if said else metadata.get("dtype")) or want.dtype
    sent = [r.prompt_ids for each in (*turns, short) for r in each]
    return Taken(engine, version, command, traces, clean, observer, PromptSource.sha(sent), dtype, metadata)


@contextmanager
def _started(want: Wanted, tmp: Path) -> Iterator[tuple[Server | Outside, str, str, str]]:
    """(server, engine, version, command line) of the reference, up and healthy."""
    which = kind(want.engine)
    if which == "target":
        target = load_target(Path(want.engine))
        repo = RunRepo(tmp / "target.git", tmp / "trees")
        commit = repo.create(target).commit
        spec = LaunchSpec(
            tree=repo.tree(commit, "reference"), target=target, python=want.python, model_dir=want.model, tp=want.tp, device=want.device,
            devices=want.devices, sandbox=want.sandbox, label=target.name, extra_args=want.engine_args,
        )  # fmt: skip
        with launch(spec) as server:
            yield server, str(server.metadata.get("engine") or target.name), want.version or f"tree {repo.tree_of(commit)[:12]}", " ".join((*target.serve, *want.engine_args))
        return
    if which == "vllm":
        common = vllm_server.Common(
            model=want.model, dtype=want.dtype, site=want.vllm_site and want.vllm_site.resolve(), profile=True, tp=want.tp,
            max_model_len=max(2048, 2 * (want.prompt_tokens + CLEAN_TOKENS)),
        )  # fmt: skip
        flags = (*(("--enforce-eager",) if want.mode == "eager" else ()), *want.engine_args)
        command = vllm_server.command(common, vllm_server.Setting(want.mode, flags))
    else:
        command = parse(want.engine, want.label or "the reference")
    with serve(command, want.model.resolve(), want.python, timeout_s=START_S, devices=want.devices) as server:
        name = "vLLM" if which == "vllm" else str(server.metadata.get("engine") or want.label or command.argv[0])
        yield server, name, want.version or "not stated", str(command)


def _hugging_face(want: Wanted, tmp: Path) -> Taken:
    """transformers' own generate; it is timed once, at the length that is profiled."""
    cell = Cell("baseline", want.prompt_tokens, PROFILED_TOKENS, want.batch, want.batch)
    got = capture_reference(want.model, tmp / "raw", cell, _source(want), want.tp, want.device, want.dtype, devices=want.devices)
    paces = json.loads((tmp / "raw" / "about" / "reference.json").read_text("utf-8"))
    clean, traced = paces["clean"], paces["traced"]
    key = "us_per_token" if want.phase == "decode" else "prefill_us"
    kept: dict[str, Any] = {"n": 1, "tokens": PROFILED_TOKENS, "ttft_ms": clean["prefill_us"] / 1000}
    if want.phase == "decode":
        kept |= {"step_us": clean["us_per_token"], "tok_s": want.batch * 1e6 / clean["us_per_token"]}
    kept["note"] = "in its own process, no server: mean decode step, and the first step"
    version = got.metadata["engine"].split()[1]
    spec = json.loads((tmp / "raw" / "about" / "spec.json").read_text("utf-8"))
    sha = PromptSource.sha(spec["prompts"])
    command = f"transformers generate, {want.batch} x {want.prompt_tokens} tokens, {PROFILED_TOKENS} new"
    return Taken("transformers generate()", version, command, got.traces, kept, traced[key] / clean[key], sha, want.dtype, got.metadata)


def _ttft_ms(streams: Sequence[Stream]) -> float:
    return statistics.median((s.arrivals_ns[0] - s.sent_ns) / 1e6 for s in streams)


def _clean(want: Wanted, turns: Sequence[Sequence[Stream]]) -> dict[str, Any]:
    """Timings without the profiler, each a median over the turns, with the least and the greatest."""
    first = [_ttft_ms(streams) for streams in turns]
    found: dict[str, Any] = {"n": len(turns), "ttft_ms": statistics.median(first), "ttft_ms_range": [min(first), max(first)]}
    steps = [us for streams in turns if (us := us_per_token(streams))] if want.phase == "decode" else []
    if steps:
        step = statistics.median(steps)
        found |= {"step_us": step, "step_us_range": [min(steps), max(steps)], "tok_s": want.batch * 1e6 / step, "tokens": CLEAN_TOKENS}
    return found | {"note": "over HTTP, profiler off; step: median over answers of the wall per token after the first"}


# -- keeping it -----------------------------------------------------------------------------------------------


def _cut(want: Wanted, taken: Taken, into: Path) -> list[tuple[Path, dict[str, Any]]]:
    into.mkdir()
    prefill, decode = (1, DECODE_STEPS) if want.phase == "decode" else (1, 0)
    made = []
    for rank, source in enumerate(taken.traces):
        place = into / f"rank{rank}.json.gz"
        report = cut(source, place, prefill=prefill, decode=decode, control_step_us=taken.clean.get("step_us"))
        about = {"parent": report.parent, "parent_sha256": report.parent_sha256, "command": report.command}
        made.append((place, about | {"steps": list(report.steps), "phases": sorted(set(report.phases))}))
    return made


def _entry(want: Wanted, name: str, taken: Taken, files: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    device = "cpu" if want.device == "cpu" else next((g["name"] for g in fingerprint.gpus(want.devices)), "an NVIDIA GPU")
    new = CLEAN_TOKENS if want.phase == "decode" else 2
    environment = fingerprint.fingerprint(want.device, want.sandbox, want.devices)
    return {
        "id": name,
        "label": want.label or f"{taken.engine.removesuffix(' generate()')} {want.mode}",
        "engine": taken.engine, "version": taken.version, "mode": MODES[want.mode], "device": device,
        "model": want.model_name or _model_words(want.model), "dtype": taken.dtype, "tp": want.tp, "batch": want.batch,
        "phases": sorted({phase for _, about in files for phase in about["phases"]}),
        "workload": f"{want.batch} x {want.prompt_tokens} prompt tokens, {new} new when timed, greedy",
        "profiler": "shapes, no stacks",
        "licence": want.licence or LICENCES.get(want.engine, NOT_STATED),
        "clean": taken.clean,
        "provenance": {
            "environment": environment, "command": taken.command, "prompts_sha256": taken.prompts_sha, "prompts_seed": want.seed,
            "model_sha256": weights.digest(want.model), "control_step_us": taken.clean.get("step_us"), "observer_ratio": taken.observer,
            "server": taken.metadata,
        },
    }  # fmt: skip


def _model_words(model: Path) -> str:
    config = json.loads((model / "config.json").read_text("utf-8"))
    return f"{config.get('model_type', 'model')}, {config.get('num_hidden_layers')} layers, hidden {config.get('hidden_size')} ({model.name})"


def _id(want: Wanted) -> str:
    which = kind(want.engine)
    engine = {"target": Path(want.engine).resolve().name, "command": want.label or hashlib.sha256(want.engine.encode()).hexdigest()[:6]}.get(which, which)
    device = "cpu" if want.device == "cpu" else next((g["name"].split()[-1] for g in fingerprint.gpus(want.devices)), "cuda")
    words = [device, engine, want.mode, f"bs{want.batch}", f"{want.phase}{want.prompt_tokens}"] + ([f"tp{want.tp}"] if want.tp > 1 else [])
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


# -- looking at it again --------------------------------------------------------------------------------------


def fault(trace: baselines.BaselineTrace) -> str | None:
    """Why a kept baseline cannot be trusted: a file that was changed, or does not hold what the index says. None: it can."""
    from trace_diff import ingest, windows

    try:
        baselines.verify(trace)
        found = ingest.load_many(list(trace.paths), trace.label)
    except (baselines.BaselineError, ingest.TraceError, OSError) as error:
        return str(error)
    if sorted(found.traces) != list(range(trace.tp)):
        return f"holds ranks {sorted(found.traces)}, the index says TP {trace.tp}"
    for rank in found:
        phases = {str(s.phase) for s in windows.steps(rank) if s.complete}
        if phases != set(trace.phases):
            return f"rank {rank.rank} holds steps of {', '.join(sorted(phases)) or 'no phase'}, the index says {', '.join(trace.phases)}"
    return None
