"""AIPerf as a program: its command line, one run of it to the end, its artefacts.

AIPerf 0.13 runs from an environment of its own (`make aiperf-env`). Not for: comparing it with our client (`bench_aiperf.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(".venv-aiperf")
_TIMEOUT_S = 900.0
_RESULT = "profile_export_aiperf.json"
_SCHEMA = "1."  # major version of its artefacts that `parse` reads


class AiperfError(RuntimeError):
    """AIPerf is missing, failed, or wrote what we cannot read. The text says which and what to do."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What both clients do. Lengths are tokens."""

    prompt_tokens: int = 64
    new_tokens: int = 64
    concurrency: int = 1
    requests: int = 24
    warmup_requests: int = 4
    seed: int = 42


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one client measured; milliseconds and tokens per second."""

    ttft_p50_ms: float
    tpot_p50_ms: float  # per request: (latency - TTFT) / (tokens - 1)
    tokens_per_s: float  # output tokens of all requests / wall
    requests: int
    output_tokens: float  # per request, mean


def find(root: Path) -> Path:
    """AIPerf's program: in `.venv-aiperf` below root, else on PATH. Errors: AiperfError that says how to get it."""
    local = root / ENVIRONMENT / "bin" / "aiperf"
    found = local if local.is_file() else shutil.which("aiperf")
    if found is None:
        raise AiperfError("AIPerf is not installed: `make aiperf-env` puts it into .venv-aiperf")
    return Path(found).absolute()


def command(aiperf: Path, url: str, model: str, tokenizer_dir: Path, work: Workload, out: Path) -> list[str]:
    """The offline command line that was verified with 0.13.0. Server token counts: re-tokenised text miscounts."""
    w = work
    return [
        str(aiperf), "profile", "--model", model, "--url", url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", str(tokenizer_dir.resolve()), "--use-server-token-count",
        "--concurrency", str(w.concurrency), "--request-count", str(w.requests),
        "--warmup-request-count", str(w.warmup_requests),
        "--isl", str(w.prompt_tokens), "--isl-stddev", "0", "--osl", str(w.new_tokens), "--osl-stddev", "0",
        "--random-seed", str(w.seed), "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--artifact-dir", str(out), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        "--workers-max", "1", "--record-processors", "1",
    ]  # fmt: skip


def run(argv: Sequence[str], out: Path, timeout_s: float = _TIMEOUT_S) -> tuple[Numbers, float]:
    """Run it to its end, kill its whole process group on a timeout. Returns what it measured and how many cores its
    processes kept busy, start included. Errors: AiperfError.
    """
    out.mkdir(parents=True, exist_ok=True)
    # With these set it sends a local tokenizer path to the hub's client and fails.
    env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    log = out / "aiperf.out"
    began, used = time.monotonic(), _children_cpu_s()
    with log.open("wb") as handle:
        process = subprocess.Popen(argv, stdout=handle, stderr=handle, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AiperfError(f"AIPerf did not end within {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise AiperfError(f"AIPerf ended with code {code}: {log.read_text(errors='replace')[-400:]}")
    return parse(out), (_children_cpu_s() - used) / (time.monotonic() - began)


def _children_cpu_s() -> float:
    """CPU seconds of all children that ended so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def parse(folder: Path) -> Numbers:
    """Read its artefacts. Errors: AiperfError for a missing, cancelled, incomplete or failed result."""
    path = folder / _RESULT
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AiperfError(f"no readable {_RESULT}: {error}") from None
    if not str(data.get("schema_version", "")).startswith(_SCHEMA):
        raise AiperfError(f"schema {data.get('schema_version')!r} of {_RESULT} is not {_SCHEMA}x")
    if data.get("was_cancelled") or not data.get("is_complete", True):
        raise AiperfError("AIPerf's run was cancelled or is incomplete")
    if data.get("error_summary") or _field(data, "request_error_rate", "avg", 0.0) > 0:
        raise AiperfError(f"requests failed under AIPerf: {json.dumps(data.get('error_summary'))[:300]}")
    return Numbers(
        _field(data, "time_to_first_token", "p50"),
        _field(data, "inter_token_latency", "p50"),
        _field(data, "output_token_throughput", "avg"),
        int(_field(data, "request_count", "avg", _field(data, "time_to_first_token", "count", 0.0))),
        _field(data, "output_sequence_length", "avg"),
    )


def _field(data: Mapping[str, Any], metric: str, statistic: str, default: float | None = None) -> float:
    value = data.get(metric, {}).get(statistic, default)
    if not isinstance(value, int | float):
        raise AiperfError(f"{_RESULT} has no {metric}.{statistic}")
    return float(value)


def prompts_of(folder: Path, tokenizer_dir: Path) -> list[tuple[int, ...]]:
    """The prompts that AIPerf sent, as token ids of the model's own tokenizer. Errors: AiperfError."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    try:
        sessions = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))["data"]
        texts = [payload["prompt"] for session in sessions for payload in session["payloads"]]
    except (OSError, ValueError, KeyError) as error:
        raise AiperfError(f"inputs.json cannot be read: {error}") from None
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
