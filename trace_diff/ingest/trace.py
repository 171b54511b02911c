"""A loaded rank and a set of ranks. Not for: loading them, judging them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_diff.ingest.store import ArgStore
from trace_diff.types import Events, LoadNotes


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
    rank_known: bool = True  # False: guessed (no distributedInfo, nothing in the file name)
    process_names: dict[int | str, str] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)  # results of analysis, by name

    def args(self, i: int) -> dict[str, Any]:
        """Arguments of event `i`, decoded now."""
        return self.store.get(int(self.events.args_at[i]))

    def name(self, i: int) -> str:
        """Name of event `i`."""
        return self.names[int(self.events.name[i])]

    def rows(self, *kinds: int) -> np.ndarray:
        """Indices of the events of these kinds, ascending (that is, by start)."""
        key = f"rows{kinds}"
        if key not in self.cache:
            self.cache[key] = np.flatnonzero(np.isin(self.events.kind, kinds))
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
