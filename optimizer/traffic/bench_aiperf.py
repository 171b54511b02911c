"""The last word over HTTP: AIPerf and our own client on the same server and the same prompts, side by side.

AIPerf 0.13 runs from an environment of its own (`make aiperf-env`). Its prompts are read back from its artefacts
and sent again by our load generator, at the same concurrency, to the same launch. Where the two clients differ
by more than 5 %, the row is marked as a fault of measurement: one of them is wrong and neither is believed.
AIPerf needs 2 to 3 ms of CPU per token, so on a small machine that runs the engine too a fault is to be
expected. Not for: decisions of the loop (`measure.py`, `accept.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from optimizer import targets
from optimizer.confine.launch import launch
from optimizer.traffic.client import Client, Request
from optimizer.traffic.forward import forwarded
from optimizer.traffic.loadgen import LoadGenerator
from optimizer.types import LaunchSpec, Stream

FAULT = 0.05
_ROOT = Path(__file__).resolve().parents[2]
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


@dataclass(frozen=True, slots=True)
class Row:
    """One metric by both clients. difference: aiperf / ours - 1."""

    metric: str
    ours: float
    aiperf: float
    difference: float
    fault: bool


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


def run_aiperf(argv: Sequence[str], out: Path, timeout_s: float = _TIMEOUT_S) -> Numbers:
    """Run it to its end, kill its whole process group on a timeout. Errors: AiperfError."""
    out.mkdir(parents=True, exist_ok=True)
    # With these set it sends a local tokenizer path to the hub's client and fails.
    env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    log = out / "aiperf.out"
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
    return parse(out)


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


def ours(url: str, prompts: Sequence[tuple[int, ...]], work: Workload, deadline_s: float = 600.0) -> Numbers:
    """The same prompts through our load generator, `concurrency` at a time. Errors: AiperfError for failed streams."""
    client = Client(base_url=url)
    requests = [Request(p, work.new_tokens) for p in prompts][: work.requests]
    streams: list[Stream] = []
    wall_ns = 0
    with LoadGenerator() as generator:
        generator.run(client, requests[: work.warmup_requests], deadline_s)
        for at in range(0, len(requests), work.concurrency):
            batch = generator.run(client, requests[at : at + work.concurrency], deadline_s).streams
            if bad := next((s.error for s in batch if s.error), None):
                raise AiperfError(f"a stream of our own client failed: {bad}")
            wall_ns += max(s.arrivals_ns[-1] for s in batch) - min(s.sent_ns for s in batch)
            streams += batch
    tokens = sum(len(s.token_ids) for s in streams)
    return Numbers(
        median(map(targets.ttft_us, streams)) / 1e3,
        median(map(targets.tpot_us, streams)) / 1e3,
        tokens / (wall_ns / 1e9),
        len(streams),
        tokens / len(streams),
    )


def compare(own: Numbers, aiperf: Numbers) -> list[Row]:
    """Both clients, metric by metric. Errors: AiperfError when they did not do the same work."""
    if abs(own.output_tokens - aiperf.output_tokens) > 0.01 * own.output_tokens:
        raise AiperfError(f"different work: {own.output_tokens:g} and {aiperf.output_tokens:g} tokens a request")
    rows = []
    for metric in ("ttft_p50_ms", "tpot_p50_ms", "tokens_per_s"):
        x, y = float(getattr(own, metric)), float(getattr(aiperf, metric))
        difference = y / x - 1
        rows.append(Row(metric, x, y, difference, abs(difference) > FAULT))
    return rows


def bench_url(label: str, url: str, model: str, tokenizer_dir: Path, work: Workload, out: Path, aiperf: Path) -> dict[str, Any]:
    """Both clients against one server that is up, as JSON: numbers, rows, artefact folder."""
    folder = out / label
    theirs = run_aiperf(command(aiperf, url, model, tokenizer_dir, work, folder), folder)
    own = ours(url, prompts_of(folder, tokenizer_dir), work)
    rows = compare(own, theirs)
    return {
        "label": label,
        "workload": asdict(work),
        "ours": asdict(own),
        "aiperf": asdict(theirs),
        "rows": [asdict(r) for r in rows],
        "fault": any(r.fault for r in rows),
        "artefacts": str(folder),
    }


def bench(
    specs: Mapping[str, LaunchSpec], out: Path, *, root: Path, work: Workload | None = None,
    urls: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One launch per engine, e.g. {"original": ..., "final": ...}; written to `out/aiperf.json` and returned.

    urls: servers that are already up, such as vLLM: label -> (URL, model name); they are sent the prompts of the
    first spec's tokenizer. Errors: AiperfError, LaunchError.
    """
    aiperf, work = find(root), work or Workload()
    results = []
    for label, spec in specs.items():
        with launch(spec) as server, forwarded(_socket(server)) as url:
            model = server.client.metadata()["id"]
            results.append(bench_url(label, url, model, spec.model_dir, work, out, aiperf))
    tokenizer = next(iter(specs.values())).model_dir
    for label, (url, model) in (urls or {}).items():
        results.append(bench_url(label, url, model, tokenizer, work, out, aiperf))
    found = {"schema": 1, "fault_above": FAULT, "engines": results}
    (out / "aiperf.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _socket(server: Any) -> Path:
    path = server.client.socket_path
    if path is None:
        raise AiperfError("the engine does not serve on a Unix socket")
    return path


def bench_run(run: Any, work: Workload, others: Sequence[str] = ()) -> dict[str, Any]:
    """The first and the final engine of a `run.Run`, from its own repository; artefacts under its `aiperf/`.

    others: `label=http://host:port/model` of servers that are up, such as vLLM. Errors: AiperfError, LaunchError.
    """
    final = run.repo.incumbent()
    specs = {"original": run.spec(run.base, "aiperf-original", "original")}
    if final != run.base:
        specs["final"] = run.spec(final, "aiperf-final", "final")
    urls: dict[str, tuple[str, str]] = {}
    for other in others:
        match = re.fullmatch(r"([\w-]+)=(https?://[^/]+)/(.+)", other)
        if match is None:
            raise AiperfError(f"{other!r}: give label=http://host:port/model")
        urls[match[1]] = match[2], match[3]
    found = bench(specs, run.dir / "aiperf", root=_ROOT, work=work, urls=urls)
    for spec in specs.values():
        run.repo.drop_tree(spec.tree.name)
    return found


def lines(found: Mapping[str, Any]) -> list[str]:
    """The result as text, one line a metric: for the terminal."""
    text = [f"{'engine':12} {'metric':14} {'ours':>10} {'AIPerf':>10} {'differ':>8}"]
    for engine in found["engines"]:
        for row in engine["rows"]:
            mark = "  fault of measurement" if row["fault"] else ""
            text.append(
                f"{engine['label']:12} {row['metric']:14} {row['ours']:10.2f} {row['aiperf']:10.2f} {row['difference']:+8.1%}{mark}"
            )
    return text
