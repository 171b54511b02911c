"""A loaded rank and a set of ranks. Not for: loading them, judging them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_diff.ingest.columns import CollectiveArgs
from trace_diff.ingest.numbers import LIMIT
from trace_diff.ingest.store import ArgStore
from trace_diff.types import Events, Kind, LoadNotes


def zero_ns(meta: dict[str, Any]) -> int:
    """The time that a file's own times count from (baseTimeNanoseconds); 0 where it gives none."""
    zero = meta.get("baseTimeNanoseconds")
    return zero if isinstance(zero, int) and not isinstance(zero, bool) and abs(zero) < LIMIT else 0


@dataclass(slots=True)
class Trace:
    """One rank's profile. Event times are nanoseconds after `base_ns` (absolute, where the file gives its base)."""

    path: str
    label: str
    rank: int
    world_size: int | None
    events: Events
    names: list[str]
    tracks: list[tuple[int | str, int | str]]  # (pid, tid)
    base_ns: int
    notes: LoadNotes
    meta: dict[str, Any]  # the file's top-level object without its events
    quarantine: Events  # rows kept out of every sum; same columns
    store: ArgStore
    collectives: dict[int, CollectiveArgs] = field(default_factory=dict)  # by Events.args_at
    rank_known: bool = True  # False: guessed (no distributedInfo, nothing in the file name)
    unknown: tuple[str, ...] = ()  # categories that no table knows; their rows are Kind.OTHER
    process_at: dict[int | str, int] = field(default_factory=dict)  # pid -> where its name stands
    cache: dict[str, Any] = field(default_factory=dict)  # results of analysis, by name

    def args(self, i: int) -> dict[str, Any]:
        """Arguments of event `i`, decoded now."""
        return self.store.get(int(self.events.args_at[i]))

    def process_name(self, pid: int | str) -> str | None:
        """Name of a process as the file gives it, decoded now."""
        at = self.process_at.get(pid)
        name = self.store.get(at).get("name") if at is not None else None
        return name if isinstance(name, str) else None

    def name(self, i: int) -> str:
        """Name of event `i`."""
        return self.names[int(self.events.name[i])]

    def device_names(self) -> list[str]:
        """Names of the devices that the file lists (deviceProperties), sorted; a virtual function is the same device."""
        listed = self.meta.get("deviceProperties")
        rows = [p for p in listed if isinstance(p, dict)] if isinstance(listed, list) else []
        return sorted({p["name"].removesuffix(" VF") for p in rows if isinstance(p.get("name"), str) and p["name"]})

    @property
    def strange_device(self) -> bool:
        """True where something launches work on a device whose rows this tool does not know."""
        launches = len(self.rows(Kind.RUNTIME, Kind.DRIVER)) > 0
        return bool(self.unknown) and launches and not len(self.rows(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET))

    def rows(self, *kinds: int) -> np.ndarray:
        """Indices of the events of these kinds, ascending (that is, by start)."""
        key = f"rows{kinds}"
        if key not in self.cache:
            wanted = np.zeros(256, bool)
            wanted[list(kinds)] = True
            self.cache[key] = np.flatnonzero(wanted[self.events.kind])
        return self.cache[key]

    def names_of(self, *kinds: int) -> list[int]:
        """Numbers of the names that rows of these kinds have."""
        key = f"names{kinds}"
        if key not in self.cache:
            used = np.zeros(len(self.names), bool)
            used[self.events.name[self.rows(*kinds)]] = True
            self.cache[key] = np.flatnonzero(used).tolist()
        return self.cache[key]

    def flags(self, key: str, kinds: tuple[int, ...], test: Callable[[str], bool]) -> np.ndarray:
        """One flag per name (and False behind them, for "no name"): `test` of the names that rows of `kinds` have.
        `key` names the test; results are kept."""
        key = f"flags {key}"
        if key not in self.cache:
            flags = np.zeros(len(self.names) + 1, bool)
            for i in self.names_of(*kinds):
                flags[i] = test(self.names[i])
            self.cache[key] = flags
        return self.cache[key]


@dataclass(slots=True)
class TraceSet:
    """The ranks of one run of one engine."""

    label: str
    traces: dict[int, Trace]  # by rank, ascending
    notes: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    duplicates: tuple[tuple[int, str], ...] = ()  # (rank, file left out)

    def __iter__(self):
        return iter(self.traces.values())

    def __len__(self) -> int:
        return len(self.traces)
