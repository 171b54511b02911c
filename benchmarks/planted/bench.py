"""Run the planted variants through trace_diff and score its answers.

Score: is the planted cause ranked first (by its saving), and how far is its predicted saving from the true
cost; controls must have no finding worth more than 1 % of the step. Not for: drawing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.planted.machine import Machine, run, step_ns
from benchmarks.planted.programs import Plant
from benchmarks.planted.variants import Program, Variant
from trace_diff import api
from trace_diff.types import Finding, Status

STEPS = 12
WORTH = 0.01  # of the step: what a control may not have


@dataclass(frozen=True)
class Outcome:
    """One variant's score; times in microseconds per step."""

    name: str
    rule: str | None
    first: str | None  # what was ranked first
    hit: bool  # planted cause first, or a silent control
    cost_us: float
    predicted_us: float | None
    error: float | None  # |predicted - cost| / cost
    wall_us: float
    sum_us: float  # of all bounds


def simulate(program: Program, plant: Plant, world: int, folder: Path) -> tuple[list[Path], float]:
    """Traces of one program (a file per rank) and the mean step in ns of its slowest rank."""
    device = None if program.__name__ == "cpu" else "NVIDIA H200"
    machines = [Machine(rank=r, world=world, device=device) for r in range(world)]
    run(lambda m, _: program(m, plant), machines, STEPS)
    wall = max(step_ns(m) for m in machines)
    paths = []
    for m in machines:
        path = folder / f"rank{m.rank}.json"
        path.write_text(json.dumps(m.trace(wall / 1000)))
        paths.append(path)
    return paths, wall


def score(variant: Variant) -> Outcome:
    """Simulate with and without the plant, find, compare with the truth."""
    with tempfile.TemporaryDirectory() as name:
        here, there = Path(name, "here"), Path(name, "there")
        here.mkdir()
        there.mkdir()
        paths, wall = simulate(variant.program, variant.plant, variant.world, here)
        fixed = variant.fixed_program or variant.program
        fixed_paths, fixed_wall = simulate(fixed, variant.fixed, variant.world, there)
        mine = api.analyse(api.load(paths, "planted"))
        references = [api.analyse(api.load(fixed_paths, "fixed"))] if variant.reference else []
        findings = api.find(mine, references)
    return _outcome(variant, findings, wall / 1000, (wall - fixed_wall) / 1000)


def _outcome(variant: Variant, findings: Sequence[Finding], wall_us: float, cost_us: float) -> Outcome:
    found = [f for f in findings if f.status is Status.FOUND and (f.bound_us or 0.0) >= WORTH * wall_us]
    first = found[0] if found else None
    predicted = first.bound_us if first is not None and first.rule == variant.rule else None
    return Outcome(
        name=variant.name,
        rule=variant.rule,
        first=first.id if first else None,
        hit=first is None if variant.rule is None else predicted is not None,
        cost_us=cost_us,
        predicted_us=predicted,
        error=abs(predicted - cost_us) / cost_us if predicted is not None and cost_us > 0 else None,
        wall_us=wall_us,
        sum_us=sum(f.bound_us or 0.0 for f in findings),
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Totals over variants and controls; `median_error` over the variants whose cause was ranked first."""
    planted = [o for o in outcomes if o.rule is not None]
    controls = [o for o in outcomes if o.rule is None]
    errors = sorted(o.error for o in planted if o.error is not None)
    return {
        "planted": len(planted),
        "ranked_first": sum(o.hit for o in planted),
        "median_error": errors[len(errors) // 2] if errors else None,
        "worst_error": errors[-1] if errors else None,
        "controls": len(controls),
        "silent_controls": sum(o.hit for o in controls),
        "sum_within_wall": all(o.sum_us <= o.wall_us * 1.0001 for o in outcomes),
        "rows": [asdict(o) for o in outcomes],
    }
