"""Code that an engine compiles while it runs: made once for a program, then every launch gets a copy of its own.

The folder is filled by a launch that nobody judges and that answers public requests only. It starts from what the program
that was changed had compiled so, for most of it is in both. A judged launch can thus neither learn from the folder that
another one was before it, nor leave anything for the next. Not for: starting engines (`launch.py`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.confine import procfs
from optimizer.traffic.client import ClientError, Request
from optimizer.types import LaunchSpec

FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
# (requests at once, prompt tokens, new tokens): kernels differ by the number of rows
SHAPES = ((1, 128, 20), (4, 33, 8), (8, 16, 6), (32, 16, 6), (1, 1024, 3))
DEADLINE_S = 120.0
MOST_BYTES, MOST_FILES = 1 << 30, 20_000
Unjudged = Callable[[LaunchSpec, Path], AbstractContextManager[Any]]
_locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def fill(spec: LaunchSpec, folder: Path, unjudged: Unjudged) -> None:
    """Copy what this program compiled to `folder`; the first time it is compiled now.

    `unjudged(spec, keep)` starts an engine with the compiled code in the folder `keep`, where its own is once it is closed. One that fails
    leaves an empty folder: the launch that is judged fails by itself.
    """
    copy(made(spec, unjudged), folder)


def made(spec: LaunchSpec, unjudged: Unjudged) -> Path:
    """The folder of this program's compiled code; the first time it is compiled now."""
    assert spec.compiled is not None
    with _locks[spec.compiled]:
        if not spec.compiled.is_dir():
            _compile(spec, spec.compiled, unjudged)
    return spec.compiled


def _compile(spec: LaunchSpec, place: Path, unjudged: Unjudged) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix="part-", dir=place.parent))
    if spec.compiled_before is not None and spec.compiled_before.is_dir():
        copy(spec.compiled_before, part)
    bare = replace(spec, compiled=None, compiled_before=None, probes=frozenset(), env=(), label=f"{spec.label} (compiling)")
    try:
        with unjudged(bare, part) as server:
            for at_once, prompt, new in SHAPES:  # one that is too long for this engine is refused, which does no harm
                server.client.complete([Request(tuple(3 + (i + n) % 200 for i in range(prompt)), new) for n in range(at_once)], DEADLINE_S)
    except (RuntimeError, ClientError, OSError):  # LaunchError is a RuntimeError
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    part.replace(place)


def copy(source: Path, target: Path) -> None:
    """Regular files alone: whoever wrote them could have put a link to anything. What is over the limits is left out."""
    left, files = MOST_BYTES, MOST_FILES
    for folder, names, entries in os.walk(source, followlinks=False):
        to = target / Path(folder).relative_to(source)
        try:
            to.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:  # a name that is too long here
            names.clear()
            continue
        for name in entries:
            data = procfs.read_result(Path(folder), name, left) if files > 0 else None
            if data is not None:
                (to / name).write_bytes(data)
                left, files = left - len(data), files - 1

