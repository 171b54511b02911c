"""Capture traces of a running server: prefill (L to 1) and decode (1 to N) as two workloads of fresh prompts.

Drives anything with vLLM's surface (`/v1/models`, `/v1/completions`, `/start_profile`, `/stop_profile`): vLLM,
SGLang, our engine. The same cell is timed without the profiler first, so the trace's distortion is known. A
capture either has a new, whole trace of every rank with enough complete steady steps, or fails by name. Not
for: judging a candidate (`optimizer.measure`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trace_diff.server import Reply, Server, ServerError
from trace_diff.types import Kind, Phase, Step

MIN_STEPS = 3
MOST_STEPS = 200


class CaptureError(RuntimeError):
    """The capture is not usable; `name` says which check failed."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


@dataclass(frozen=True, slots=True)
class Workload:
    """One cell. `repeat` requests follow each other, `batch` at a time."""

    phase: Phase
    prompt_tokens: int
    new_tokens: int
    batch: int = 1
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a capture may cost."""

    minutes: float = 5.0
    bytes: int = 400_000_000  # of all new files together, as written
    steps: int = MOST_STEPS


@dataclass(frozen=True, slots=True)
class Captured:
    """One workload's traces in `files` (by rank) and what is known of them."""

    phase: str
    files: tuple[str, ...]
    sha256: tuple[str, ...]
    steps: tuple[int, ...]  # complete steady steps of the phase, per rank
    schedule: dict[str, int]  # step name -> how often, rank 0: what the server really ran
    control_us: float | None  # mean microseconds per step of the same cell without the profiler
    traced_us: float  # mean step wall in the trace, slowest rank
    server: dict[str, Any]  # what /v1/models says
    workload: dict[str, Any]

    @property
    def perturbation(self) -> float | None:
        """Traced over control; above 1.10 a trace is perturbed."""
        return None if not self.control_us else self.traced_us / self.control_us

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"perturbation": self.perturbation}


def workloads(prompt_tokens: int, new_tokens: int, batch: int, phases: Sequence[str]) -> list[Workload]:
    """Prefill: MIN_STEPS + 2 requests of L to 1. Decode: one round of 1 token prompts to N."""
    table = {
        "prefill": Workload(Phase.PREFILL, prompt_tokens, 1, batch, repeat=MIN_STEPS + 2),
        "decode": Workload(Phase.DECODE, 1, new_tokens, batch),
    }
    unknown = set(phases) - set(table)
    if unknown:
        raise CaptureError("phase", f"{', '.join(sorted(unknown))}; valid: {', '.join(table)}")
    return [table[p] for p in phases]


def _prompts(workload: Workload, vocab: int) -> list[list[int]]:
    """Fresh random token ids: nothing that a prefix cache could know."""
    draw = secrets.SystemRandom()
    low = min(8, vocab - 1)  # low ids are often special tokens
    return [[draw.randrange(low, vocab) for _ in range(workload.prompt_tokens)] for _ in range(workload.batch)]


def _drive(server: Server, model: str, workload: Workload, vocab: int, deadline: float) -> list[Reply]:
    replies: list[Reply] = []
    with ThreadPoolExecutor(workload.batch) as pool:
        for _ in range(workload.repeat):
            left = deadline - time.monotonic()
            if left <= 0:
                raise CaptureError("minutes", "the time limit was reached while driving the server")
            jobs = [
                pool.submit(server.complete, model, p, workload.new_tokens, left) for p in _prompts(workload, vocab)
            ]
            replies += [j.result() for j in jobs]
    for reply in replies:
        if reply.prompt_tokens not in (None, workload.prompt_tokens):
            raise CaptureError(
                "schedule", f"asked for {workload.prompt_tokens} prompt tokens, the server saw {reply.prompt_tokens}"
            )
        if reply.tokens != workload.new_tokens:
            raise CaptureError("schedule", f"asked for {workload.new_tokens} new tokens, got {reply.tokens}")
    return replies


