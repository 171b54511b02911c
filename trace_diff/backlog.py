"""How far the device lags behind the host: launches whose work is not finished, seen at the end of every launch call.

A graph launch counts as one. Near zero: the host sets the pace. Not for: how long anything takes (device).
"""

from __future__ import annotations

import numpy as np

from trace_diff.ingest.trace import Trace
from trace_diff.links import links
from trace_diff.types import Step


def queue(trace: Trace, step: Step) -> tuple[int, float] | None:
    """(most, mean) launches in the queue during a step; None without launches that have device rows in the file.

    Launches before the recording are not seen, so it is never negative.
    """
    events, tied = trace.events, links(trace)
    known = tied.launch >= 0
    calls, item = np.unique(tied.launch[known], return_inverse=True)
    if len(calls) == 0:
        return None
    called = events.ts_ns[calls] + events.dur_ns[calls]
    done = called.copy()  # work that a skewed clock finishes before its launch call ends is finished at once
    rows = tied.device_rows[known]
    np.maximum.at(done, item, events.ts_ns[rows] + events.dur_ns[rows])
    mine = np.isin(calls, step.rows)
    at = called[mine]
    if len(at) == 0:
        return None
    waiting = np.searchsorted(np.sort(called), at, side="right") - np.searchsorted(np.sort(done), at, side="right")
    return int(waiting.max()), float(waiting.mean())
