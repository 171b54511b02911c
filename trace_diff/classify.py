"""What a kernel, copy, host op or runtime call is, by the table in kernel_table. Unknown is an answer; guessing is not.

Not for: times, counts.
"""

from __future__ import annotations

import re
from functools import lru_cache

from trace_diff import kernel_table as table

UNKNOWN = "unknown"


class _Finder:
    """Searches a name for any alternative of a pattern.

    Most alternatives are plain text, which `in` finds many times faster than a regular expression does. Short ones must
    stand at the start of a word ("range_" is not in "strange_kernel"); the others are compiled one by one, so that each
    keeps its literal start.
    """

    def __init__(self, pattern: str) -> None:
        parts = _alternatives(pattern)
        plain = [p for p in parts if not _SPECIAL.search(p)]
        self._anywhere = tuple(p for p in plain if len(p.strip("_")) >= _LONG or p in table.ANYWHERE)
        self._words = tuple(p for p in plain if p not in self._anywhere)
        self._patterns = tuple((_needed(p), re.compile(p)) for p in parts if _SPECIAL.search(p))

    def search(self, text: str, name: str) -> bool:
        """`text` is `name` in lower case; capitals in `name` begin words."""
        for plain in self._anywhere:
            if plain in text:
                return True
        for plain in self._words:
            at = text.find(plain)
            while at >= 0:
                if at == 0 or not text[at - 1].isalpha() or name[at].isupper():
                    return True
                at = text.find(plain, at + 1)
        return any(need in text and pattern.search(text) for need, pattern in self._patterns)


_LONG = 7
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


def _alternatives(pattern: str) -> list[str]:
    """The top-level alternatives of a regular expression."""
    out, depth, start, skip = [], 0, 0, False
    for i, char in enumerate(pattern):
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "|" and depth == 0:
            out.append(pattern[start:i])
            start = i + 1
    return [*out, pattern[start:]]


def _needed(pattern: str) -> str:
    """The longest plain text that every match of `pattern` contains; may be empty."""
    runs, run, depth, i = [""], "", 0, 0
    while i < len(pattern):
        char = pattern[i]
        optional = pattern[i + 1 : i + 2] in ("?", "*", "{")
        plain = depth == 0 and not _SPECIAL.match(char) and not optional
        if plain:
            run += char
        else:
            runs.append(run)
            run = ""
        depth += (char in "([") - (char in ")]")
        i += 2 if char == "\\" else 1
    return max([*runs, run], key=len)


def _finders(rows: tuple[tuple[str, str], ...]) -> tuple[tuple[str, _Finder], ...]:
    return tuple((name, _Finder(pattern)) for name, pattern in rows)


_kernels = _finders(table.KERNELS)
_inductor = _finders(table.INDUCTOR)
_copies = _finders(table.COPIES)
_calls = _finders(table.CALLS)
_ops = tuple((name, re.compile(pattern)) for name, pattern in table.OPS)
_collectives = tuple((backend, operation, _Finder(pattern)) for backend, operation, pattern in table.COLLECTIVES)
_INDUCTOR_NAME = re.compile(r"triton_(poi|red|per|tem|for|spl)_fused(?:_(.*?))?(?:_\d+)?$")
_CPU_OP_COLLECTIVE = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|gather|scatter|send|recv|reduce)", re.I
)


@lru_cache(maxsize=1 << 16)
def kernel_class(name: str) -> str:
    """Class of a device row: gemm, gemv, attention, norm, ..., communication, d2h, h2d, d2d, memset, unknown."""
    text = name.lower()
    if text.startswith(("memcpy", "copydeviceto", "copyhostto", "hipmemcpy")):
        return copy_kind(name)
    if text.startswith("memset"):
        return "memset"
    if collective(name):
        return "communication"
    match = _INDUCTOR_NAME.match(text)
    if match:
        return _inductor_class(match.group(1), match.group(2) or "")
    for cls, pattern in _kernels:
        if pattern.search(text, name):
            return cls
    return UNKNOWN


def _inductor_class(template: str, ops: str) -> str:
    for cls, pattern in _inductor:
        if pattern.search(ops, ops):
            return cls
    words = {w for w in ops.split("_") if w and not w.isdigit()} - {"fused"}
    if words and words <= table.INDUCTOR_COPIES:
        return "copy"
    return table.INDUCTOR_TEMPLATES[template]


@lru_cache(maxsize=4096)
def copy_kind(name: str) -> str:
    """d2h, h2d, d2d, h2h of a copy row's name; "memcpy" where it does not say."""
    text = name.lower()
    for kind, pattern in _copies:
        if pattern.search(text, name):
            return kind
    return "memcpy"


@lru_cache(maxsize=1 << 14)
def collective(name: str) -> tuple[str, str] | None:
    """(backend, operation) of a device kernel that communicates, else None. RCCL kernels carry NCCL's names."""
    text = name.lower()
    for backend, operation, pattern in _collectives:
        if pattern.search(text, name):
            return backend, operation
    return None


@lru_cache(maxsize=1 << 14)
def host_collective(name: str) -> tuple[str, str] | None:
    """(backend, operation) of a host row that communicates (gloo:all_reduce, c10d::allreduce_, _C::shm_allreduce)."""
    if op_class(name) != "communication":
        return None
    head = name.split(":")[0].lower()
    if head in ("gloo", "nccl", "ucc", "mpi", "rccl"):
        backend = head
    elif "shm_" in name:
        backend = "shm"
    elif "symm_mem" in name:
        backend = "symm_mem"
    elif "_custom_ar" in name:
        backend = "custom"
    else:
        backend = "c10d"
    found = _CPU_OP_COLLECTIVE.search(name.replace("_base", ""))
    operation = found.group(1).lower() if found else "other"
    if "_" not in operation:
        for short, full in (("allreduce", "all_reduce"), ("allgather", "all_gather"), ("alltoall", "all_to_all"), ("reducescatter", "reduce_scatter")):
            operation = full if operation == short else operation
    return backend, operation


@lru_cache(maxsize=1 << 16)
def op_class(name: str) -> str:
    """Class of a host operator: gemm, attention, view, allocation, copy, autograd, communication, ..., unknown."""
    match = _INDUCTOR_NAME.match(name.lower())
    if match:
        return _inductor_class(match.group(1), match.group(2) or "")
    for cls, pattern in _ops:
        if pattern.match(name):
            return cls
    return UNKNOWN


@lru_cache(maxsize=4096)
def call_class(name: str) -> str:
    """Class of a runtime or driver call: launch, graph_launch, memcpy, memset, sync, malloc, free, query, ..., unknown."""
    text = name.lower()
    for cls, pattern in _calls:
        if pattern.search(text, name):
            return cls
    return UNKNOWN
