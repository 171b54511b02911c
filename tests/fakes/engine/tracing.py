"""A minimal Kineto trace of decode steps, built from the same constants that give the fake engine its speed."""

import gzip
import json
from pathlib import Path

from model import HOST_READS, STEP_US

READ_US = 50
LAYERS = 2


def _event(name, category, start, duration, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration, "args": args}


def _step(index, start):
    name = "execute_context_1(4)_generation_0(0)" if index == 0 else "execute_context_0(0)_generation_1(1)"
    rows = [_event(name, "user_annotation", start, STEP_US - 10)]
    each = (STEP_US - 100 - HOST_READS * READ_US) / (2 * LAYERS)
    at = start + 20
    for _ in range(LAYERS):
        rows.append(_event("aten::mm", "cpu_op", at, each, **{"Input Dims": [[1, 8], [8, 8]], "Input type": ["float", "float"]}))
        rows.append(_event("aten::silu", "cpu_op", at + each, each, **{"Input Dims": [[1, 8]], "Input type": ["float"]}))
        at += 2 * each
    for _ in range(HOST_READS):
        rows.append(_event("aten::item", "cpu_op", at, READ_US))
        at += READ_US
    return rows


def write(folder, rank, world_size, steps):
    """Write <folder>/rank<rank>.json.gz with `steps` steps and return its path."""
    events = [row for index in range(steps) for row in _step(index, 1000 + index * STEP_US)]
    trace = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 0,
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": rank, "world_size": world_size},
        "traceEvents": events,
    }
    path = Path(folder, f"rank{rank}.json.gz")
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
    return path
