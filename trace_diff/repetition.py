"""Steps of a trace without annotations, from what repeats: graph launches, the sequence of kernels, host operators.

Not for: annotated traces.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trace_diff import classify, grammar
from trace_diff.ingest.trace import Trace
from trace_diff.links import links
from trace_diff.nesting import nesting
from trace_diff.types import Kind, Phase

if TYPE_CHECKING:
    from trace_diff.windows import Mark

Ints = npt.NDArray[np.int64]
_ENOUGH = 3  # repeats before a repetition is one
_ALIKE = 0.9  # share of the sequence that must equal itself one period later


def marks(trace: Trace) -> list[Mark]:
    """Inferred steps, or none."""
    for sequence in (_device_calls, _host_ops):
        rows, end = sequence(trace)
        found = _periods(trace, rows, end)
        if found:
            return found
    return []


def _device_calls(trace: Trace) -> tuple[Ints, Ints]:
    """Device rows in order of launch, as (rows that name them, host row where they begin)."""
    tied = links(trace)
    keep = tied.launch >= 0
    rows, calls = tied.device_rows[keep], tied.launch[keep]
    if len(rows) == 0:
        return tied.device_rows, tied.device_rows
    order = np.lexsort((rows, calls))
    return rows[order], calls[order]


def _host_ops(trace: Trace) -> tuple[Ints, Ints]:
    """Outermost host operators of the busiest thread."""
    tree = nesting(trace)
    ops = trace.rows(Kind.CPU_OP)
    up = tree.parent[ops]
    ops = ops[(up < 0) | (trace.events.kind[np.maximum(up, 0)] != Kind.CPU_OP)]
    if len(ops) == 0:
        return ops, ops
    track = Counter(trace.events.track[ops].tolist()).most_common(1)[0][0]
    ops = ops[trace.events.track[ops] == track]
    return ops, ops


def _periods(trace: Trace, rows: Ints, calls: Ints) -> list[Mark]:
    from trace_diff.windows import Mark

    if len(rows) < 2 * _ENOUGH:
        return []
    names = trace.events.name[rows]
    period = find_period(names)
    if period is None:
        cuts = find_bursts(names, trace.events.ts_ns[calls])
        period = cuts[1] - cuts[0] if len(cuts) > 1 else 0
    else:
        cuts = [i for i in _boundary(trace, names, calls, period) if i >= 0]
    if not cuts:
        return []
    begins = trace.events.ts_ns[calls[cuts]]
    ends = trace.events.ts_ns[calls] + trace.events.dur_ns[calls]
    phase = Phase.DECODE if _generates(trace, names[cuts[0] :]) else Phase.UNKNOWN
    out = []
    for k, a in enumerate(cuts):
        b = cuts[k + 1] if k + 1 < len(cuts) else min(a + period, len(rows))
        usual = b - a == period
        first = Phase.PREFILL if phase is Phase.DECODE else phase
        said = grammar.StepName(phase if usual or k else first, None, None, 0)
        out.append(Mark(f"inferred step {k}", int(begins[k]), int(ends[a:b].max()), said, int(trace.events.track[calls[a]]), inferred=True))
    return out


def find_period(names: npt.NDArray[np.int32]) -> int | None:
    """Length of the longest repetition of `names`: the shift at which the sequence best equals itself.

    Layers repeat inside steps; a step's period is the one that also repeats what happens once per step, so among
    shifts that fit equally well up to 2 % the shortest wins, and a layer's period fits worse. None: nothing repeats
    at least three times.
    """
    n = len(names)
    candidates: Counter[int] = Counter()
    for name, count in Counter(names.tolist()).items():
        if count < _ENOUGH:
            continue
        where = np.flatnonzero(names == name)
        if count > n // 2:
            continue
        shifts, times = np.unique(np.diff(where), return_counts=True)
        best = int(shifts[times.argmax()])
        if times.max() >= 0.6 * len(where[1:]) and best * _ENOUGH <= n:
            candidates[best] += 1
    if not candidates:
        return None
    scored = [(float((names[p:] == names[:-p]).mean()), p) for p, _ in candidates.most_common(64)]
    best_score = max(s for s, _ in scored)
    if best_score < _ALIKE:
        return None
    return min(p for s, p in scored if s >= best_score - 0.005)


def find_bursts(names: npt.NDArray[np.int32], begin: Ints) -> list[int]:
    """Where bursts of one and the same sequence begin, told apart by pauses only (over twice the usual distance of
    two launches); empty unless at least three bursts, four in five of them, are equal and of two launches or more."""
    pause = np.diff(begin)
    if len(pause) == 0:
        return []
    cuts = [0, *(np.flatnonzero(pause > 2 * np.median(pause)) + 1).tolist()]
    bursts = Counter(tuple(names[a:b].tolist()) for a, b in itertools.pairwise([*cuts, len(names)]))
    usual, times = bursts.most_common(1)[0]
    return cuts if times >= _ENOUGH and len(usual) > 1 and times >= 0.8 * len(cuts) else []


def _boundary(trace: Trace, names: npt.NDArray[np.int32], calls: Ints, period: int) -> list[int]:
    """Indices where steps begin: at the place of the period before which the host pauses longest."""
    n = len(names)
    alike = np.flatnonzero(names[period:] == names[:-period])
    if len(alike) == 0:
        return []
    begin = trace.events.ts_ns[calls]
    pause = np.append(0, np.diff(begin))
    start = int(alike[np.flatnonzero(np.diff(np.append(alike, n)) == 1)[0]]) if (np.diff(alike) == 1).any() else int(alike[0])
    phase_of = (np.arange(n) - start) % period
    usable = np.arange(n) >= start
    usable &= np.arange(n) < start + ((n - start) // period) * period
    typical = np.array([np.median(pause[usable & (phase_of == k)]) for k in _rare_places(names, phase_of, usable, period)])
    places = _rare_places(names, phase_of, usable, period)
    if len(places) == 0:
        return []
    place = int(places[int(typical.argmax())])
    anchor = Counter(names[usable & (phase_of == place)].tolist()).most_common(1)[0][0]
    regular = list(range(start + place, n, period))
    if regular and regular[0] - period >= 0 and names[regular[0] - period] == anchor:
        regular.insert(0, regular[0] - period)
    if regular and regular[0] > 0:
        earlier = np.flatnonzero(names[: regular[0]] == anchor)
        regular = ([int(earlier[0])] if len(earlier) else [0]) + regular
    return sorted(set(regular))


def _rare_places(names: npt.NDArray[np.int32], phase_of: Ints, usable: npt.NDArray[np.bool_], period: int) -> Ints:
    """Places of the period whose name occurs once per period; all places where there is none."""
    first = np.flatnonzero(usable)[:period]
    counts = Counter(names[first].tolist())
    once = [int(phase_of[i]) for i in first.tolist() if counts[int(names[i])] == 1]
    return np.array(sorted(once) if once else list(range(min(period, len(first)))), np.int64)


def _generates(trace: Trace, names: npt.NDArray[np.int32]) -> bool:
    """Repeated steps are taken for decoding where there are matrix products and nothing of training."""
    used = [trace.names[i] for i in np.unique(names).tolist()]
    if any(classify.op_class(n) in ("optimizer", "autograd") or "backward" in n.lower() for n in trace.names):
        return False
    return any({classify.kernel_class(n), classify.op_class(n)} & {"gemm", "gemv", "attention"} for n in used)
