"""The last word over HTTP: AIPerf and our own client on the same server and the same prompts, side by side.

AIPerf's prompts are read back from its artefacts and sent again by our load generator, at the same concurrency, to the
same launch. Where the two clients differ by more than 5 %, the row is marked as a fault of measurement: one of them is
wrong and neither is believed. Both are first sent to a server that computes nothing, so that a fault can be told from
what the clients themselves differ by. Not for: decisions of the loop (`measure.py`, `accept.py`), AIPerf itself (`aiperf.py`).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from optimizer import targets, vllm_server
from optimizer.confine.launch import launch
from optimizer.outside import Command, OutsideError, serve
from optimizer.traffic import aiperf
from optimizer.traffic.aiperf import AiperfError, Numbers, Workload
from optimizer.traffic.client import Client, Request
from optimizer.traffic.forward import forwarded
from optimizer.traffic.loadgen import LoadGenerator
from optimizer.traffic.null_server import running
from optimizer.types import LaunchSpec, Stream

FAULT = 0.05
_ROOT = Path(__file__).resolve().parents[2]
VLLM_START_S = 600.0  # it compiles on its first start
NULL_FIRST_MS, NULL_PACE_MS, NULL_REQUESTS = 20.0, 10.0, 8  # the server that computes nothing: what it is told to do


@dataclass(frozen=True, slots=True)
class Row:
    """One metric by both clients. difference: aiperf / ours - 1; why: of a fault, what is known about it."""

    metric: str
    ours: float
    aiperf: float
    difference: float
    fault: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Clients:
    """What each client says of a server that computes nothing and keeps a known pace."""

    ours: Numbers
    aiperf: Numbers


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


def compare(own: Numbers, theirs: Numbers, clients: Clients | None = None, cores: float | None = None) -> list[Row]:
    """Both clients, metric by metric. cores: that AIPerf kept busy. Errors: AiperfError when they did not do the same work."""
    if abs(own.output_tokens - theirs.output_tokens) > 0.01 * own.output_tokens:
        raise AiperfError(f"different work: {own.output_tokens:g} and {theirs.output_tokens:g} tokens a request")
    rows = []
    for metric in ("ttft_p50_ms", "tpot_p50_ms", "tokens_per_s"):
        x, y = float(getattr(own, metric)), float(getattr(theirs, metric))
        difference = y / x - 1
        fault = abs(difference) > FAULT
        rows.append(Row(metric, x, y, difference, fault, _why(metric, x, y, clients, cores) if fault else ""))
    return rows


def _why(metric: str, x: float, y: float, clients: Clients | None, cores: float | None) -> str:
    """Whether the clients differ by as much where nothing is computed, else how much is left and what competed."""
    busy = "" if cores is None else f"; AIPerf kept {cores:.1f} of {len(os.sched_getaffinity(0))} cores busy beside the engine"
    if clients is None:
        return busy.removeprefix("; ")
    a, b = (float(getattr(who, metric)) for who in (clients.ours, clients.aiperf))
    expected = 1 / (1 / x + 1 / b - 1 / a) if metric == "tokens_per_s" else x + b - a
    left = y / expected - 1
    seen = f"on a server that computes nothing they say {a:.2f} and {b:.2f}"
    return f"the clients themselves: {seen}" if abs(left) <= FAULT else f"{left:+.1%} without what the clients differ by ({seen}){busy}"


def meet(program: Path, work: Workload, tokenizer_dir: Path, out: Path) -> Clients:
    """Both clients against the null server, the same workload with few requests. Errors: AiperfError."""
    few = replace(work, requests=max(NULL_REQUESTS, work.concurrency), warmup_requests=min(2, work.warmup_requests))
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "null.sock", NULL_PACE_MS, NULL_FIRST_MS) as path,
        forwarded(path) as url,
    ):
        theirs, own, _ = _both("null", url, "null", tokenizer_dir, few, out, program)
    return Clients(own, theirs)


def _both(
    label: str, url: str, model: str, tokenizer_dir: Path, work: Workload, out: Path, program: Path
) -> tuple[Numbers, Numbers, float]:
    """(AIPerf, our client, cores that AIPerf kept busy)."""
    folder = out / label
    theirs, cores = aiperf.run(aiperf.command(program, url, model, tokenizer_dir, work, folder), folder)
    return theirs, ours(url, aiperf.prompts_of(folder, tokenizer_dir), work), cores


def bench_url(
    label: str, url: str, model: str, tokenizer_dir: Path, work: Workload, out: Path, program: Path, clients: Clients | None = None
) -> dict[str, Any]:
    """Both clients against one server that is up, as JSON: numbers, rows, artefact folder."""
    theirs, own, cores = _both(label, url, model, tokenizer_dir, work, out, program)
    rows = compare(own, theirs, clients, cores)
    return {
        "label": label,
        "workload": asdict(work),
        "ours": asdict(own),
        "aiperf": asdict(theirs),
        "aiperf_cores": cores,
        "rows": [asdict(r) for r in rows],
        "fault": any(r.fault for r in rows),
        "artefacts": str(out / label),
    }


def bench(
    specs: Mapping[str, LaunchSpec], out: Path, *, root: Path, work: Workload | None = None,
    urls: Mapping[str, tuple[str, str]] | None = None, vllm: Command | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One launch per engine, e.g. {"original": ..., "final": ...}; written to `out/aiperf.json` and returned.

    urls: servers that are already up: label -> (URL, model name); they are sent the prompts of the first spec's
    tokenizer, as is vLLM, which is started last. What keeps it from being measured is a line of the result.
    Errors: AiperfError, LaunchError.
    """
    program, work = aiperf.find(root), work or Workload()
    tokenizer = next(iter(specs.values())).model_dir
    clients = meet(program, work, tokenizer, out)
    results = []
    for label, spec in specs.items():
        with launch(spec) as server, forwarded(_socket(server)) as url:
            model = server.client.metadata()["id"]
            results.append(bench_url(label, url, model, spec.model_dir, work, out, program, clients))
    for label, (url, model) in (urls or {}).items():
        results.append(bench_url(label, url, model, tokenizer, work, out, program, clients))
    left_out: dict[str, str] = {}
    if vllm is not None:
        first = next(iter(specs.values()))
        try:
            with (
                serve(vllm, first.model_dir, first.python, timeout_s=VLLM_START_S, devices=first.devices) as server,
                forwarded(_socket(server)) as url,
            ):
                results.append(bench_url("vllm", url, "model", tokenizer, work, out, program, clients))
        except (OutsideError, AiperfError) as error:
            left_out["vllm"] = str(error)[:2000]  # it begins with what happened, the log follows
    null = {"first_ms": NULL_FIRST_MS, "pace_ms": NULL_PACE_MS, **asdict(clients)}
    found = {"schema": 1, "fault_above": FAULT, "null_server": null, "engines": results, "left_out": left_out}
    (out / "aiperf.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _socket(server: Any) -> Path:
    path = server.client.socket_path
    if path is None:
        raise AiperfError("the engine does not serve on a Unix socket")
    return path


def bench_run(run: Any, work: Workload, others: Sequence[str] = (), vllm_site: Path | None = None) -> dict[str, Any]:
    """The first and the final engine of a `run.Run`, from its own repository, and vLLM where it is installed for the
    run's interpreter or lies in `vllm_site`; artefacts under the run's `aiperf/`.

    others: `label=http://host:port/model` of servers that are up. Errors: AiperfError, LaunchError.
    """
    vllm = vllm_of(run.request, work, vllm_site)
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
    found = bench(specs, run.dir / "aiperf", root=_ROOT, work=work, urls=urls, vllm=vllm)
    for spec in specs.values():
        run.repo.drop_tree(spec.tree.name)
    return found


def vllm_of(want: Any, work: Workload, site: Path | None) -> Command | None:
    """How vLLM would serve a run's model by its own defaults, with as many ranks; None where it is not installed.

    Errors: AiperfError when it is not in a `site` that was named.
    """
    if not vllm_server.installed(want.python, site):
        if site is not None:
            raise AiperfError(f"--vllm-site {site}: {want.python} finds no vLLM there")
        return None
    longest = max(2048, 2 * (work.prompt_tokens + work.new_tokens))
    common = vllm_server.Common(
        model=want.model_dir, dtype=want.dtype, max_model_len=longest, tp=want.tp, site=site and site.resolve(), texts=True
    )
    return vllm_server.command(common, vllm_server.Setting("defaults"))


def lines(found: Mapping[str, Any]) -> list[str]:
    """The result as text, one line a metric: for the terminal."""
    text = [f"{'engine':12} {'metric':14} {'ours':>10} {'AIPerf':>10} {'differ':>8}"]
    for engine in found["engines"]:
        for row in engine["rows"]:
            mark = "  fault of measurement" if row["fault"] else ""
            text.append(
                f"{engine['label']:12} {row['metric']:14} {row['ours']:10.2f} {row['aiperf']:10.2f} {row['difference']:+8.1%}{mark}"
            )
            text += [f"  {row['why']}"] if row["why"] else []
    return text + [f"{label}: not measured: {why.strip().splitlines()[0]}" for label, why in found.get("left_out", {}).items()]