def _control_us(replies: Sequence[Reply], workload: Workload) -> float | None:
    """Clean microseconds per step: gaps between tokens for decode, time to the first token for prefill."""
    if workload.phase is Phase.PREFILL:
        return statistics.median((r.arrivals_ns[0] - r.sent_ns) / 1000 for r in replies)
    spans = [
        (r.arrivals_ns[-1] - r.arrivals_ns[0]) / 1000 / (r.tokens - 1)
        for r in replies
        if r.tokens > 1 and len(r.arrivals_ns) > 1
    ]
    return statistics.median(spans) if spans else None


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    found = [p for p in folder.rglob("*") if p.is_file() and p.name.endswith((".json", ".json.gz"))]
    return {p: ((s := p.stat()).st_size, s.st_mtime_ns) for p in found}


def _new_files(folder: Path, before: dict[Path, tuple[int, int]], ranks: int, most: int, deadline: float) -> list[Path]:
    """Files that were not there before, once there are enough and none grows any more."""
    last: dict[Path, tuple[int, int]] = {}
    while True:
        now = {p: v for p, v in _files(folder).items() if before.get(p) != v}
        total = sum(size for size, _ in now.values())
        if total > most:
            raise CaptureError("bytes", f"the traces hold {total} bytes, the limit is {most}")
        if len(now) >= ranks and now == last and all(size for size, _ in now.values()):
            return sorted(now)
        if time.monotonic() > deadline:
            raise CaptureError(
                "ranks", f"{len(now)} new trace files in {folder}, {ranks} ranks expected; a stale file does not count"
            )
        last = now
        time.sleep(0.3)


@dataclass(frozen=True, slots=True)
class _Checked:
    """One rank's trace that passed."""

    path: Path
    steps: list[Step]
    good: list[Step]  # complete steady steps of the phase, as the workload asked for them


def _check(path: Path, work: Workload, device: bool, ranks: int = 1, most_steps: int = MOST_STEPS) -> tuple[int, _Checked]:
    """(rank, what it holds). Raises CaptureError naming the check and the file."""
    from trace_diff import ingest, windows

    trace = ingest.load(path)
    if trace.notes.truncated:
        raise CaptureError("whole", f"{path}: the file is cut off")
    if trace.world_size not in (None, ranks):
        raise CaptureError("ranks", f"{path}: written by one of {trace.world_size} ranks, {ranks} expected (--ranks)")
    kinds = set(np.unique(trace.events.kind).tolist())
    if device and Kind.KERNEL not in kinds:
        raise CaptureError("device", f"{path}: no device events; was the profiler started with CUDA activities?")
    if Kind.CPU_OP not in kinds and not device:
        raise CaptureError("device", f"{path}: no CPU operators; was the profiler started with CPU activities?")
    _refuse_unsteady(path, {trace.names[i] for i in np.unique(trace.events.name)})
    steps = windows.steps(trace)
    if len(steps) > 2 * most_steps:
        raise CaptureError("bound", f"{path}: {len(steps)} steps, the limit is {most_steps}; is other traffic on the server?")
    return trace.rank, _Checked(path, steps, _steady(path, steps, work))


def _refuse_unsteady(path: Path, names: set[str]) -> None:
    for mark, what in _UNSTEADY:
        if any(mark in n for n in names):
            raise CaptureError("steady", f"{path}: holds {what}; warm the server up first")


_UNSTEADY = (
    ("StreamBeginCapture", "graph capture"),
    ("GraphInstantiate", "graph capture"),
    ("_dummy_run", "a dummy run"),
    ("step[DUMMY", "a dummy run"),
    ("capture_model", "graph capture"),
)


def _steady(path: Path, steps: list[Step], work: Workload) -> list[Step]:
    """The complete steps of the workload's phase and size; too few are told apart by what the server ran instead."""
    of_phase = [s for s in steps if s.phase is work.phase and s.complete and "empty" not in s.flags]
    good = [s for s in of_phase if _as_asked(s, work)]
    if len(good) >= MIN_STEPS:
        return good
    if steps and all("empty" in s.flags for s in steps):
        raise CaptureError("steady", f"{path}: all {len(steps)} steps are empty: the server was idle")
    if len(of_phase) >= MIN_STEPS:
        ran = ", ".join(f"{name} x{n}" for name, n in Counter(s.name for s in of_phase).most_common(4))
        raise CaptureError(
            "schedule", f"{path}: {work.batch} requests of {work.prompt_tokens} tokens asked for, the server ran {ran}"
        )
    raise CaptureError(
        "steps", f"{path}: {len(of_phase)} complete steady {work.phase} steps, {MIN_STEPS} needed ({len(steps)} in all)"
    )


