"""Which launch each device row came from, and which launches are graph launches. Not for: steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff import classify
from trace_diff.ingest.schema import WORK_KINDS
from trace_diff.ingest.trace import Trace
from trace_diff.types import Kind

Ints = npt.NDArray[np.int64]
CALL_KINDS = (Kind.RUNTIME, Kind.DRIVER)


@dataclass(frozen=True, slots=True)
class Links:
    """Rows of device work, in order of start, with their launches."""

    device_rows: Ints
    launch: Ints  # per device row: row of the launch call, -1: none in the file
    op: Ints  # per device row: row of the CPU op by external id, where the launch is missing; -1: none
    in_graph: npt.NDArray[np.bool_]  # per device row: launched by a graph launch
    negative: int  # rows that start before their launch call does (clock skew); their latency counts as zero

    def launch_of(self, n: int) -> Ints:
        """The same by event row: array of n, -1 where there is no launch."""
        out = np.full(n, -1, np.int64)
        out[self.device_rows] = self.launch
        return out


def links(trace: Trace) -> Links:
    """Links of `trace`, computed once."""
    if "links" not in trace.cache:
        trace.cache["links"] = _links(trace)
    return trace.cache["links"]


def _links(trace: Trace) -> Links:
    events = trace.events
    device = trace.rows(*WORK_KINDS)
    calls = trace.rows(Kind.RUNTIME, Kind.DRIVER)
    calls = calls[events.correlation[calls] != -1]
    launch, many = _match(
        events.correlation[calls], events.ts_ns[calls], events.correlation[device], events.ts_ns[device], calls
    )
    if many:
        _by_device(trace, launch, many, device)
    ops = trace.rows(Kind.CPU_OP)
    ops = ops[events.external_id[ops] != -1]
    needy = np.flatnonzero(launch < 0)
    op = np.full(len(device), -1, np.int64)
    if len(needy) and len(ops):
        op[needy], _ = _match(
            events.external_id[ops],
            events.ts_ns[ops],
            events.external_id[device[needy]],
            events.ts_ns[device[needy]],
            ops,
        )
    graph = trace.flags("graph call", CALL_KINDS, lambda n: classify.call_class(n) == "graph_launch")
    in_graph = (launch >= 0) & graph[events.name[np.maximum(launch, 0)]] if len(events) else launch >= 0
    negative = int(((launch >= 0) & (events.ts_ns[device] < events.ts_ns[np.maximum(launch, 0)])).sum()) if len(device) else 0
    return Links(device, launch, op, in_graph, negative)


def _match(keys: Ints, times: Ints, wanted: Ints, when: Ints, rows: Ints) -> tuple[Ints, dict[int, Ints]]:
    """Row whose key is wanted; of several, the last that began before, else the first. -1: none (or key -1).

    Also returns, per index of `wanted` with several candidates, those candidates.
    """
    if len(keys) == 0:
        return np.full(len(wanted), -1, np.int64), {}
    order = np.lexsort((times, keys))
    keys, times = keys[order], times[order]
    left = np.searchsorted(keys, wanted, side="left")
    right = np.searchsorted(keys, wanted, side="right")
    found = np.where((right > left) & (wanted != -1), rows[order[np.minimum(left, len(keys) - 1)]], -1)
    many: dict[int, Ints] = {}
    for i in np.flatnonzero((right - left > 1) & (wanted != -1)).tolist():
        a, b = int(left[i]), int(right[i])
        k = int(np.searchsorted(times[a:b], when[i], side="right")) - 1
        found[i] = rows[order[a + max(k, 0)]]
        many[i] = rows[order[a:b]]
    return found, many


def _by_device(trace: Trace, launch: Ints, many: dict[int, Ints], device: Ints) -> None:
    """Where several processes use one correlation id (files merged without labels), choose the process whose other
    launches went to the row's device; in place."""
    events = trace.events
    pids = [pid for pid, _ in trace.tracks]
    homes: dict[int, Counter[int | str]] = {}
    sure = [i for i in np.flatnonzero(launch >= 0).tolist() if i not in many]
    for i in sure:
        homes.setdefault(int(events.device[device[i]]), Counter())[pids[events.track[launch[i]]]] += 1
    for i, rows in many.items():
        home = homes.get(int(events.device[device[i]]))
        if not home:
            continue
        mine = home.most_common(1)[0][0]
        own = [r for r in rows.tolist() if pids[events.track[r]] == mine]
        before = [r for r in own if events.ts_ns[r] <= events.ts_ns[device[i]]]
        if own:
            launch[i] = before[-1] if before else own[0]
