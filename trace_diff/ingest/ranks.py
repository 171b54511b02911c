"""Which rank a trace is: from its distributedInfo, else from its file's name. Not for: loading."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

# Most specific first. SGLang writes ...-TP-3.trace.json.gz, vLLM ...rank3..., dp0_pp0_tp3; tensorboard workers host_123.
_PATTERNS = (
    re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])tp[-_.]?(\d+)(?!\d*[-_]?(?:eager|graph|of))(?=[-_.])", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])(?:worker|gpu|device|r)[-_.]?(\d+)(?=[-_.]|$)", re.IGNORECASE),
)


MOST_RANKS = 1 << 20  # a larger number is a time or an identifier, not a rank


def from_name(path: str) -> int | None:
    """Rank in a file name, or None. A folder name (rank3/trace.json) is looked at when the file says nothing."""
    parts = PurePath(path).parts
    for text in parts[-1:] + parts[-2:-1]:
        for pattern in _PATTERNS:
            found = pattern.findall(text)
            if found and int(found[-1]) < MOST_RANKS:
                return int(found[-1])
    return None


def from_meta(meta: dict[str, Any]) -> tuple[int | None, int | None]:
    """(rank, world size) of the file's distributedInfo; None for what it does not say."""
    info = meta.get("distributedInfo")
    if not isinstance(info, dict):
        return None, None
    return _number(info.get("rank")), _number(info.get("world_size"))


def _number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and len(value) < 9 and value.isascii() and value.strip().isdecimal():
        value = int(value)
    return value if isinstance(value, int) and 0 <= value < MOST_RANKS else None
