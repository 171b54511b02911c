"""Which calls of different ranks are one collective, and how far the ranks' clocks are apart. Not for: verdicts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from trace_diff.comm_rows import SYNCHRONISING, Call

_SHIFTS = 64  # calls that a rank's profile may have missed at either end
_OVERLAP = 0.5
_CLEARLY = 20_000  # nanoseconds
_SHARP = 10_000  # nanoseconds: ends that agree so well (device collectives) tell the smallest offset
_UNCOMPARABLE = 1_000_000_000  # clocks this far apart say nothing about order


@dataclass(frozen=True, slots=True)
class Group:
    """One collective on the ranks that recorded it."""

    calls: dict[int, Call]  # by rank
    how: str  # "seq": by group and sequence number, "order": by alignment of the sequences

    @property
    def first(self) -> Call:
        return next(iter(self.calls.values()))


def groups(by_rank: dict[int, list[Call]]) -> list[Group]:
    """Match the calls of all ranks. Calls with a sequence number match by it, the others by order.

    Order is aligned per backend, operation and process group against the rank with most calls, with the shift at
    which ends agree best (so that a profile which missed the first call still matches).
    """
    out: list[Group] = []
    keyed: dict[tuple, dict[int, Call]] = defaultdict(dict)
    loose: dict[int, list[Call]] = {}
    for rank, found in by_rank.items():
        rest = []
        for call in found:
            if call.seq is not None and call.group is not None:
                keyed[(call.group, call.seq, call.operation)][rank] = call
            else:
                rest.append(call)
        loose[rank] = rest
    out += [Group(calls, "seq") for calls in keyed.values()]
    for signature in sorted({c.signature for found in loose.values() for c in found}, key=str):
        streams = {r: [c for c in found if c.signature == signature] for r, found in loose.items()}
        out += _ordered({r: s for r, s in streams.items() if s})
    return sorted(out, key=lambda g: g.first.start)


def _ordered(streams: dict[int, list[Call]]) -> list[Group]:
    lead = max(streams, key=lambda r: (len(streams[r]), -r))
    rows: list[dict[int, Call]] = [{lead: c} for c in streams[lead]]
    for rank, found in streams.items():
        if rank == lead:
            continue
        for i, j in pairs(streams[lead], found):
            rows[i][rank] = found[j]
    return [Group(dict(sorted(r.items())), "order") for r in rows]


def pairs(lead: list[Call], other: list[Call]) -> list[tuple[int, int]]:
    """Indices (in `lead`, in `other`) of calls that are one collective.

    A steady loop fits itself at every shift of a period, so calls are matched in order unless another shift makes
    the ends agree clearly better, in spread and in distance (clocks of one host, or of synchronised hosts, differ by
    less than a step).
    """
    n, m = len(lead), len(other)
    a = np.array([c.end for c in lead], np.int64)
    b = np.array([c.end for c in other], np.int64)
    cost: dict[int, int] = {}
    for shift in range(-min(_SHIFTS, m - 1), min(_SHIFTS, n - 1) + 1):  # other[j] is lead[j + shift]
        lo, hi = max(0, shift), min(n, m + shift)
        if hi <= lo or hi - lo < _OVERLAP * min(n, m):
            continue
        delta = b[lo - shift : hi - shift] - a[lo:hi]
        middle = int(np.median(delta))
        cost[shift] = int(np.median(np.abs(delta - middle))) + min(abs(middle), _UNCOMPARABLE)
    best = min(cost, key=lambda s: (cost[s], abs(s)), default=0)
    plain = cost.get(0)
    if plain is not None and (cost[best] > 0.3 * plain or plain - cost[best] < _CLEARLY):
        best = 0
    return [(j + best, j) for j in range(m) if 0 <= j + best < n]


def offsets(found: list[Group], ranks: list[int]) -> dict[int, int]:
    """Clock of each rank minus clock of the first, in nanoseconds: median difference of the ends of synchronising
    collectives. 0 where ranks share none, and where ends that are not sharp scatter by more than half of it."""
    reference = ranks[0]
    out = {}
    for rank in ranks:
        ends = [
            g.calls[rank].end - g.calls[reference].end
            for g in found
            if rank in g.calls and reference in g.calls and g.first.operation in SYNCHRONISING
        ]
        out[rank] = _steady(np.array(ends, np.int64)) if ends and rank != reference else 0
    return out


def _steady(differences: np.ndarray) -> int:
    middle = int(np.median(differences))
    scatter = int(np.median(np.abs(differences - middle)))
    return middle if scatter < _SHARP or abs(middle) > 2 * scatter else 0
