"""Which steps are whole: empty, cut-off and under-recorded ones stay out of averages. Not for: finding steps (windows)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trace_diff import classify
from trace_diff.ingest.schema import WORK_KINDS, mask_of
from trace_diff.ingest.trace import Trace
from trace_diff.links import CALL_KINDS, Links
from trace_diff.types import Phase, Step

Ints = npt.NDArray[np.int64]
_NEARLY_ALL = 0.98
_CUT = 0.5  # of the launches, or the device rows, of the usual step of its phase
_MOST = 0.9  # of the largest step of its phase, in a file whose end is lost
_TWICE = (1.9, 2.1)  # times the device rows of the usual step: the work of two
_INCOMPLETE = {"empty", "under_recorded", "first", "last", "doubled"}


class _Seen(NamedTuple):
    """What was recorded of each step."""

    device: list[int]  # device rows
    calls: list[int]  # launch calls
    answered: list[int]  # of those, with device rows in the file
    unlinked: list[int]  # device rows whose launch is not in the file
    replays: list[tuple[int, ...]]  # device rows of each graph launch, in order


def flagged(trace: Trace, found: list[Step], empty: Sequence[bool], owner: Ints, tied: Links) -> list[Step]:
    """The steps with flags: "empty" (no work at all, or `empty` by its own word), "under_recorded" (launches without
    kernels, replays with fewer kernels than others of their graph), "first" and "last" (the recording began or ended
    inside), "doubled" (a first decode step that launches its own work and, ahead, that of the next). `owner`: step of
    every row."""
    seen = _look(trace, found, owner, tied)
    has_device = len(tied.device_rows) > 0
    usual_calls = _median_by_phase(found, seen.calls)
    usual_device = _median_by_phase(found, seen.device)
    usual_replays = _largest_replays(found, seen.replays)
    torn = _torn(trace, found, seen, usual_device)
    out = []
    for k, step in enumerate(found):
        flags = list(step.flags)
        if empty[k] or (has_device and seen.device[k] == 0):
            flags.append("empty")
        unanswered = seen.answered[k] < _NEARLY_ALL * seen.calls[k] and not trace.strange_device
        most = usual_replays[step.phase, len(seen.replays[k])]
        if torn[k] or (unanswered and not empty[k]) or any(n < _NEARLY_ALL * m for n, m in zip(seen.replays[k], most, strict=True)):
            flags.append("under_recorded")
        cut = seen.calls[k] < _CUT * usual_calls.get(step.phase, 0)
        if k == 0 and cut:
            flags.append("first")
        if k == len(found) - 1 and (cut or trace.notes.events_cut):
            flags.append("last")
        begins = k == 0 or found[k - 1].phase is not step.phase
        if begins and step.phase is Phase.DECODE and _twice(seen.device[k], usual_device) and _twice(seen.calls[k], usual_calls):
            flags.append("doubled")
        out.append(replace(step, flags=tuple(flags), complete=not _INCOMPLETE & set(flags)))
    return out


def _twice(n: int, usual: dict[Phase, int]) -> bool:
    most = usual.get(Phase.DECODE, 0)
    return most > 0 and _TWICE[0] * most <= n <= _TWICE[1] * most


def _torn(trace: Trace, found: list[Step], seen: _Seen, usual_device: dict[Phase, int]) -> list[bool]:
    """Steps that miss launches or device rows which others of their phase have.

    Profilers write events grouped by kind, so a file that ends early has lost some of every step: the host's rows may
    all be there and the device's not.
    """
    if not trace.notes.events_cut:
        usual = [_CUT * usual_device.get(s.phase, 0) if s.phase is Phase.DECODE else 0 for s in found]
        return [n < least for n, least in zip(seen.device, usual, strict=True)]
    properties = trace.meta.get("deviceProperties")
    if not any(seen.device) and isinstance(properties, list) and properties:
        return [True] * len(found)
    most: dict[Phase, list[int]] = defaultdict(lambda: [0, 0])
    for step, counts in zip(found, zip(seen.device, seen.calls, strict=True), strict=True):
        most[step.phase] = [max(pair) for pair in zip(most[step.phase], counts, strict=True)]
    out = []
    for step, rows, calls, loose in zip(found, seen.device, seen.calls, seen.unlinked, strict=True):
        few = rows < _MOST * most[step.phase][0] or calls < _MOST * most[step.phase][1]
        out.append(few or (any(seen.calls) and loose > (1 - _MOST) * rows))
    return out


def _look(trace: Trace, found: list[Step], owner: Ints, tied: Links) -> _Seen:
    events, count = trace.events, len(found)
    is_graph = trace.flags("graph call", CALL_KINDS, lambda n: classify.call_class(n) == "graph_launch")
    is_launch = trace.flags("any launch", CALL_KINDS, lambda n: classify.call_class(n) in ("launch", "graph_launch"))
    kernels = np.zeros(len(events), np.int64)  # device rows of each launch call
    np.add.at(kernels, tied.launch[tied.launch >= 0], 1)
    calls = trace.rows(*CALL_KINDS)
    calls = calls[is_launch[events.name[calls]] & (owner[calls] >= 0)]
    replays: list[list[int]] = [[] for _ in range(count)]
    for row in calls[is_graph[events.name[calls]]].tolist():
        replays[int(owner[row])].append(int(kernels[row]))
    work, launch_of = mask_of(WORK_KINDS), tied.launch_of(len(events))
    return _Seen(
        device=[int(work[events.kind[step.rows]].sum()) for step in found],
        calls=np.bincount(owner[calls], minlength=count).tolist(),
        answered=np.bincount(owner[calls[kernels[calls] > 0]], minlength=count).tolist(),
        unlinked=[int((launch_of[step.rows[work[events.kind[step.rows]]]] < 0).sum()) for step in found],
        replays=[tuple(r) for r in replays],
    )


def _median_by_phase(found: list[Step], calls: list[int]) -> dict[Phase, int]:
    """Usual number of launches per phase that has at least three steps."""
    by_phase: dict[Phase, list[int]] = defaultdict(list)
    for step, n in zip(found, calls, strict=True):
        by_phase[step.phase].append(n)
    return {phase: sorted(ns)[len(ns) // 2] for phase, ns in by_phase.items() if len(ns) >= 3}


def _largest_replays(found: list[Step], replays: list[tuple[int, ...]]) -> dict[tuple[Phase, int], tuple[int, ...]]:
    """Per phase and number of graph launches: the most kernels that each launch ever had."""
    largest: dict[tuple[Phase, int], tuple[int, ...]] = {}
    for step, own in zip(found, replays, strict=True):
        key = step.phase, len(own)
        largest[key] = tuple(map(max, largest.get(key, own), own))
    return largest