def _as_asked(step: Step, work: Workload) -> bool:
    """True for a step that ran the cell: all sequences at once in decode, whole prompts in prefill. A step that does
    not say is believed."""
    if work.phase is Phase.DECODE:
        return step.requests in (None, work.batch)
    return step.tokens is None or step.tokens >= work.prompt_tokens


def _profile(server: Server, options: dict[str, Any], deadline: float) -> None:
    try:
        server.request("POST", "/start_profile", options, timeout=max(1.0, deadline - time.monotonic()))
    except ServerError as error:
        hint = "vLLM needs --profiler-config with torch_profiler_dir, SGLang SGLANG_TORCH_PROFILER_DIR"
        raise CaptureError("profiler", f"{error} ({hint})") from None


def capture(
    url: str,
    trace_dir: Path,
    out: Path,
    workload: Workload,
    *,
    ranks: int | None = None,
    device: bool | None = None,
    vocab: int | None = None,
    limits: Limits | None = None,
    options: dict[str, Any] | None = None,
) -> Captured:
    """Capture one workload and copy the checked traces to `out/<phase>/rank<r>.json.gz` with `capture.json`.

    `ranks`, `device` and `vocab` (prompts are random ids below it) default to what /v1/models says (`metadata.tp`,
    `metadata.device`, `metadata.model.vocab_size`), else to 1, True and 1000.
    Raises CaptureError (by name of the failed check) or ServerError.
    """
    limits = limits or Limits()
    if workload.new_tokens * workload.repeat > limits.steps:
        raise CaptureError("bound", f"{workload.new_tokens * workload.repeat} steps asked, the limit is {limits.steps}")
    deadline = time.monotonic() + limits.minutes * 60
    server = Server(url)
    about = server.model()
    told = about.get("metadata") or {}
    ranks = ranks or int(told.get("tp") or 1)
    on_gpu = bool(told.get("device") != "cpu" if device is None else device)
    model = str(about.get("id"))
    known = told.get("model")
    vocab = vocab or int((known.get("vocab_size") if isinstance(known, dict) else None) or 1000)
    _drive(server, model, workload, vocab, deadline)  # warm-up: compilation and capture stay out
    control = _control_us(_drive(server, model, workload, vocab, deadline), workload)
    before = _files(trace_dir)
    _profile(server, options or {}, deadline)
    try:
        _drive(server, model, workload, vocab, deadline)
    finally:
        server.request("POST", "/stop_profile", {}, timeout=max(30.0, deadline - time.monotonic()))
    files = _new_files(trace_dir, before, ranks, limits.bytes, deadline)
    checked: dict[int, _Checked] = {}
    for path in files:
        rank, found = _check(path, workload, on_gpu, ranks, limits.steps)
        if rank in checked:
            raise CaptureError("ranks", f"{path}: rank {rank} was also written to {checked[rank].path}")
        checked[rank] = found
    if sorted(checked) != list(range(ranks)):
        raise CaptureError("ranks", f"traces of ranks {sorted(checked)}, expected 0 to {ranks - 1}")
    return _store(checked, out / str(workload.phase), workload, control, about)


def _store(
    checked: dict[int, _Checked], out: Path, workload: Workload, control: float | None, about: dict[str, Any]
) -> Captured:
    ranks = range(len(checked))
    out.mkdir(parents=True, exist_ok=True)
    kept, digests = [], []
    for rank in ranks:
        source = checked[rank].path
        target = out / f"rank{rank}.json{'.gz' if source.suffix == '.gz' else ''}"
        shutil.copyfile(source, target)
        kept.append(target.name)
        digests.append(hashlib.sha256(target.read_bytes()).hexdigest())
    slowest = max(statistics.fmean(s.wall_ns for s in checked[r].good) / 1000 for r in ranks)
    captured = Captured(
        phase=str(workload.phase),
        files=tuple(kept),
        sha256=tuple(digests),
        steps=tuple(len(checked[r].good) for r in ranks),
        schedule=dict(Counter(s.name for s in checked[0].steps)),
        control_us=control,
        traced_us=slowest,
        server=about,
        workload=asdict(workload),
    )
    (out / "capture.json").write_text(json.dumps(captured.to_json(), indent=1, sort_keys=True) + "\n", "utf-8")
    return captured
