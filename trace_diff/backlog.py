"""How far the device lags behind the host: launches whose work is not finished, seen at the end of every launch call.

A graph launch counts as one. Near zero: the host sets the pace. Not for: how long anything takes (device).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff.ingest.trace import Trace
from trace_diff.links import links
from trace_diff.types import Step

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Launches:
    """Launch calls that have device rows in the file, in the order of their rows."""

    calls: Ints  # rows
    called: Ints  # end of each call, ns
    called_in_order: Ints  # the same, sorted
    done_in_order: Ints  # end of the last work of each, sorted


def queue(trace: Trace, step: Step) -> tuple[int, float] | None:
    """(most, mean) launches in the queue during a step; None without launches that have device rows in the file.

    Launches before the recording are not seen, so it is never negative.
    """
    found = _launches(trace)
    if len(found.calls) == 0:
        return None
    at = np.searchsorted(found.calls, step.rows)
    at = at[(at < len(found.calls)) & (found.calls[np.minimum(at, len(found.calls) - 1)] == step.rows)]
    if len(at) == 0:
        return None
    ends = found.called[at]
    begun, finished = (np.searchsorted(times, ends, side="right") for times in (found.called_in_order, found.done_in_order))
    waiting = begun - finished
    return int(waiting.max()), float(waiting.mean())


def _launches(trace: Trace) -> _Launches:
    """Launches of `trace`, computed once."""
    if "launches" not in trace.cache:
        events, tied = trace.events, links(trace)
        known = tied.launch >= 0
        calls, item = np.unique(tied.launch[known], return_inverse=True)
        called = events.ts_ns[calls] + events.dur_ns[calls]
        done = called.copy()  # work that a skewed clock finishes before its launch call ends is finished at once
        rows = tied.device_rows[known]
        np.maximum.at(done, item, events.ts_ns[rows] + events.dur_ns[rows])
        trace.cache["launches"] = _Launches(calls, called, np.sort(called), np.sort(done))
    return trace.cache["launches"]
