"""Begin and end events (ph B and E; nestable asynchronous b and e) to complete ones, as Chrome's format defines them.

Kineto writes complete events only; converters, custom spans and other tools write pairs. An end closes the last open
begin of its thread; an asynchronous one that of its category and id. Not for: the usual case, other phases (columns).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from msgspec import Raw

from trace_diff.ingest.decode import Event
from trace_diff.ingest.numbers import plain_id, to_ns
from trace_diff.ingest.schema import kind_of
from trace_diff.types import Kind

_ENDS = frozenset({"E", "e"})


class Paired(NamedTuple):
    """Complete events with the places of their text, and how many begins and ends were left over."""

    rows: list[Event]
    at: list[int]
    alone: int
    foreign: int  # asynchronous events of categories that are no work of host or device (requests, frames)


def pair(halves: list[tuple[Event, int]]) -> Paired:
    """Pair `halves` (events in the file's order, each with the place of its text) in order of time."""
    times = to_ns([e.ts for e, _ in halves])
    good = np.ones(len(halves), bool) if times.bad is None else ~times.bad
    order = np.argsort(times.values, kind="stable")
    open_: dict[Any, list[int]] = {}
    out = Paired([], [], 0, 0)
    alone, foreign = int((~good).sum()), 0
    for i in order[good[order]].tolist():
        event = halves[i][0]
        if event.ph in ("b", "e") and kind_of(event.cat) == Kind.OTHER:
            foreign += 1
            continue
        stack = open_.setdefault(_key(event), [])
        if event.ph not in _ENDS:
            stack.append(i)
        elif stack:
            begin = stack.pop()
            ns = int(times.values[i] - times.values[begin])
            out.rows.append(_complete(halves[begin][0], event, ns))
            out.at.append(halves[begin][1] if halves[begin][0].args is not None else halves[i][1])
        else:
            alone += 1
    return out._replace(alone=alone + sum(map(len, open_.values())), foreign=foreign)


def _key(event: Event) -> tuple[str, ...]:
    if event.ph in ("b", "e"):
        return ("async", str(event.cat), str(event.id), str(plain_id(event.pid)))
    return ("thread", str(plain_id(event.pid)), str(plain_id(event.tid)))


def _complete(begin: Event, end: Event, ns: int) -> Event:
    return Event(
        ph="X",
        cat=begin.cat,
        name=begin.name,
        pid=begin.pid,
        tid=begin.tid,
        ts=begin.ts,
        dur=Raw(f"{ns // 1000}.{ns % 1000:03d}".encode()),
        args=begin.args if begin.args is not None else end.args,
    )
