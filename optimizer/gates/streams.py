"""G08-G11: greedy streams against the oracle, and the account of their tokens. For any stream, timed ones too.

Not for: making streams (other gates and `measure.py` do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from optimizer.gates.context import failed, parked, passed
from optimizer.truth.oracle import Oracle, Score
from optimizer.types import GateResult, RejectReason, Stream


@dataclass(frozen=True, slots=True)
class Expected:
    """How a stream must end: after exactly `tokens` ("length"), or earlier with one of `eos` ("stop")."""

    tokens: int
    eos: frozenset[int] = frozenset()  # empty: end-of-text was to be ignored


def check(
    streams: Sequence[Stream],
    oracle: Oracle,
    expected: Sequence[int | Expected],
    *,
    tokenizer: Any = None,
    gate: str = "streams",
    accept_numeric_drift: bool = False,
) -> GateResult:
    """Account (G11), then tokens (G08-G10), of greedy streams. `tokenizer`: a `tokenizers.Tokenizer`, for the text."""
    wrong = next((w for w in map(account, streams, expected) if w), None)
    wrong = wrong or next((w for s in streams if (w := text_fault(s, tokenizer))), None)
    if wrong:
        return failed(gate, "G11", RejectReason.TOKEN_ACCOUNTING, wrong)
    return judge(oracle.score(streams), gate, "G08", accept_numeric_drift=accept_numeric_drift)


def judge(
    scores: Sequence[Score],
    gate: str,
    check: str,
    *,
    reason: RejectReason = RejectReason.WRONG_TOKENS,
    accept_numeric_drift: bool = False,
    what: str = "",
) -> GateResult:
    """Scores as a verdict: equal and reorder pass, tolerance is parked, above is wrong."""
    gap = max((s.max_gap for s in scores), default=0.0)
    facts = {"max_gap": gap, "streams": len(scores), "reordered": sum(s.reordered for s in scores)}
    bad = [(i, s) for i, s in enumerate(scores) if not s.ok]
    if not bad:
        return passed(gate, check, **facts)
    wrong = [(i, s) for i, s in bad if s.band == "wrong"]
    index, first = (wrong or bad)[0]
    detail = f"{what + ': ' if what else ''}{len(bad)} of {len(scores)} streams differ; stream {index}, token {first.first_bad}, logit gap {first.max_gap:.3g}"
    if wrong:
        return failed(gate, check, reason, detail, **facts)
    if accept_numeric_drift:
        return passed(gate, check, f"numeric drift accepted: {detail}", **facts)
    return parked(gate, check, RejectReason.DRIFT, f"numeric drift: {detail}", **facts)


def account(stream: Stream, expected: int | Expected) -> str | None:
    """What is wrong with a stream's own account, or None."""
    want = expected if isinstance(expected, Expected) else Expected(expected)
    if stream.error is not None:
        return stream.error
    got, n = stream.token_ids, len(stream.token_ids)
    stops = [i for i, token in enumerate(got) if token in want.eos]
    if n > want.tokens:
        return f"{n} tokens came, {want.tokens} were asked for"
    if stops and stops[0] != n - 1:
        return f"end-of-text at token {stops[0]}, but {n - 1 - stops[0]} more tokens came"
    if stops and stream.finish_reason != "stop":
        return f"finish_reason is {stream.finish_reason!r} after end-of-text, not 'stop'"
    if not stops and n != want.tokens:
        return f"{n} tokens came, {want.tokens} were asked for, and no end-of-text"
    if not stops and stream.finish_reason != "length":
        return f"finish_reason is {stream.finish_reason!r} after {n} tokens, not 'length'"
    usage = stream.usage or {}
    if usage.get("completion_tokens") != n:
        return f"usage says {usage.get('completion_tokens')} completion tokens, {n} came"
    if usage.get("prompt_tokens") != len(stream.prompt_ids):
        return f"usage says {usage.get('prompt_tokens')} prompt tokens, {len(stream.prompt_ids)} were sent"
    return None


def text_fault(stream: Stream, tokenizer: Any) -> str | None:
    """What is wrong with the text, given the ids. Byte-exact but for U+FFFD, whose count depends on chunking."""
    if tokenizer is None:
        return None
    got = stream.text.replace("\ufffd", "")
    ids = list(stream.token_ids)
    wanted = {tokenizer.decode(ids, skip_special_tokens=skip).replace("\ufffd", "") for skip in (True, False)}
    if got in wanted:
        return None
    want = min(wanted, key=len)
    at = next(
        (i for i, (x, y) in enumerate(zip(got, want, strict=False)) if x != y), min(len(got), len(want))
    )
    return f"text differs from its tokens at character {at}: {got[at : at + 20]!r}, tokens say {want[at : at + 20]!r}"


@cache
def tokenizer_of(model_dir: Path) -> Any:
    """The tokenizer of a model directory, None without tokenizer.json."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
