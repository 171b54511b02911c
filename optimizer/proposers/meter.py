"""What talking to a model costs, caps that are checked before each request, and the record of every exchange.

Prices are a dated table beside this file and can be overridden; a model without a price may only be used without a
USD cap. Not for: the conversation (claude.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).with_name("prices.json")
_SECRETS = (re.compile(r"sk-[A-Za-z0-9_-]{12,}"), re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]{12,}"))
CHARS_PER_TOKEN = 2.5  # low, so that an estimate of tokens before a request errs upwards
WARN_AT = (0.5, 0.8)  # shares of a cap at which it is said, once each


class CapReached(Exception):
    """The next request could go over a cap; it was not sent."""


@dataclass(frozen=True, slots=True)
class Prices:
    """USD per token of one model; None where nobody knows."""

    model: str
    usd_in: float | None
    usd_out: float | None
    as_of: str
    factors: tuple[float, float, float] = (1.25, 2.0, 0.1)  # cache written for 5 minutes, for 1 hour, read

    @classmethod
    def of(cls, model: str, usd_in: float | None = None, usd_out: float | None = None, table_file: Path | None = None) -> Prices:
        """From the table (another one where given), by the longest name that the model's begins with.

        usd_in, usd_out: per million tokens, they outweigh the table. Raises ValueError on a file that is no table.
        """
        try:
            table = json.loads((table_file or _TABLE).read_text("utf-8"))
            table = {**json.loads(_TABLE.read_text("utf-8")), **table}
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{table_file}: not a table of prices: {error}") from error
        known = max((n for n in table["models"] if model.startswith(n)), key=len, default=None)
        listed = table["models"][known] if known else (None, None)
        price_in, price_out = (a if a is not None else b for a, b in zip((usd_in, usd_out), listed, strict=True))
        factors = (table["cache_write_5m"], table["cache_write_1h"], table["cache_read"])
        as_of = "given" if usd_in is not None or usd_out is not None else table["as_of"]
        per_token = [None if p is None else p / 1e6 for p in (price_in, price_out)]
        return cls(model, per_token[0], per_token[1], as_of, factors)

    @property
    def known(self) -> bool:
        return self.usd_in is not None and self.usd_out is not None

    def cost(self, usage: Mapping[str, Any]) -> float:
        """USD of one response's usage; 0.0 for a model without a price."""
        if self.usd_in is None or self.usd_out is None:
            return 0.0
        written = usage.get("cache_creation") or {}
        hour = written.get("ephemeral_1h_input_tokens") or 0
        short = max(0, (usage.get("cache_creation_input_tokens") or 0) - hour)
        weighted = (usage.get("input_tokens") or 0) + (usage.get("cache_read_input_tokens") or 0) * self.factors[2]
        weighted += short * self.factors[0] + hour * self.factors[1]
        return weighted * self.usd_in + (usage.get("output_tokens") or 0) * self.usd_out


@dataclass(slots=True)
class Meter:
    """Spending of one run of a proposer. None means no cap."""

    prices: Prices
    max_usd: float | None = None
    max_tokens: int | None = None
    max_requests: int | None = None
    max_seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    usd: float = 0.0
    tokens: int = 0
    requests: int = 0
    started: float = field(init=False)
    _said: set[tuple[str, float]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.max_usd is not None and not self.prices.known:
            raise CapReached(
                f"no price is known for {self.prices.model}, so a cap in USD cannot be kept; give usd_in and usd_out "
                "(USD per million tokens) as agent options, or no --max-usd"
            )
        self.started = self.clock()

    def before(self, prompt_chars: int, max_output: int, hour_chars: int = 0, short_chars: int = 0) -> None:
        """Count the request that is about to be sent. Raises CapReached when it might go over a cap.

        hour_chars, short_chars: what of the prompt is put into the cache for an hour and for five minutes, which costs
        more than reading it. That it may be there already is not counted on.
        """
        tokens, hour, short = (int(n / CHARS_PER_TOKEN) for n in (prompt_chars, hour_chars, short_chars))
        cached = {"cache_creation_input_tokens": hour + short, "cache_creation": {"ephemeral_1h_input_tokens": hour}}
        most = self.prices.cost({"input_tokens": max(0, tokens - hour - short), "output_tokens": max_output, **cached})
        if self.max_usd is not None and self.usd + most > self.max_usd:
            raise CapReached(f"USD cap: {self.usd:.2f} spent, the next request could cost {most:.2f}, the cap is {self.max_usd:.2f}")
        if self.max_tokens is not None and self.tokens + tokens + max_output > self.max_tokens:
            raise CapReached(f"token cap: {self.tokens} used, the next request could use {tokens + max_output} of {self.max_tokens}")
        if self.max_requests is not None and self.requests >= self.max_requests:
            raise CapReached(f"request cap: {self.requests} of {self.max_requests} sent")
        if self.seconds_left() == 0.0:
            raise CapReached(f"time cap: {self.max_seconds:.0f} s are over")
        self.requests += 1

    def warnings(self) -> list[str]:
        """What has to be said now: every cap of which half, and then four fifths, is used; once each."""
        seconds = self.clock() - self.started
        uses = (
            ("USD", self.usd, self.max_usd),
            ("tokens", self.tokens, self.max_tokens),
            ("requests", self.requests, self.max_requests),
            ("seconds", seconds, self.max_seconds),
        )
        found = []
        for name, used, cap in uses:
            passed = [share for share in WARN_AT if cap and used >= share * cap and (name, share) not in self._said]
            self._said.update((name, share) for share in passed)
            if passed:
                found.append(f"{passed[-1]:.0%} of the cap of {cap:g} {name} is used ({used:.4g})")
        return found

    def seconds_left(self) -> float | None:
        if self.max_seconds is None:
            return None
        return max(0.0, self.max_seconds - (self.clock() - self.started))

    def book(self, usage: Mapping[str, Any]) -> float:
        """Add a response's usage (of failed and cut ones too); returns its USD."""
        usd = self.prices.cost(usage)
        self.usd += usd
        names = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        self.tokens += sum(usage.get(n) or 0 for n in names)
        return usd


@dataclass(slots=True)
class Recorder:
    """Every request and answer of one conversation, a JSON line each, without secrets."""

    file: Path | None
    secrets: tuple[str, ...] = ()

    def write(self, kind: str, data: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"kind": kind, **data}, ensure_ascii=False, default=str)
        with self.file.open("a", encoding="utf-8") as handle:
            handle.write(self.redact(text) + "\n")

    def redact(self, text: str) -> str:
        for secret in self.secrets:
            if len(secret) >= 8:
                text = text.replace(secret, "[redacted]")
        text = _SECRETS[0].sub("[redacted]", text)
        return _SECRETS[1].sub(r"\1[redacted]", text)
