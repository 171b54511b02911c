"""The ledger: one canonical-JSON line per event, appended, fsynced and chained by hash.

`hash` is the sha256 of the line without `hash`; `prev` is the previous line's `hash`. The ledger is the only
source of a run's state (`state.py` replays it): what is not in it did not happen. Not for: deciding anything, or
bulk data (traces, patches and server logs are files that a line points to).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

VERSION = 1
FIRST = "0" * 64

KINDS = frozenset(
    (
        *("run_started", "resumed", "captured", "calibrated", "proposed", "gate", "pair", "screened", "decided"),
        *("confirmed", "accepted", "rejected", "undecided", "parked", "knowledge_proposed", "reviewed", "budget"),
        *("finished", "bands"),
    )
)
# What every line of a kind must say; more is welcome.
REQUIRED = {
    "proposed": frozenset(
        ("patch_sha", "ast_hash", "finding_ids", "mechanism", "predicted_us", "per", "proposer", "usd")
    ),
    "pair": frozenset(
        ("stage", "index", "order", "prompts_sha", "a_us_per_token", "b_us_per_token", "discarded")
    ),
    "rejected": frozenset(("stage", "reason", "detail")),
}

Line = dict[str, Any]


class LedgerBroken(Exception):
    """A line before the last one is unreadable, or the chain does not hold."""


class LedgerBusy(Exception):
    """Another process is writing this run's ledger."""


def canonical(value: Mapping[str, Any]) -> bytes:
    """The one byte form of a JSON object: sorted keys, no spaces, UTF-8, no NaN; what is not Unicode becomes '?'."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace")


def line_hash(line: Mapping[str, Any]) -> str:
    """sha256 of the canonical line without its own hash."""
    return hashlib.sha256(canonical({k: v for k, v in line.items() if k != "hash"})).hexdigest()


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class Context:
    """What every line carries besides its own data; the run keeps it up to date."""

    incumbent_commit: str | None = None
    gates_digest: str | None = None
    sandbox_level: str | None = None
    env_hash: str | None = None


@dataclass(slots=True)
class Ledger:
    """Reads a ledger without changing it; the first `append` drops a torn last line and takes the lock."""

    path: Path
    context: Context = field(default_factory=Context)
    now: Callable[[], str] = utc_now
    _lines: list[Line] = field(default_factory=list)
    _file: IO[bytes] | None = None

    def __post_init__(self) -> None:
        self._lines, _ = read(self.path)

    def lines(self) -> list[Line]:
        """Every whole line, oldest first."""
        return list(self._lines)

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return self._lines[-1]["hash"] if self._lines else FIRST

    def append(self, kind: str, attempt: int | None, data: Mapping[str, Any]) -> Line:
        """Write one line and wait until it is on disk.

        Raises ValueError on an unknown kind or missing fields, LedgerBusy when another process writes, OSError when
        the disk is full (nothing is kept of a line that did not reach the disk whole).
        """
        _check(kind, data)
        line: Line = {
            "v": VERSION,
            "seq": len(self._lines),
            "prev": self.head,
            "t_utc": self.now(),
            "kind": kind,
            "attempt": attempt,
            "incumbent_commit": self.context.incumbent_commit,
            "gates_digest": self.context.gates_digest,
            "sandbox_level": self.context.sandbox_level,
            "env_hash": self.context.env_hash,
            "data": dict(data),
        }
        # Round trip, so that what this process sees is what a later one reads (tuples become lists).
        line = json.loads(canonical(line))
        line["hash"] = line_hash(line)
        self._write(canonical(line) + b"\n")
        self._lines.append(line)
        return line

    def verify(self) -> list[str]:
        """Check the whole file again from disk. Returns notes (a torn last line); raises LedgerBroken."""
        _, torn = read(self.path)
        return [f"a torn last line of {torn} bytes is ignored"] if torn else []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        if self._file is None:
            handle = self.path.open("a+b")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.close()
                raise LedgerBusy(f"{self.path} is being written by another process") from None
            lines, torn = read(self.path)
            if [line["hash"] for line in lines] != [line["hash"] for line in self._lines]:
                handle.close()
                raise LedgerBusy(f"{self.path} was changed by another process")
            handle.truncate(self.path.stat().st_size - torn)
            self._file = handle
        return self._file

    def _write(self, raw: bytes) -> None:
        handle = self._open()
        size = os.fstat(handle.fileno()).st_size
        try:
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        except OSError:
            handle.truncate(size)
            raise


def _check(kind: str, data: Mapping[str, Any]) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown ledger kind {kind!r}; valid: {', '.join(sorted(KINDS))}")
    missing = REQUIRED.get(kind, frozenset()) - data.keys()
    if missing:
        raise ValueError(f"a {kind!r} line lacks {', '.join(sorted(missing))}")


def read(path: Path) -> tuple[list[Line], int]:
    """Whole lines of a ledger file and the number of bytes of a torn last line.

    A line is whole once its newline is on disk. Raises LedgerBroken at the first line that is unreadable, out of
    sequence, wrongly hashed or not chained to the one before.
    """
    if not path.exists():
        return [], 0
    *whole, torn = path.read_bytes().split(b"\n")
    lines: list[Line] = []
    prev = FIRST
    for seq, raw in enumerate(whole):
        try:
            line = json.loads(raw)
            right = (
                canonical(line) == raw
                and line["seq"] == seq
                and line["prev"] == prev
                and line["hash"] == line_hash(line)
            )
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerBroken(f"{path} line {seq + 1}: {error}") from error
        if not right:
            raise LedgerBroken(f"{path} line {seq + 1}: its hash, sequence or link to the line before is wrong")
        lines.append(line)
        prev = line["hash"]
    return lines, len(torn)
