"""G07: the server's own log-probabilities, over the full vocabulary where it offers that, against the oracle's.

A server that offers none is not judged by this gate (the fact says so): the verdict rests on token ids.
Not for: sampling (`sampling.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optimizer.confine.launch import Server
from optimizer.gates import model_math, streams
from optimizer.gates.context import Lab, Setup, broken, failed, parked, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason, Stream

NEW_TOKENS = 3
FULL_VOCABULARY = 32_000  # above this, a full table a token is too much text: the server's top 20 then
PREFIX = "token_id:"
_NAME = re.compile(r"token_id:[0-9]{1,9}")
# 16-bit engines are judged by Kullback-Leibler divergence, within the table where the server gives only a part.


def check(lab: Lab) -> GateResult:
    setup = lab.setup()
    return compare(lab, setup, "logprobs", (16, 33, 57, 24) * (3 if lab.on_gpu else 1))  # in 16 bits a mean over few varies much


def compare(lab: Lab, setup: Setup, name: str, lengths: tuple[int, ...]) -> GateResult:
    found = against_oracle(lab, setup, name, lengths)
    if isinstance(found, GateResult):
        return found
    tokens = streams.judge(lab.oracle(setup).score(found.streams), name, "G07", accept_numeric_drift=lab.ctx.accept_numeric_drift)
    return _verdict(lab, found) if tokens.passed else tokens


@dataclass(frozen=True, slots=True)
class Compared:
    """Streams with log-probabilities, and how these differ from the oracle's. No band was asked."""

    streams: list[Stream]
    max_error: float
    mean_kl: float
    width: int  # of the first table


def against_oracle(lab: Lab, setup: Setup, name: str, lengths: tuple[int, ...]) -> Compared | GateResult:
    """The server's tables beside the oracle's on fresh prompts; a result where there are none to compare, or odd ones."""
    server = lab.server(setup)
    prompts = lab.draw(name, len(lengths), lengths, kinds=("random", "rare_scripts"))
    got = _offered(lab, server, [Request(p, NEW_TOKENS) for p in prompts])
    if got is None:
        return _none_offered(lab, prompts[0])
    tables = [_tables(stream) for stream in got]
    if wrong := _odd(tables, model_math.vocabulary(lab.ctx.candidate.model_dir)):
        return failed("logprobs", "G07", RejectReason.WRONG_TOKENS, wrong)
    wanted = [[list(table) for table in stream] for stream in tables]
    values = lab.oracle(setup).logprobs(got, wanted)
    errors, divergences = [], []
    for stream, right in zip(tables, values, strict=True):
        for table, oracle_values in zip(stream, right, strict=True):
            claimed = np.array(list(table.values()))
            truth = np.array(oracle_values)
            errors.append(float(np.abs(claimed - truth).max()))
            divergences.append(_divergence(truth, claimed))
    return Compared(got, max(errors), float(np.mean(divergences)), len(wanted[0][0]))


def _none_offered(lab: Lab, prompt: tuple[int, ...]) -> GateResult:
    """A server need not offer them; one that replaces a server which does must, or this gate could be switched off."""
    request = [Request(prompt, NEW_TOKENS)]
    if lab.incumbent_serves("logprobs", lambda server: _offered(lab, server, request) is not None):
        detail = "no log-probabilities are offered any more; the incumbent offers them"
        return failed("logprobs", "G07", RejectReason.TOKEN_ACCOUNTING, detail)
    return passed("logprobs", "G07", "the server offers no log-probabilities", offered=False)


def _odd(tables: list[list[dict[int, float]]], vocabulary: int) -> str | None:
    """What no model's table can hold, or None."""
    for stream in tables:
        for table in stream:
            if not table:
                return "a table of log-probabilities is empty"
            if not all(0 <= token < vocabulary for token in table):
                return f"a log-probability names a token outside the vocabulary of {vocabulary}"
            if not all(math.isfinite(value) for value in table.values()):
                return "a log-probability is not a finite number"
    return None


def _divergence(truth: np.ndarray, claimed: np.ndarray) -> float:
    """KL divergence of two tables of log-probabilities, each scaled to sum to one: what a table leaves out is no error."""
    p = truth - np.logaddexp.reduce(truth)
    return float(np.sum(np.exp(p) * (p - (claimed - np.logaddexp.reduce(claimed)))))


def _verdict(lab: Lab, found: Compared) -> GateResult:
    bands, error, divergence = lab.ctx.oracle.bands, found.max_error, found.mean_kl
    facts: dict[str, Any] = {"max_error": error, "mean_kl": divergence, "width": found.width}
    if lab.ctx.target.dtype.get(lab.ctx.candidate.device, "float32") != "float32":
        if divergence > bands.kl:
            return failed(
                "logprobs",
                "G07",
                RejectReason.WRONG_TOKENS,
                f"mean KL divergence {divergence:.2g} > {bands.kl:.2g}",
                **facts,
            )
        return passed("logprobs", "G07", **facts)
    detail = f"log-probabilities differ by up to {error:.3g} from the oracle's"
    if error <= bands.reorder:
        return passed("logprobs", "G07", **facts)
    if error > bands.tolerance:
        return failed("logprobs", "G07", RejectReason.WRONG_TOKENS, detail, **facts)
    if lab.ctx.accept_numeric_drift:
        return passed("logprobs", "G07", f"numeric drift accepted: {detail}", **facts)
    return parked("logprobs", "G07", RejectReason.DRIFT, detail, **facts)


def _offered(lab: Lab, server: Server, requests: list[Request]) -> list[Stream] | None:
    """Streams with the widest tables that the server gives; None when it gives none."""
    names = {"return_tokens_as_token_ids": True}
    full = len(lab.ctx.prompts.ordinary_ids) <= FULL_VOCABULARY
    for width in (-1, 20, 5) if full else (20, 5):
        got = server.client.complete([replace(r, logprobs=width, extra=names) for r in requests], 60)
        if any(s.error and not (s.status or 0) // 100 == 4 for s in got):
            raise broken(server, next(s.error for s in got if s.error) or "")
        if not any(s.error for s in got) and all(_tables(s) for s in got):
            return got
    return None


def _tables(stream: Stream) -> list[dict[int, float]]:
    """Per token: id -> log-probability, as the server states them. Empty when the form is another."""
    tables: list[dict[int, float]] = []
    for event in stream.logprobs or ():
        tops = event.get("top_logprobs") if isinstance(event, dict) else None
        if not isinstance(tops, list):
            return []
        for top in tops:
            if not isinstance(top, dict) or not all(_NAME.fullmatch(k) for k in top):
                return []
            tables.append({int(k[len(PREFIX) :]): _number(v) for k, v in top.items()})
    return tables if len(tables) == len(stream.token_ids) else []


def _number(value: Any) -> float:
    """A float of what a server wrote; NaN for what is none, or too large for one."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
