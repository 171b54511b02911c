"""G12: the matrix of shapes, each stream against the oracle.

Batch sizes, prompt lengths around page boundaries and up to the limit, an answer as long as time allows, prompts that
join while others decode, streams that hang up midway, pairs of prompts made to collide in a careless prefix cache, and
requests that must be refused. Runs at one rank (exchange between ranks is `greedy.py`'s and `parallel.py`'s).
Not for: a full cache (`saturation.py`).
"""

from __future__ import annotations

import json

from optimizer.confine.launch import Server
from optimizer.gates import streams
from optimizer.gates.context import Failed, Lab, Setup, ask, passed
from optimizer.traffic.client import Request
from optimizer.traffic.prompts import DEFAULT_KINDS, PAGE_LENGTHS
from optimizer.truth import weights
from optimizer.types import GateResult, RejectReason, Stream

BATCHES = (1, 2, 3, 5, 8, 17, 33, 66)
QUICK_BATCHES = (1, 3, 8)
LONG, LONG_S = 272, 8.0  # the longest stream: so many tokens, or as many more as fit in so many seconds
LONGEST_PROMPT = {"cpu": 4096, "cuda": 16384}


def secret(lab: Lab) -> Setup:
    """Secret weights on one rank: gates that do not concern TP share this launch.

    On GPUs, where a launch costs a minute, all full gates share one, at the TP that is optimised.
    """
    return lab.setup(weights="secret") if lab.on_gpu else lab.setup(tp=1, weights="secret")


