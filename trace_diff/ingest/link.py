"""Correlation ids for device rows that carry none, from the launch flows (ac2g arrows). Not for: the usual case."""

from __future__ import annotations

from typing import Any

import numpy as np

from trace_diff.ingest.decode import decode_flows
from trace_diff.ingest.notes import NoteBook
from trace_diff.ingest.numbers import plain_id, to_ns
from trace_diff.ingest.quarantine import Rows
from trace_diff.ingest.schema import LAUNCH_FLOWS, WORK_KINDS
from trace_diff.ingest.store import ArgStore
from trace_diff.types import Kind

_ARROWS = ("s", "f")
_FRESH = 1 << 61  # made-up ids start here, above any that a profiler writes


def fill_from_flows(
    correlation: np.ndarray,
    rows: Rows,
    track: np.ndarray,
    tracks: list[tuple[Any, Any]],
    store: ArgStore,
    notes: NoteBook,
) -> None:
    """Give each uncorrelated device row the id of the launch that a flow ties it to; in place."""
    number = {pair: i for i, pair in enumerate(tracks)}
    starts, finishes = _flows(store, number)
    needy = np.flatnonzero(np.isin(rows.kind, WORK_KINDS) & (correlation == -1))
    at_row = {(int(track[i]), int(rows.ts[i])): i for i in needy.tolist()}
    launches = np.flatnonzero((rows.kind == Kind.RUNTIME) | (rows.kind == Kind.DRIVER))
    at_launch = {(int(track[i]), int(rows.ts[i])): i for i in launches.tolist()}
    done = 0
    for key, place in finishes.items():
        row = at_row.get(place)
        origin = starts.get(key)
        launch = at_launch.get(origin) if origin is not None else None
        if row is None or launch is None:
            continue
        if correlation[launch] == -1:
            correlation[launch] = _FRESH + launch
        correlation[row] = correlation[launch]
        done += 1
    if done:
        notes.say(f"{done} device rows without a correlation id were tied to their launch by flow arrows")


def _flows(store: ArgStore, number: dict[tuple[Any, Any], int]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(id -> where it starts), (id -> where it ends); a place is (track, ns)."""
    starts: dict[Any, tuple[int, int]] = {}
    finishes: dict[Any, tuple[int, int]] = {}
    for text in store.blocks():
        found = [e for e in decode_flows(text) if e.ph in _ARROWS and str(e.cat) in LAUNCH_FLOWS]
        times = to_ns([e.ts for e in found]).values
        for event, ns in zip(found, times.tolist(), strict=True):
            track = number.get((plain_id(event.pid), plain_id(event.tid)))
            if track is not None and event.id is not None:
                (starts if event.ph == "s" else finishes)[str(event.id)] = (track, ns)
    return starts, finishes
