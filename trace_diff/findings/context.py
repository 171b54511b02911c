"""Everything a rule may look at, computed once: the averaged steps' host rows by name, replay, references.

Not for: rules themselves, savings that overlap (ledger).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trace_diff import groups, hosttree, syncs, whatif
from trace_diff.analysis import Analysis
from trace_diff.comparable import compare_cells
from trace_diff.groups import GroupRow
from trace_diff.hosttree import HostTree
from trace_diff.ingest import Trace
from trace_diff.types import Breakdown, Kind, Step
from trace_diff.windows import marks


@dataclass(frozen=True, slots=True)
class NameUse:
    """Host rows of one name over the averaged steps (the step's own thread)."""

    name: str
    per_step: tuple[int, ...]  # occurrences in each averaged step
    self_ns: float  # mean per step
    total_ns: float  # mean per step, nested time included

    @property
    def mean(self) -> float:
        return float(np.mean(self.per_step))

    @property
    def steps_with(self) -> int:
        return sum(1 for n in self.per_step if n)


class Context:
    """One analysis and its comparable references, as the rules see them."""

    def __init__(self, analysis: Analysis, references: Seq[Analysis] = ()) -> None:
        self.analysis = analysis
        self.trace: Trace = analysis.traceset.traces[analysis.slowest]
        self.steps: tuple[Step, ...] = analysis.steps[analysis.slowest]
        self.breakdown: Breakdown = analysis.breakdown
        self.references = [r for r in references if compare_cells(analysis.cell, r.cell).ok]
        self.refused = [r.label for r in references if r not in self.references]
        self.step: Step = self._representative()

    def _representative(self) -> Step:
        """The step whose rows the typical sequence holds: median wall among those with the usual order of work."""
        seq = self.analysis.sequence
        if seq is not None:
            return next(s for s in self.steps if s.index == seq.step)
        walls = [s.wall_ns for s in self.steps]
        return self.steps[int(np.argsort(walls)[len(walls) // 2])]

    @property
    def on_gpu(self) -> bool:
        """True when the steps ran work on a device."""
        return self.analysis.sequence is not None and self.analysis.sequence.device == "gpu"

    @property
    def layers(self) -> int:
        """Layers of the model as found in the typical step; 0 when none were found."""
        return self.analysis.layers.count if self.analysis.layers else 0

    @cached_property
    def trees(self) -> list[HostTree]:
        """Host call tree of every averaged step."""
        return [hosttree.build(self.trace, s) for s in self.steps]

    @cached_property
    def tree(self) -> HostTree:
        """Host call tree of the representative step."""
        return self.trees[next(i for i, s in enumerate(self.steps) if s is self.step)]

    @cached_property
    def model(self) -> whatif.StepModel:
        """Replay of the representative step."""
        return whatif.build(self.trace, self.step)

    @cached_property
    def uses(self) -> dict[str, NameUse]:
        """Host rows by name."""
        counts: dict[int, list[int]] = {}
        own: dict[int, float] = {}
        total: dict[int, float] = {}
        e = self.trace.events
        for k, tree in enumerate(self.trees):
            codes = e.name[tree.rows]
            for code in np.unique(codes).tolist():
                mask = codes == code
                counts.setdefault(code, [0] * len(self.trees))[k] = int(mask.sum())
                own[code] = own.get(code, 0.0) + float(tree.self_ns[mask].sum())
                total[code] = total.get(code, 0.0) + float(e.dur_ns[tree.rows[mask]].sum())
        n = len(self.trees)
        return {
            self.trace.names[c]: NameUse(self.trace.names[c], tuple(v), own[c] / n, total[c] / n)
            for c, v in counts.items()
        }

    @cached_property
    def work_names(self) -> list[str]:
        """Names of all kernels and operators of the rank's whole trace, other phases included."""
        rows = self.trace.rows(Kind.KERNEL, Kind.CPU_OP)
        return [self.trace.names[c] for c in np.unique(self.trace.events.name[rows]).tolist()]

    def named(self, match: Callable[[str], bool]) -> list[NameUse]:
        """Uses whose name matches, most self time first."""
        return sorted((u for n, u in self.uses.items() if match(n)), key=lambda u: -u.self_ns)

    def rows_named(self, match: Callable[[str], bool]) -> list[int]:
        """Positions in the representative step's tree whose name matches."""
        codes = self.trace.events.name[self.tree.rows]
        wanted = [c for c in np.unique(codes).tolist() if match(self.trace.names[c])]
        return np.flatnonzero(np.isin(codes, wanted)).tolist()

    def subtree_cuts(self, positions: Iterable[int], lead: bool = True) -> dict[int, float]:
        """Host cuts that remove these calls: row -> its time, with everything under it.

        With `lead` the Python in front of an outermost call goes with it.
        """
        chosen = set(positions)
        out: dict[int, float] = {}
        parent = self.tree.parent.tolist()
        inside = [False] * len(parent)
        for i, p in enumerate(parent):  # parents come before children
            inside[i] = i in chosen or (p >= 0 and inside[p])
            if inside[i]:
                row = int(self.tree.rows[i])
                out[row] = float(self.tree.self_ns[i]) + (self.model.host_lead.get(row, 0.0) if lead and i in chosen else 0.0)
        return out

    @cached_property
    def position(self) -> dict[int, int]:
        """Host row -> its position in the representative tree."""
        return {r: i for i, r in enumerate(self.tree.rows.tolist())}

    @cached_property
    def launch_at(self) -> dict[int, int]:
        """Correlation id -> position of the runtime call that made it."""
        e = self.trace.events
        rows = self.tree.rows
        calls = np.flatnonzero(np.isin(e.kind[rows], (Kind.RUNTIME, Kind.DRIVER)) & (e.correlation[rows] > 0))
        return dict(zip(e.correlation[rows[calls]].tolist(), calls.tolist(), strict=True))

    @cached_property
    def launches(self) -> list[set[int]]:
        """Per entry of the representative tree: correlation ids of the device rows launched from inside it."""
        e = self.trace.events
        known = set(e.correlation[self.model.rows].tolist()) if self.model.rows else set()
        own = {at: c for c, at in self.launch_at.items() if c in known}
        out: list[set[int]] = [set() for _ in range(len(self.tree))]
        parent = self.tree.parent.tolist()
        for i in range(len(parent) - 1, -1, -1):  # children come after parents
            if i in own:
                out[i].add(own[i])
            if parent[i] >= 0:
                out[parent[i]] |= out[i]
        return out

    @cached_property
    def outside_ns(self) -> float:
        """Mean time in a step's window behind the end of its annotation while no device work of it is left."""
        return float(np.mean([self._outside(s) for s in self.steps]))

    def _outside(self, step: Step) -> float:
        e = self.trace.events
        end = marks(self.trace)[step.index].end
        device = step.rows[np.isin(e.kind[step.rows], (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET))]
        if len(device):
            end = max(end, int((e.ts_ns[device] + e.dur_ns[device]).max()))
        return float(max(0, step.end_ns - max(end, step.start_ns)))

    @cached_property
    def host_unit_ns(self) -> float | None:
        """Median self time of the cheapest view operation, as a measure of this host's speed under the profiler.

        None when the step has none.
        """
        at = self.rows_named(lambda n: n == "aten::as_strided")
        return float(np.median(self.tree.self_ns[at])) if at else None

    def aligned(self, reference: Analysis) -> tuple[GroupRow, ...]:
        """Groups of this engine (cell 0) and one reference (cell 1)."""
        return groups.aligned([self.analysis, reference])[0]

    def site(self, row: int) -> str | None:
        """The Python line around a host row, when the trace has stacks."""
        return syncs.site(self.trace, row)

