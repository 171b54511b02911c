"""The cells of the headline, how one server is timed in all of them, and whether two servers did the same work.

Six cells: decode at batch 1, 8 and 32, decode at 4,096 tokens of context, time to first token at 1,024 and 4,096 tokens.
Times are of the load generator's process, over HTTP. Not for: starting servers, or who is compared with whom
(`gpu_headline.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimizer.traffic.client import Client, ClientError, Request
from optimizer.traffic.loadgen import LoadGenerator
from optimizer.traffic.prompts import PromptSource
from optimizer.types import Stream
from optimizer.vllm_server import Stated

SAME_MODEL = 0.5  # share of streams whose first token must be the same in both engines: greedy, same weights, same prompt


@dataclass(frozen=True, slots=True)
class Job:
    """Requests of one shape: `repeats` times `concurrency` at once, `prompt_tokens` in and `new_tokens` out."""

    name: str
    prompt_tokens: int
    new_tokens: int
    concurrency: int = 1
    repeats: int = 1


JOBS = (Job("b1", 12, 129), Job("b8", 12, 65, 8), Job("b32", 12, 65, 32), Job("p1024", 1024, 2, repeats=3), Job("p4096", 4096, 65, repeats=2))
CELLS: dict[str, tuple[str, str]] = {  # name -> (job, what is read from its streams)
    "decode, batch 1": ("b1", "step"),
    "decode, batch 8": ("b8", "step"),
    "decode, batch 32": ("b32", "step"),
    "decode, 4096 tokens of context": ("p4096", "step"),
    "first token, 1024 tokens": ("p1024", "first"),
    "first token, 4096 tokens": ("p4096", "first"),
}


class NotTimed(Exception):
    """The server failed, or did other work than it was asked for: there is no time."""


class AtOnce(NotTimed):
    """Answers came whole: short ones do when the client is kept waiting. Says nothing against the server."""


def shrunk(by: int) -> tuple[Job, ...]:
    """The jobs with prompts and answers divided by `by`: for a machine on which the full ones take too long."""
    return tuple(replace(j, prompt_tokens=max(4, j.prompt_tokens // by), new_tokens=max(2, j.new_tokens // by)) for j in JOBS)


@dataclass(frozen=True, slots=True)
class Turn:
    """All jobs once on one server."""

    ms: dict[str, float]  # cell -> ms per step, or ms to the first token
    streams: tuple[Stream, ...]  # in the order of the requests


def requests(jobs: Sequence[Job], prompts: PromptSource, name: str) -> dict[str, list[list[Request]]]:
    """Rounds of every job, the same for whoever is given the same name: greedy, no end of text."""
    found: dict[str, list[list[Request]]] = {}
    for job in jobs:
        drawn = prompts.draw(f"headline/{name}/{job.name}", job.repeats * job.concurrency, job.prompt_tokens)
        made = [Request(ids, job.new_tokens) for ids in drawn]
        found[job.name] = [made[i : i + job.concurrency] for i in range(0, len(made), job.concurrency)]
    return found


def sha(work: dict[str, list[list[Request]]]) -> str:
    return PromptSource.sha([r.prompt_ids for rounds in work.values() for each in rounds for r in each])


def take(client: Client, generator: LoadGenerator, work: dict[str, list[list[Request]]], deadline_s: float) -> Turn:
    """Time all jobs, one after another. Raises NotTimed, also where a stream is not what was asked for."""
    done: dict[str, list[Stream]] = {}
    for name, rounds in work.items():
        done[name] = []
        for each in rounds:
            try:
                streams = generator.run(client, each, deadline_s).streams
            except ClientError as error:
                raise NotTimed(f"{name}: {error}") from error
            if wrong := [w for request, stream in zip(each, streams, strict=True) if (w := other_work(request, stream))]:
                raise NotTimed(f"{name}: {wrong[0]} ({len(wrong)} of {len(each)} streams)")
            done[name] += streams
    ms = {}
    for cell, (job, what) in CELLS.items():
        if job not in done:
            continue
        if what == "first":
            ms[cell] = statistics.median((s.arrivals_ns[0] - s.sent_ns) / 1e6 for s in done[job])
            continue
        ms[cell] = step_ms(done[job])
        if not ms[cell]:
            raise AtOnce(f"{job}: whole answers came at once: there is no time per step")
    return Turn(ms, tuple(s for streams in done.values() for s in streams))


def other_work(request: Request, stream: Stream) -> str | None:
    """How a stream differs from what was asked for; None when it is just that: tokens counted, usage, end."""
    if stream.error is not None:
        return stream.error
    if len(stream.token_ids) != request.max_tokens or len(stream.arrivals_ns) != request.max_tokens:
        return f"{len(stream.token_ids)} tokens came, {request.max_tokens} were asked for"
    usage = stream.usage or {}
    counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if counted != (len(request.prompt_ids), request.max_tokens):
        return f"usage says {counted}, sent and received were {(len(request.prompt_ids), request.max_tokens)}"
    return None if stream.finish_reason == "length" else f"finish reason {stream.finish_reason!r}, not 'length'"


def step_ms(streams: Sequence[Stream]) -> float:
    """ms per decode step: the mean gap between tokens over all streams, first gap left out where there are more.

    The mean, as a user waits for it: a median would leave out every step that takes longer than most.
    """
    gaps = [b - a for s in streams for a, b in zip(s.arrivals_ns[1:], s.arrivals_ns[2:], strict=False)]
    gaps = gaps or [b - a for s in streams for a, b in zip(s.arrivals_ns, s.arrivals_ns[1:], strict=False)]
    return statistics.fmean(gaps) / 1e6


@dataclass(frozen=True, slots=True)
class Terms:
    """What both servers are held to."""

    dtype: str
    max_model_len: int
    kv_tokens: int


def unfair(terms: Terms, said: Stated, max_model_len: int | None) -> list[str]:
    """Why a vLLM server may not be compared; empty when nothing speaks against it. What it does not say counts against it."""
    found = []
    if said.dtype != terms.dtype:
        found.append(f"computes in {said.dtype}, asked for {terms.dtype}")
    if said.kv_dtype not in ("auto", terms.dtype):
        found.append(f"KV cache in {said.kv_dtype}")
    if said.prefix_caching is not False:
        found.append(f"prefix caching is {said.prefix_caching}")
    if said.prefix_hits or (said.prefix_hits is None and said.prefix_caching is not False):
        found.append(f"{said.prefix_hits} tokens came from a prefix cache")
    if said.preemptions:
        found.append(f"{said.preemptions:g} requests were preempted: its cache is too small")
    if max_model_len != terms.max_model_len:
        found.append(f"max_model_len {max_model_len}, asked for {terms.max_model_len}")
    if said.kv_tokens is None or said.kv_tokens < 0.9 * terms.kv_tokens:
        found.append(f"KV cache for {said.kv_tokens} tokens, asked for {terms.kv_tokens}")
    return found


def agreement(a: Sequence[Stream], b: Sequence[Stream]) -> dict[str, Any]:
    """Shares of streams with the same first token and with all tokens the same, and the mean common beginning."""
    pairs = [(x.token_ids, y.token_ids) for x, y in zip(a, b, strict=True)]
    common = [next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y))) / len(x) for x, y in pairs]
    return {
        "streams": len(pairs),
        "first_token_same": sum(x[0] == y[0] for x, y in pairs) / len(pairs),
        "all_same": sum(x == y for x, y in pairs) / len(pairs),
        "common_beginning": statistics.fmean(common),
    }
