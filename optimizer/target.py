"""What is being optimised: reading, drafting and checking a `target.toml`.

Paths in it are relative to `root` (default: the folder that holds the file). Only that folder itself goes into a
run's snapshot, stored under its path relative to root, so that an engine that is a package keeps its import name.
Not for: starting the engine (launch.py), nor reading its weights (weights.py).
"""

from __future__ import annotations

import string
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from optimizer.types import Target

FILE = "target.toml"
SCHEMA = 1
PLACEHOLDERS = ("python", "launcher", "model_dir", "tp", "device", "socket", "trace_dir")
DEVICES = ("cpu", "cuda")
_REQUIRED = ("schema", "name", "serve", "editable")
_DEFAULTS: dict[str, Any] = {
    "root": ".",
    "frozen": [],
    "devices": ["cpu"],
    "tp": [1],
    "dtype": {"cpu": "float32", "cuda": "bfloat16"},
    "start_timeout_s": 120,
    "small_cache": [],
}
KEYS = (*_REQUIRED, *_DEFAULTS)


class TargetError(Exception):
    """A target.toml that cannot be used; the message names the key and the valid values."""


def load_target(directory: Path) -> Target:
    """Read `directory/target.toml`. Raises TargetError naming the key that is wrong and what would be right."""
    directory = Path(directory).resolve()
    path = directory / FILE
    if not directory.is_dir():
        raise TargetError(f"no such folder: {directory}")
    if not path.is_file():
        raise TargetError(f"{directory} has no {FILE}; `optimize init {directory}` drafts one")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TargetError(f"{path}: not TOML: {error}") from error
    return parse_target(text, directory)


def parse_target(text: str, directory: Path) -> Target:
    """A target from the text of its file, which lies (or lay) in `directory`. Raises TargetError."""
    try:
        return _parse(tomllib.loads(text), directory)
    except (tomllib.TOMLDecodeError, TargetError) as error:
        what = "not TOML: " if isinstance(error, tomllib.TOMLDecodeError) else ""
        raise TargetError(f"{directory / FILE}: {what}{error}") from None


def _parse(raw: dict[str, Any], directory: Path) -> Target:
    unknown = sorted(raw.keys() - set(KEYS))
    if unknown:
        raise TargetError(f"unknown key {', '.join(unknown)}; valid keys: {', '.join(KEYS)}")
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise TargetError(f"missing key {', '.join(missing)}")
    if raw["schema"] != SCHEMA:
        raise TargetError(f"schema = {raw['schema']!r} is not known; valid: {SCHEMA}")
    root = (directory / _text(raw, "root")).resolve()
    if not directory.is_relative_to(root):
        raise TargetError(f"root = {raw.get('root')!r} must be this folder or one that contains it")
    devices = _texts(raw, "devices")
    for device in devices:
        if device not in DEVICES:
            raise TargetError(f"devices holds {device!r}; valid: {', '.join(DEVICES)}")
    return Target(
        root=root,
        directory=directory,
        name=_text(raw, "name"),
        serve=_serve(raw),
        editable=_globs(raw, "editable"),
        frozen=_globs(raw, "frozen"),
        devices=devices,
        tp=_sizes(raw),
        dtype=_dtype(raw, devices),
        start_timeout_s=_seconds(raw, "start_timeout_s"),
        small_cache=_texts(raw, "small_cache"),
    )


def _get(raw: dict[str, Any], key: str) -> Any:
    return raw.get(key, _DEFAULTS.get(key))


def _text(raw: dict[str, Any], key: str) -> str:
    value = _get(raw, key)
    if not isinstance(value, str) or not value.strip():
        raise TargetError(f"{key} must be a non-empty string")
    return value


def _texts(raw: dict[str, Any], key: str) -> tuple[str, ...]:
    value = _get(raw, key)
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise TargetError(f"{key} must be a list of strings")
    return tuple(value)


def _globs(raw: dict[str, Any], key: str) -> tuple[str, ...]:
    globs = _texts(raw, key)
    if key == "editable" and not globs:
        raise TargetError("editable must name at least one glob, or there is nothing to optimise")
    for glob in globs:
        if glob.startswith("/") or ".." in PurePosixPath(glob).parts:
            raise TargetError(f"{key} holds {glob!r}; globs are relative to root and stay inside it")
    return globs


def _serve(raw: dict[str, Any]) -> tuple[str, ...]:
    argv = _texts(raw, "serve")
    if not argv:
        raise TargetError("serve must hold the command that starts the engine")
    for arg in argv:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(arg) if name is not None]
        except ValueError as error:
            raise TargetError(f"serve: {arg!r}: {error}") from None
        for name in names:
            if name not in PLACEHOLDERS:
                raise TargetError(f"serve: unknown placeholder {{{name}}}; valid: {', '.join(PLACEHOLDERS)}")
    return argv


def _sizes(raw: dict[str, Any]) -> tuple[int, ...]:
    value = _get(raw, "tp")
    if not isinstance(value, list) or not value or not all(type(v) is int and v >= 1 for v in value):
        raise TargetError("tp must be a list of whole numbers from 1")
    return tuple(value)


def _dtype(raw: dict[str, Any], devices: tuple[str, ...]) -> dict[str, str]:
    value = _get(raw, "dtype")
    valid = ("float32", "bfloat16", "float16")
    if not isinstance(value, dict):
        raise TargetError("dtype must be a table: { cpu = \"float32\", cuda = \"bfloat16\" }")
    for device, dtype in value.items():
        if device not in DEVICES:
            raise TargetError(f"dtype holds {device!r}; valid: {', '.join(DEVICES)}")
        if dtype not in valid:
            raise TargetError(f"dtype.{device} = {dtype!r}; valid: {', '.join(valid)}")
    for device in devices:
        if device not in value:
            raise TargetError(f"dtype lacks {device}, which devices names")
    return dict(value)


def _seconds(raw: dict[str, Any], key: str) -> float:
    value = _get(raw, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise TargetError(f"{key} must be a number of seconds above 0")
    return float(value)


def render_serve(target: Target, **values: object) -> list[str]:
    """The argv that starts the engine, every placeholder filled in. Raises TargetError when a value is missing."""
    try:
        return [arg.format(**values) for arg in target.serve]
    except KeyError as error:
        raise TargetError(f"serve needs a value for {{{error.args[0]}}}") from None
