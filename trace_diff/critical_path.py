"""The critical path of one step, as Holistic Trace Analysis (the extra `hta`) finds it, where it works.

It is a second opinion for steps that launch kernel by kernel. It does not know graphs (their kernels are not on its
path: hours of device work would read as one delay), nor traces without device work; it counts whole microseconds. So it
is asked only where it can answer, gets the events of that one step, and its path must be about as long as the step.
Not for: the account (attribute), savings (findings).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trace_diff import cut
from trace_diff.ingest.trace import Trace, zero_ns
from trace_diff.links import links
from trace_diff.types import Step
from trace_diff.windows import marks, steps

if TYPE_CHECKING:
    import pandas as pd

_MARK = "hotloop critical path"
_NEAR = (0.5, 1.5)  # length of a path over the step's time on the host and device that is believed
TIMEOUT_S = 300


class NoCriticalPath(RuntimeError):
    """HTA is not installed or cannot answer for this step; the message says which."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """`bound_by`: microseconds by what binds the path; `rows`: by name too, dearest first (name, bound_by, us, count)."""

    step: str
    index: int
    window_us: float  # from the step's begin on the host to the end of its last device row
    length_us: float
    bound_by: dict[str, float]
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def frame(self) -> pd.DataFrame:
        """One row per name: name, bound_by, us, count."""
        import pandas as pd  # half a second: only for those who ask for a frame

        return pd.DataFrame(list(self.rows), columns=pd.Index(["name", "bound_by", "us", "count"]))


def critical_path(trace: Trace, step: Step) -> CriticalPath:
    """HTA's critical path of one step. Raises NoCriticalPath; CutError where the file is damaged."""
    if importlib.util.find_spec("hta") is None:
        raise NoCriticalPath("Holistic Trace Analysis is not installed: pip install 'hotloop[hta]'")
    events, tied, mark = trace.events, links(trace), marks(trace)[step.index]
    called = np.where(tied.launch >= 0, events.ts_ns[np.maximum(tied.launch, 0)], -1)
    inside = (called >= mark.start) & (called < mark.end)
    device = tied.device_rows[inside]
    if len(device) == 0:
        raise NoCriticalPath(f"step {step.index} launches no device work: HTA has no path through it")
    if tied.in_graph[inside].any():
        raise NoCriticalPath(f"step {step.index} replays a graph: its kernels are not on HTA's path (HTA issue 290)")
    end = max(mark.end, int((events.ts_ns[device] + events.dur_ns[device]).max()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        _write(trace, mark.start, mark.end, path)
        rows = _ask(path)
    return _believed(step, (end - mark.start) / 1000, rows)


def pick(trace: Trace, phase: str, index: int | None = None) -> Step:
    """The step of that number, else the one of median wall among the complete ones of the phase. Raises NoCriticalPath."""
    every = steps(trace)
    if index is not None:
        if not 0 <= index < len(every):
            raise NoCriticalPath(f"no step {index}: the trace has {len(every)} steps, numbered from 0")
        return every[index]
    good = sorted((s for s in every if s.complete and str(s.phase) == phase), key=lambda s: s.wall_ns)
    if not good:
        raise NoCriticalPath(f"no complete {phase} step")
    return good[len(good) // 2]


def _write(trace: Trace, start: int, end: int, out: Path) -> None:
    """The step's events alone, under one annotation that no other event has."""
    top, rows = cut.read(Path(trace.path))
    shift = trace.base_ns - zero_ns(trace.meta)
    kept = cut.keep(rows, start + shift, end + shift)
    pid, tid = trace.tracks[marks(trace)[0].track]
    at, dur = start + shift, end - start
    mark = {"ph": "X", "cat": "user_annotation", "name": _MARK, "pid": pid, "tid": tid, "ts": at / 1000, "dur": dur / 1000}
    head = {k: v for k, v in top.items() if k != "traceEvents"}
    out.write_bytes(msgspec.json.encode(head | {"traceEvents": [*kept, msgspec.Raw(msgspec.json.encode(mark))]}))


def _ask(path: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "trace_diff.hta_worker", str(path), _MARK]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise NoCriticalPath(f"HTA took longer than {TIMEOUT_S} s") from None
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    said = done.stderr.strip().splitlines()
    raise NoCriticalPath(f"HTA cannot answer for this step: {said[-1][:200] if said else 'no answer'}")


def _believed(step: Step, window_us: float, rows: list[dict[str, Any]]) -> CriticalPath:
    length = sum(r["us"] for r in rows)
    if not _NEAR[0] * window_us <= length <= _NEAR[1] * window_us:
        raise NoCriticalPath(
            f"HTA's path through step {step.index} is {length:.0f} us long, the step {window_us:.0f} us: not believed"
        )
    bound: dict[str, float] = {}
    for row in rows:
        bound[row["bound_by"]] = bound.get(row["bound_by"], 0.0) + row["us"]
    ranked = tuple(sorted(rows, key=lambda r: -r["us"]))
    return CriticalPath(step.name, step.index, window_us, length, dict(sorted(bound.items(), key=lambda kv: -kv[1])), ranked)
