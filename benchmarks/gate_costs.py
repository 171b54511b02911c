"""`python -m benchmarks.gate_costs [--tp 4] [--case B33]`: what judging one good candidate of the tiny model costs, by gate.

Prints wall seconds, CPU seconds (engines, oracle and this process) and the sum so far. On a machine that does other
work only the CPU column means something. Not for: whether gates are right (`python -m redteam`).
"""

from __future__ import annotations

import argparse
import sys
from itertools import accumulate

from rich.console import Console
from rich.table import Table

from optimizer import gates
from optimizer.gates.context import Lab
from optimizer.types import GateResult
from redteam.arena import Arena
from redteam.benign import BENIGN
from redteam.case import Case
from redteam.controls import CONTROLS
from redteam.engineer import ENGINEER

GOOD: dict[str, Case] = {case.id: case for case in (*BENIGN, *ENGINEER, *CONTROLS)}
QUICK_GOAL_S, BOTH_GOAL_S = 20.0, 90.0  # quick gates, and quick and full together, at TP 4 on two quiet cores


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gate_costs", description=__doc__)
    parser.add_argument("--tp", type=int, default=4, help="tensor-parallel ranks")
    parser.add_argument("--case", choices=sorted(GOOD), default="B33", help="the good patch that is judged")
    parser.add_argument("--unsealed", action="store_true", help="do not check the seal: while working on the gates")
    options = parser.parse_args(argv)
    console = Console()
    with Arena() as arena:
        found = {stage: judged(arena, options, stage) for stage in ("quick", "full")}
    show(console, found)
    return 0 if all(result.passed for results in found.values() for result in results) else 1


def judged(arena: Arena, options: argparse.Namespace, stage: str) -> list[GateResult]:
    """Every gate of a stage on the good patch; ends at one that fails, as in a run."""
    case = GOOD[options.case]
    commit = arena.commit(case.make(arena.sources()), case.idea)
    context = arena.context(commit, options.tp)
    lab, results = Lab(context), []
    try:
        for gate in gates.chosen(stage, context):
            if options.unsealed and gate.name == "seal":
                continue
            results.append(gates.one(gate, lab))
            if not results[-1].passed:
                break
    finally:
        lab.close()
    return results


def show(console: Console, found: dict[str, list[GateResult]]) -> None:
    rows = [(stage, result) for stage, results in found.items() for result in results]
    sums = list(accumulate(result.seconds for _, result in rows))
    table = Table("stage", "gate", "seconds", "CPU s", "so far", "")
    for (stage, result), total in zip(rows, sums, strict=True):
        verdict = "" if result.passed else result.detail.splitlines()[0][:80]
        table.add_row(stage, result.gate, f"{result.seconds:.1f}", f"{result.facts['cpu_s']:.1f}", f"{total:.1f}", verdict)
    console.print(table)
    quick = sum(result.seconds for result in found["quick"])
    cpu = sum(result.facts["cpu_s"] for _, result in rows)
    console.print(
        f"quick {quick:.1f} s (goal {QUICK_GOAL_S:g}), quick and full {sums[-1]:.1f} s (goal {BOTH_GOAL_S:g}), CPU {cpu:.1f} s",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
