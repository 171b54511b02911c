"""Traces of a few decode steps of one arm, and of transformers' own decode, with the unprofiled time beside each.

The server is warmed, timed without the profiler, then profiled on the same prompts. What it wrote is copied out of
its sandbox by rank. Not for: timing that decides anything (measure.py), nor what the traces say (diagnose.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from optimizer.confine.launch import NO_MULTICAST, LaunchError, Server, launch
from optimizer.outside import Outside
from optimizer.serial import write_json
from optimizer.services import Capture
from optimizer.traffic.client import ClientError, Request
from optimizer.traffic.prompts import PromptSource
from optimizer.types import Cell, LaunchSpec, RejectReason, Stream

PROFILED_TOKENS = 12  # a decode window of this many steps, less the first
DEADLINE_S = 120.0
_RANK = re.compile(r"rank[_-]?(\d+)")


class NoReference(Exception):
    """The reference could not be captured; the run goes on without it and says so."""


def capture(
    spec: LaunchSpec,
    out: Path,
    cell: Cell,
    prompts: PromptSource,
    on_start: Callable[[dict[str, Any]], None] = lambda metadata: None,
) -> Capture:
    """Launch an arm and leave its traces at `out/rank<r>.json.gz`.

    `on_start` sees the server's metadata before anything is asked of it. Raises LaunchError (BOOT, HANG; CRASH
    when it dies or breaks the protocol while being profiled).
    """
    began = time.monotonic()
    with launch(spec) as server:
        on_start(server.metadata)
        requests = _requests(cell, prompts, f"capture/{out.name}")
        try:
            complete(server, requests)  # every shape once; compilation and caches stay out of the trace
            control = us_per_token(complete(server, requests))
            traces, _ = profiled(server, requests, out, spec.tp)
        except (ClientError, OSError) as error:
            raise LaunchError(RejectReason.CRASH, f"while being profiled: {error}\n{server.log_tail()}") from error
        metadata = server.metadata
    return Capture(
        label=out.name,
        traces=traces,
        tp=spec.tp,
        batch=cell.concurrency,
        control_us_per_token=control,
        metadata=metadata,
        seconds=time.monotonic() - began,
    )


def _requests(cell: Cell, prompts: PromptSource, evaluation: str) -> list[Request]:
    tokens = min(cell.new_tokens, PROFILED_TOKENS)
    drawn = prompts.draw(evaluation, cell.concurrency, cell.prompt_tokens)
    return [Request(ids, tokens) for ids in drawn]  # as they are timed: an engine may go another way for other requests


def profiled(server: Server | Outside, requests: list[Request], out: Path, tp: int) -> tuple[tuple[Path, ...], list[Stream]]:
    """Send the requests with the profiler on; traces at `out/rank<r>.json[.gz]`. Raises ClientError, OSError, LaunchError."""
    server.client.start_profile(with_stack=False, record_shapes=True)
    streams = complete(server, requests)
    server.client.stop_profile()
    return _collect(server, out, tp), streams


def complete(server: Server | Outside, requests: list[Request]) -> list[Stream]:
    """All answers. Raises ClientError when one of them is an error."""
    streams = server.client.complete(requests, DEADLINE_S)
    for stream in streams:
        if stream.error:
            raise ClientError(stream.error)
    return streams


def us_per_token(streams: Sequence[Stream]) -> float | None:
    """Median over streams of the wall per output token after the first, in microseconds; None when all came at once."""
    spans = [
        (s.arrivals_ns[-1] - s.arrivals_ns[0]) / 1000 / (len(s.arrivals_ns) - 1) for s in streams if len(s.arrivals_ns) > 1
    ]
    return (statistics.median(spans) or None) if spans else None


def _collect(server: Server | Outside, out: Path, tp: int) -> tuple[Path, ...]:
    """The latest trace of every rank. Raises LaunchError when one is missing."""
    with tempfile.TemporaryDirectory(prefix="hotloop-traces-") as tmp:
        latest: dict[int, Path] = {}
        for path in server.collect_traces(Path(tmp)):
            found = _RANK.search(path.name)
            rank = int(found[1]) if found else len(latest)
            latest[rank] = path  # sorted by name: a later start comes later
        missing = sorted(set(range(tp)) - latest.keys())
        if missing:
            raise LaunchError(RejectReason.WITNESS, f"no trace of rank {', '.join(map(str, missing))}")
        out.mkdir(parents=True, exist_ok=True)
        kept = []
        for rank in range(tp):
            suffix = ".json.gz" if latest[rank].name.endswith(".gz") else ".json"
            kept.append(out / f"rank{rank}{suffix}")
            shutil.move(latest[rank], kept[-1])
    return tuple(kept)


def capture_reference(
    model_dir: Path, out: Path, cell: Cell, prompts: PromptSource, tp: int, device: str, dtype: str, timeout_s: float = 240.0,
    devices: Sequence[int] = (),
) -> Capture:  # fmt: skip
    """transformers' greedy decode at the same cell, TP and dtype; `about/reference.json` beside the traces has its paces.

    Raises NoReference with its last words.
    """
    began = time.monotonic()
    tokens = min(cell.new_tokens, PROFILED_TOKENS)
    spec = {
        "model_dir": str(model_dir),
        "out": str(out),
        "prompts": [list(ids) for ids in prompts.draw(f"reference/{out.name}", cell.concurrency, cell.prompt_tokens)],
        "new_tokens": tokens,
        "tp": tp,
        "device": device,
        "dtype": dtype,
        "port": _free_port(),
    }
    about = out / "about"  # beside the traces, not among them
    write_json(about / "spec.json", spec)
    _run_reference(about / "spec.json", timeout_s, devices)
    result = json.loads((about / "reference.json").read_text("utf-8"))
    return Capture(
        label=out.name,
        traces=tuple(out / f"rank{rank}.json.gz" for rank in range(tp)),
        tp=tp,
        batch=cell.concurrency,
        control_us_per_token=result["control_us_per_token"],
        metadata=result["metadata"],
        seconds=time.monotonic() - began,
    )


def _run_reference(spec: Path, timeout_s: float, devices: Sequence[int]) -> None:
    root = Path(__file__).resolve().parent.parent
    keep = ("PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key in keep}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo", **NO_MULTICAST}
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    command = [sys.executable, "-P", "-m", "optimizer.hf_reference", str(spec.resolve())]
    process = subprocess.Popen(
        command,
        env=env | {"PYTHONPATH": str(root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, words = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NoReference(f"transformers was not done after {timeout_s:g} s") from None
    finally:
        _kill_group(process)
    if process.returncode:
        lines = words.decode("utf-8", "replace").strip().splitlines()
        raise NoReference(lines[-1] if lines else f"exit status {process.returncode}")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