def check(lab: Lab) -> GateResult:
    setup = secret(lab)
    server = lab.server(setup)
    quick = lab.ctx.protocol.name == "quick"
    batches = _batches(lab, server, QUICK_BATCHES if quick else BATCHES)
    long = 40 if quick else max(LONG, int(LONG_S / pass_s(batches[0])))
    parts = [batches, _growing(lab, server, quick, long), _collisions(lab, server), _refusals(lab, server)]
    got = [stream for part in parts for stream in part]
    result = streams.judge(
        lab.oracle(setup).score(got),
        "shapes",
        "G12",
        reason=RejectReason.SHAPES,
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    if result.passed:
        return result
    return _named(lab, setup, parts, result)


def _named(lab: Lab, setup: Setup, parts: list[list[Stream]], result: GateResult) -> GateResult:
    """Say which shape failed."""
    oracle = lab.oracle(setup)
    for name, part in zip(
        ("batches", "growing batch, long streams and prompts", "colliding prompts", "beside a refusal"),
        parts,
        strict=True,
    ):
        judged = streams.judge(
            oracle.score(part),
            "shapes",
            "G12",
            reason=RejectReason.SHAPES,
            what=name,
            accept_numeric_drift=lab.ctx.accept_numeric_drift,
        )
        if not judged.passed and judged.parked == result.parked:
            return judged
    return result


def _batches(lab: Lab, server: Server, sizes: tuple[int, ...]) -> list[Stream]:
    got: list[Stream] = []
    for size in sizes:
        lengths = [
            5 + n
            for n in lab.ctx.prompts.integers(f"gate/{lab.ctx.candidate_commit}/lengths{size}", size, 66)
        ]
        new = 6 if size < 16 else 3
        kinds = ("marked", *DEFAULT_KINDS) if size > 1 else DEFAULT_KINDS
        answers = ask(server, [Request(p, new) for p in lab.draw(f"batch{size}", size, lengths, kinds=kinds)])
        account(answers, [new] * size)
        got += answers
    return got


def pass_s(stream: Stream) -> float:
    """Seconds a decode pass of a lonely stream."""
    return max(1e-4, (stream.arrivals_ns[-1] - stream.arrivals_ns[0]) / 1e9 / max(1, len(stream.arrivals_ns) - 1))


def _growing(lab: Lab, server: Server, quick: bool, long: int) -> list[Stream]:
    """One long stream; others join it one after another, two of them hang up."""
    most = max_len(lab)
    page = PAGE_LENGTHS if not quick else (16, 17, 256)
    long = min(long, most - 17)
    k, side = lab.ctx.prompts.integers(f"gate/{lab.ctx.candidate_commit}/page", 2, max(1, (most - 12) // 16 - 17))
    page = page if quick else (*page, 16 * (17 + k) + side % 3 - 1)  # one more boundary, anywhere
    lengths = [17, *page, min(most - 12, LONGEST_PROMPT[lab.ctx.candidate.device])]
    new = [long, *[10] * len(page), 12]
    if quick:
        lengths, new = lengths[:-1], new[:-1]
    prompts = lab.draw("growing", len(lengths), lengths, kinds=("random", "random", "repetition", "document"))
    requests = [Request(p, n, delay_s=0.02 * i) for i, (p, n) in enumerate(zip(prompts, new, strict=True))]
    leaving = [
        Request(p, 64, delay_s=0.05 + 0.07 * i, abort_after=3)
        for i, p in enumerate(lab.draw("leaving", 2, [20, 40]))
    ]
    answers = ask(server, requests + leaving, 120.0)[: len(requests)]
    account(answers, new)
    return answers


def _collisions(lab: Lab, server: Server) -> list[Stream]:
    """Prompts that agree in much of what a careless cache key holds, one batch after the other."""
    base = lab.draw("collide", 1, 48, kinds=("random",))[0]
    other = lab.draw("collide2", 1, 48, kinds=("random",))[0]
    at = 1 + lab.ctx.prompts.integers(f"gate/{lab.ctx.candidate_commit}/place", 1, 30)[0]
    first = [base]
    second = [
        base[:16] + other[16:],  # same first page
        other[:16] + base[16:],  # same end
        base[:8] + other[8:40] + base[40:],  # same ends
        (*base[:at], other[at], *base[at + 1 :]),  # one token differs
        (*base[:at], base[at + 1], base[at], *base[at + 2 :]),  # same tokens, two exchanged
        base[:32],
        base,
    ]
    got = ask(server, [Request(p, 5) for p in first]) + ask(server, [Request(p, 5) for p in second])
    account(got, [5] * len(got))
    return got


def _refusals(lab: Lab, server: Server) -> list[Stream]:
    """What cannot be served gets a 4xx, and a request beside it is served."""
    most = max_len(lab)
    long = lab.draw("too long", 1, most + 1, kinds=("random",))[0]
    normal = lab.draw("beside", 1, 12)[0]
    got = server.client.complete([Request(long, 4), Request(normal, 4)], 60)
    if got[0].error is None or not 400 <= (got[0].status or 0) < 500:
        raise Failed(
            RejectReason.SHAPES, f"a prompt of {most + 1} tokens got status {got[0].status}, not a 4xx", "G12"
        )
    if got[1].error is not None:
        raise Failed(RejectReason.SHAPES, f"a request beside a refused one failed: {got[1].error}", "G12")
    answer = server.client.post("/v1/completions", b'{"prompt": [1, 2')
    if not 400 <= answer.status < 500:
        raise Failed(RejectReason.SHAPES, f"broken JSON got status {answer.status}, not a 4xx", "G12")
    if not server.client.health(5.0):
        raise Failed(RejectReason.CRASH, "not healthy after a bad request", "G12")
    account(got[1:], [4])
    return got[1:]


def account(got: list[Stream], new: list[int]) -> None:
    for stream, n in zip(got, new, strict=True):
        if wrong := streams.account(stream, n):
            raise Failed(RejectReason.TOKEN_ACCOUNTING, wrong, "G11")


def max_len(lab: Lab) -> int:
    """The longest sequence: what the incumbent states (a candidate could talk its way out), at most the config's."""
    config = json.loads((lab.ctx.candidate.model_dir / "config.json").read_text())
    limit = int(config.get("max_position_embeddings", 1024))
    stated = lab.incumbent_metadata().get("max_model_len")
    return min(limit, stated) if type(stated) is int and stated > 64 else limit


def swap(lab: Lab) -> GateResult:
    """G14, G11: secret weights of the same architecture, and natural ends of text (they are frequent there)."""
    setup = secret(lab)
    server = lab.server(setup)
    model_dir = lab.model_dir("secret")
    ends = weights.eos_ids(model_dir)
    prompts = lab.draw("swap", 10, [12, 20, 28, 40, 16, 9, 33, 50, 64, 24])
    free = [Request(p, 40, ignore_eos=False) for p in prompts[:6]]
    fixed = [Request(p, 33) for p in prompts[6:]]
    got = ask(server, free + fixed)
    wants = [streams.Expected(40, ends)] * len(free) + [streams.Expected(33)] * len(fixed)
    result = streams.check(
        got,
        lab.oracle(setup),
        wants,
        tokenizer=streams.tokenizer_of(model_dir),
        gate="swap",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    if not result.passed and not result.parked and result.check == "G08":
        return GateResult("swap", "G14 G08", False, RejectReason.WEIGHTS, result.detail, facts=result.facts)
    if not result.passed:
        return result
    ended = sum(s.finish_reason == "stop" for s in got)
    return passed("swap", "G14 G11", **(result.facts | {"natural_ends": ended}))
