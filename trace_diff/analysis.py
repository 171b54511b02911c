"""What is known about one engine's trace set in one phase: the nouns that compare and find work on.

`Cell` says what was measured (model, device, TP, phase, batch), each value with how it is known. Not for:
computing accounts (attribute), deciding what may be compared (comparable).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trace_diff.ingest import TraceSet
from trace_diff.layers import LayerMap
from trace_diff.sequence import Sequence
from trace_diff.types import Breakdown, Phase, Step

if TYPE_CHECKING:
    import pandas as pd

    from trace_diff.collectives import Collectives

PERTURBED_ABOVE = 1.10  # traced step wall over the unprofiled one


@dataclass(frozen=True, slots=True)
class Cell:
    """What a trace measured. None: not known. `inferred` names the fields that no one stated."""

    engine: str | None = None
    device: str | None = None  # device class: "NVIDIA H200", "cpu" ...
    tp: int | None = None
    phase: Phase = Phase.UNKNOWN
    batch: int | None = None  # sequences per step
    tokens: int | None = None  # output tokens per step in decode, computed tokens in prefill
    context: int | None = None  # tokens of KV cache per sequence
    layers: int | None = None
    hidden: int | None = None
    products: tuple[tuple[int, int], ...] = ()  # (inputs, outputs) of one layer's products, in order
    dtype: str | None = None
    model: str | None = None
    inferred: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Observer:
    """The observer effect: traced step wall over that of the same cell without the profiler."""

    traced_us: float
    control_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """None without a control."""
        return self.traced_us / self.control_us if self.control_us else None

    @property
    def perturbed(self) -> bool:
        """True above 1.10 and also when there is no control to compare with."""
        return self.ratio is None or self.ratio > PERTURBED_ABOVE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "perturbed": self.perturbed}


@dataclass(frozen=True, slots=True)
class Analysis:
    """One engine, one phase: accounts per rank and the typical step. `steps` and `breakdowns` are by rank.

    Only complete steady steps count. `slowest` is the rank that sets the pace: least time spent waiting for
    its peers, else the longest wall.
    """

    label: str
    cell: Cell
    traceset: TraceSet
    phase: Phase
    steps: dict[int, tuple[Step, ...]]
    breakdowns: dict[int, Breakdown]
    slowest: int
    sequence: Sequence | None
    layers: LayerMap | None
    collectives: Collectives | None
    observer: Observer
    notes: tuple[str, ...] = ()
    seen_steps: tuple[int, int] = (0, 0)  # steps of the phase on the pace-setting rank; of them empty or not whole

    @property
    def breakdown(self) -> Breakdown:
        """The mean account of the rank that sets the pace."""
        return self.breakdowns[self.slowest]

    @property
    def tokens_per_step(self) -> int:
        """Output tokens of one step; 1 when not known (a decode step makes at least one)."""
        return self.cell.tokens or 1

    @property
    def units_per_step(self) -> int:
        """What savings are given per: output tokens of a decode step, requests of a prefill step."""
        return self.tokens_per_step if self.phase is Phase.DECODE else self.cell.batch or 1

    def with_control(self, control_step_us: float | None) -> Analysis:
        """The same analysis with the unprofiled wall of the same cell."""
        if control_step_us is None:
            return self
        return replace(self, observer=replace(self.observer, control_us=control_step_us))

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "cell": self.cell.to_json(),
            "phase": str(self.phase),
            "steps": {str(r): [s.name for s in v] for r, v in self.steps.items()},
            "breakdowns": {str(r): asdict(b) for r, b in self.breakdowns.items()},
            "slowest": self.slowest,
            "observer": self.observer.to_json(),
            "layers": self.layers.count if self.layers else 0,
            "notes": list(self.notes),
        }

    def frame(self) -> pd.DataFrame:
        """One row per rank and part: rank, part, us (per step), share of the wall."""
        import pandas as pd  # half a second: only for those who ask for a frame

        rows = [
            {"rank": r, "part": part, "us": ns / 1000, "share": ns / b.wall_ns if b.wall_ns else 0.0}
            for r, b in self.breakdowns.items()
            for part, ns in b.parts.items()
        ]
        return pd.DataFrame(rows, columns=pd.Index(["rank", "part", "us", "share"]))
