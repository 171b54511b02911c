"""G20: nothing depends on who is fast. Ranks are stopped and let go from outside, runs are repeated, fresh memory holds
NaN, freed memory is overwritten at once, and the KV cache is too small, so that pages change hands.

Not for: plain shapes (`shapes.py`).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

from optimizer.confine.launch import Server
from optimizer.gates import perturb, shapes, streams
from optimizer.gates.context import Failed, Lab, Setup, ask, failed, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

LENGTHS = (14, 16, 21, 35)
NEW_TOKENS = 10
STOP_S = (0.01, 0.05)  # how long a rank is held ...
LONG_STOP_S = 0.3  # ... and every sixth time: whoever waits only so long for a peer gives up then


def delays(lab: Lab) -> GateResult:
    """Each rank in turn is held for a moment, at random times, while streams run; then three plain repeats."""
    setup = perturb.perturbed(lab)
    server = lab.server(setup)
    requests = [Request(p, NEW_TOKENS) for p in lab.draw("delays", len(LENGTHS), LENGTHS, kinds=("random",))]
    with held_ranks(server) as held:
        shaken = ask(server, requests, 120.0)
    repeats = [ask(server, requests) for _ in range(2)]
    result = passed("delays", "G20")
    for number, got in enumerate((shaken, *repeats)):
        result = streams.judge(
            lab.oracle(setup).score(got),
            "delays",
            "G20",
            reason=RejectReason.RACES,
            what=f"{'ranks held' if number == 0 else f'repeat {number}'}",
            accept_numeric_drift=lab.ctx.accept_numeric_drift,
        )
        if not result.passed:
            return result
    return passed("delays", "G20", **(result.facts | {"holds": held[0]}))


@contextlib.contextmanager
def held_ranks(server: Server):
    """SIGSTOP and SIGCONT to one rank after another, from a thread here; everyone runs again afterwards."""
    ranks = server.ranks() or server.processes()[-1:]
    done = threading.Event()
    held = [0]

    def hold() -> None:
        rng = random.SystemRandom()
        while not done.wait(rng.uniform(0.005, 0.04)):
            pid = rng.choice(ranks)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                held[0] += 1
                time.sleep(LONG_STOP_S if held[0] % 6 == 1 else rng.uniform(*STOP_S))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        done.set()
        thread.join()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def poisoned(lab: Lab) -> Setup:
    """Hostile memory and a small cache on one rank. On GPUs it would be a third launch: the common one serves."""
    if lab.on_gpu:
        return shapes.secret(lab)
    return lab.setup(
        tp=1, probes=frozenset({"nan_fill", "no_cache_alloc"}), small_cache=bool(lab.ctx.target.small_cache)
    )


def poison(lab: Lab) -> GateResult:
    """Fresh memory is NaN, freed memory is overwritten, the cache is full: the tokens stay the same.

    A wrong stream is run again alone: right then, the page book-keeping is at fault (G12), else memory (G20).
    """
    setup = poisoned(lab)
    server = lab.server(setup)
    lengths = [30 + 3 * i for i in range(12)]
    new = [40] * 11 + [24]
    prompts = lab.draw("poison", 12, lengths, kinds=("random", "document"))
    requests = [Request(p, n) for p, n in zip(prompts, new, strict=True)]
    try:
        waves = [ask(server, requests, 120.0), ask(server, requests[:4], 60.0)]
        largest = lab.draw("largest", 1, 560, kinds=("random",))[0]
        waves.append(ask(server, [Request(largest, 16)], 60.0) if setup.small_cache else [])
    except Failed as error:  # a full cache is a shape that must be served
        raise Failed(
            error.reason, error.detail, error.check or ("G12" if setup.small_cache else "G20")
        ) from None
    oracle = lab.oracle(setup)
    result = passed("poison", "G20")
    for got in waves:
        for stream, request in zip(got, requests, strict=False):
            if wrong := streams.account(stream, request.max_tokens if len(got) > 1 else 16):
                raise Failed(RejectReason.TOKEN_ACCOUNTING, wrong, "G11")
        result = streams.judge(
            oracle.score(got),
            "poison",
            "G20",
            reason=RejectReason.RACES,
            accept_numeric_drift=lab.ctx.accept_numeric_drift,
        )
        if not result.passed and not result.parked:
            bad = next(s for s, score in zip(got, oracle.score(got), strict=True) if not score.ok)
            alone = ask(server, [Request(bad.prompt_ids, len(bad.token_ids))])
            if setup.small_cache and oracle.score(alone)[0].ok:
                return failed(
                    "poison", "G12", RejectReason.SHAPES, f"full cache: {result.detail}", **result.facts
                )
        if not result.passed:
            return result
    return passed("poison", "G20 G12", **(result.facts | {"small_cache": setup.small_cache}))
