"""Where the Claude proposer's settings come from: an agent option, else the environment, else a file, else the default.

The environment is ANTHROPIC_MODEL, ANTHROPIC_BASE_URL and HOTLOOP_CLAUDE_<NAME> for every name; the file is JSON, named by
the option `config`. Unknown names and wrong types are errors that say what is valid. Not for: keys (the SDK finds
them; `key_env` names another variable), or what is done with a setting (claude.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MODEL = "claude-sonnet-4-5"
_STANDARD = {"model": "ANTHROPIC_MODEL", "base_url": "ANTHROPIC_BASE_URL"}


class SettingError(ValueError):
    """A setting that is unknown or has a wrong type; names where it came from and what is valid."""


@dataclass(frozen=True, slots=True)
class Settings:
    """usd_in, usd_out: USD per million tokens. max_*: caps of one run, None for none. prices: a table like prices.json."""

    model: str = MODEL
    base_url: str | None = None
    key_env: str | None = None
    prices: str | None = None
    usd_in: float | None = None
    usd_out: float | None = None
    max_output: int = 12_000
    max_usd: float | None = None
    max_tokens: int | None = None
    max_requests: int | None = 120
    max_seconds: float | None = None
    timeout_s: float = 300.0
    effort: str | None = None


_TEXTS = {"model", "base_url", "key_env", "prices", "effort"}
NAMES = tuple(f.name for f in fields(Settings))


def read(options: Mapping[str, Any], config: str | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from all places; None counts as not given. Raises SettingError."""
    found: dict[str, Any] = {}
    for place, given in ((f"the file {config}", _file(config)), ("the environment", _environment(environ)), ("an option", options)):
        for name, value in given.items():
            if name not in NAMES:
                raise SettingError(f"{place} sets {name!r}; known settings: {', '.join(NAMES)}")
            if value is not None:
                found[name] = _checked(place, name, value)
    return Settings(**found)


def _file(config: str | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    try:
        given = json.loads(Path(config).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"{config}: not a file of settings: {error}") from error
    if not isinstance(given, dict):
        raise SettingError(f"{config}: must be a JSON object of settings")
    return given


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name in NAMES:
        text = environ.get(f"HOTLOOP_CLAUDE_{name.upper()}") or environ.get(_STANDARD.get(name, ""))
        if text:
            given[name] = text
    return given


def _checked(place: str, name: str, value: Any) -> Any:
    """The value in its type; numbers may be written as text."""
    if name in _TEXTS:
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise SettingError(f"{place} sets {name} to {value!r}, which is not a number") from None
    whole = name in ("max_output", "max_tokens", "max_requests")
    if number < 0 or number != number or (whole and number != int(number)):
        raise SettingError(f"{place} sets {name} to {value!r}; valid: {'a whole number' if whole else 'a number'} from 0")
    return int(number) if whole else number
