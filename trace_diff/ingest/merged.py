"""Several ranks merged into one file (SGLang's and others' mergers): keep them apart, and take them apart.

A merger puts a label before each process id ("[TP01] 4711") and leaves correlation ids as they were, so that ids of
different ranks collide. Not for: files of one rank.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_diff.ingest.trace import Trace
from trace_diff.types import Events

_LABELLED = re.compile(r"(.*\d.*?[\]:_|/ -])\s*(\d+)")
_RANK = re.compile(r"(?:rank|tp|r)[-_ ]?(\d+)", re.IGNORECASE)
_SHIFT = 48  # bits that a correlation id keeps to itself


def groups(tracks: list[tuple[Any, Any]]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """(group of each track, labels): more than one label only where process ids carry labels with numbers."""
    labels: dict[str, int] = {}
    found = []
    for pid, _ in tracks:
        match = _LABELLED.fullmatch(pid) if isinstance(pid, str) else None
        found.append(labels.setdefault(match.group(1), len(labels)) if match else -1)
    if len(labels) < 2:
        return np.zeros(len(tracks), np.int64), []
    return np.array(found, np.int64), list(labels)


def separate(ids: npt.NDArray[np.int64], group: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ids that are distinct between groups; ids that are none (-1) stay."""
    return np.where((ids >= 0) & (ids < 1 << _SHIFT), ids + (np.maximum(group, 0) << _SHIFT), ids)


def split(trace: Trace) -> list[Trace]:
    """One trace per label; the trace itself where it holds one rank."""
    of_track, labels = groups(trace.tracks)
    if not labels:
        return [trace]
    out = []
    for k, label in enumerate(labels):
        rank = _RANK.findall(label)
        out.append(
            replace(
                trace,
                rank=int(rank[-1]) if rank else k,
                world_size=max(trace.world_size or 0, len(labels)),
                events=_only(trace.events, of_track[trace.events.track] == k),
                quarantine=_only(trace.quarantine, of_track[trace.quarantine.track] == k),
                rank_known=True,
                cache={},
            )
        )
    return out


def _only(events: Events, mask: npt.NDArray[np.bool_]) -> Events:
    return Events(**{name: getattr(events, name)[mask] for name in Events.__dataclass_fields__})
