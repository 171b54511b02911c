"""Border types to plain JSON values and back, and files written whole or not at all.

Not for: the ledger's byte form (ledger.canonical), or reading anything a candidate wrote.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Dataclasses, tuples, sets, enums and paths as what JSON knows. A number that is none becomes None."""
    return _finite(msgspec.to_builtins(value, enc_hook=_other))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build(kind: type[T], value: Any) -> T:
    """A border type from its plain form. Raises ValueError naming the field that does not fit."""
    return msgspec.convert(value, kind, strict=False, dec_hook=_path)


def _other(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise TypeError(f"cannot read a {kind.__name__}")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader, or a run killed here, sees the old file or the new one."""
    write_text(path, json.dumps(plain(value), indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    with draft.open("w", encoding="utf-8", errors="replace") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(path)
