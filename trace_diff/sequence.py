"""One engine's typical step as a sequence of work: what ran, in which order, how long, with what in between.

On a GPU trace an item is a kernel, copy or set; on a CPU-only trace it is an outermost meaningful operator of
the step's thread or a collective that another thread ran for it, and the time between two items is host time
outside operators (Python). The sequence is that of the most common
order among the given steps, its times are means over the steps with exactly that order. Not for: categories
and idle causes (attribute), finding layers (layers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_diff import classify, device, hosttree
from trace_diff.ingest import Trace
from trace_diff.types import Kind, Step

DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
# Operators that only wrap others: what they call is what counts.
_WRAPPERS = ("Torch-Compiled Region", "## Call CompiledFxGraph", "CompiledFunction", "autograd::", "nn.Module")


@dataclass(frozen=True, slots=True)
class Sequence:
    """Items of the typical step, in order of their start; all tuples and arrays have one length."""

    device: str  # "gpu" or "cpu"
    names: tuple[str, ...]
    classes: tuple[str, ...]  # kernel_class or op_class of each name
    rows: npt.NDArray[np.int64]  # indices into Trace.events, of the representative step
    dur_ns: npt.NDArray[np.float64]  # mean duration; on a GPU without the wait for what is in front on the stream
    gap_ns: npt.NDArray[np.float64]  # mean time from the end of everything before it to its start
    streams: npt.NDArray[np.int64]  # -1 on a CPU
    step: int  # index (Step.index) of the representative step
    used: int  # steps with exactly this order
    total: int  # steps looked at
    total_ns: float  # mean item time per step over all steps, whatever their order

    def __len__(self) -> int:
        return len(self.names)

    @property
    def share(self) -> float:
        """Mean item time of this sequence over that of all steps: 1.0 when it speaks for all of them."""
        return float(self.dur_ns.sum()) / self.total_ns if self.total_ns else 0.0


def extract(trace: Trace, steps: Seq[Step]) -> Sequence | None:
    """The typical sequence of these steps; None when they hold no work at all."""
    gpu = any(_device_rows(trace, s).size for s in steps)
    per_step = [_device_rows(trace, s) if gpu else operator_rows(trace, s) for s in steps]
    if not any(r.size for r in per_step):
        return None
    e = trace.events
    keys = [e.name[rows].tobytes() for rows in per_step]
    key = Counter(k for k in keys if k).most_common(1)[0][0]
    chosen = [i for i, k in enumerate(keys) if k == key]
    spent = [device.alone_ns(trace, rows) if gpu else e.dur_ns[rows] for rows in per_step]
    stack = np.stack([spent[i] for i in chosen]).astype(np.float64)
    gaps = np.stack([_gaps(trace, steps[i], per_step[i]) for i in chosen])
    walls = [steps[i].wall_ns for i in chosen]
    middle = chosen[int(np.argsort(walls)[len(chosen) // 2])]
    rows = per_step[middle]
    names = tuple(trace.names[i] for i in e.name[rows].tolist())
    class_of = classify.kernel_class if gpu else classify.op_class
    cache = {n: class_of(n) for n in set(names)}
    return Sequence(
        device="gpu" if gpu else "cpu",
        names=names,
        classes=tuple(cache[n] for n in names),
        rows=rows,
        dur_ns=stack.mean(axis=0),
        gap_ns=gaps.mean(axis=0),
        streams=e.stream[rows].astype(np.int64),
        step=steps[middle].index,
        used=len(chosen),
        total=len(steps),
        total_ns=float(np.mean([ns.sum() for ns in spent])),
    )


def operator_rows(trace: Trace, step: Step) -> npt.NDArray[np.int64]:
    """Outermost operators of the step's thread, wrappers replaced by what they call, and its collectives.

    A collective that a helper thread runs (gloo) is an item; the operator that only started it is not.
    """
    tree = hosttree.build(trace, step, (Kind.CPU_OP,))
    children = tree.children()
    names, e = trace.names, trace.events
    out: list[int] = []
    todo = list(reversed(tree.outermost()))
    while todo:
        i = todo.pop()
        row = int(tree.rows[i])
        if children[i] and _is_wrapper(names[e.name[row]]):
            todo.extend(reversed(children[i]))
        else:
            out.append(row)
    elsewhere = _collective_spans(trace, step, tree.track)
    if len(elsewhere):
        out = [r for r in out if not names[e.name[r]].startswith("c10d::")]
        out = sorted([*out, *elsewhere], key=lambda r: int(e.ts_ns[r]))
    return np.asarray(out, dtype=np.int64)


def _collective_spans(trace: Trace, step: Step, track: int) -> list[int]:
    e = trace.events
    rows = step.rows[(e.kind[step.rows] == Kind.ANNOTATION) & (e.track[step.rows] != track)]
    return [r for r in rows.tolist() if classify.host_collective(trace.names[e.name[r]])]


def _is_wrapper(name: str) -> bool:
    return name.startswith(_WRAPPERS)


def _device_rows(trace: Trace, step: Step) -> npt.NDArray[np.int64]:
    e = trace.events
    rows = step.rows[np.isin(e.kind[step.rows], DEVICE_KINDS)]
    return rows[np.argsort(e.ts_ns[rows], kind="stable")]


def _gaps(trace: Trace, step: Step, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    e = trace.events
    start = e.ts_ns[rows].astype(np.float64)
    end = np.maximum.accumulate(e.ts_ns[rows] + e.dur_ns[rows]).astype(np.float64)
    before = np.concatenate(([float(min(step.start_ns, start[0]))], end[:-1]))
    return np.maximum(start - before, 0.0)
