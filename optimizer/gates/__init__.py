"""The sealed correctness gates, cheapest first; the first failure stops.

`run(stage, context)` yields one GateResult after another. Nothing here knows a proposer, a skill or the knowledge.
Not for: speed (`measure.py`, `accept.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from optimizer.confine.launch import LaunchError
from optimizer.gates import (
    accounting,
    boot,
    drift,
    greedy,
    logprobs,
    parallel,
    perturb,
    physics,
    policy,
    races,
    resources,
    sampling,
    scope,
    sealed,
    shapes,
    startup,
    witness,
)  # fmt: skip
from optimizer.gates.context import Failed, GateContext, Lab, Setup, failed
from optimizer.traffic import wire
from optimizer.traffic.client import ClientError
from optimizer.types import GateResult, RejectReason

__all__ = ["FULL", "QUICK", "GateContext", "Setup", "run"]

Check = Callable[[Lab], GateResult]


@dataclass(frozen=True, slots=True)
class Gate:
    name: str
    check: str
    run: Check


STATIC: tuple[Gate, ...] = (
    Gate("seal", "G03", sealed.check),
    Gate("scope", "G01", scope.check),
    Gate("policy", "G02", policy.check),
)
QUICK: tuple[Gate, ...] = (
    *STATIC,
    Gate("boot", "G05", boot.check),
    Gate("greedy", "G08", greedy.check),
    Gate("logprobs", "G07", logprobs.check),
)
# Neighbours that need the same engine share its launch: secret weights at one rank, one layer changed at the TP that is
# optimised, hostile memory at one rank, the other TP sizes, and last the incumbent.
FULL: tuple[Gate, ...] = (
    Gate("swap", "G14", shapes.swap),
    Gate("shapes", "G12", shapes.check),
    Gate("accounting", "G11", accounting.check),
    Gate("physics", "G17", physics.check),
    Gate("drift", "G07", drift.check),
    Gate("sampling", "G13", sampling.check),
    Gate("perturb", "G15", perturb.check),
    Gate("delays", "G20", races.delays),
    Gate("resources", "G19", resources.ranks),
    Gate("witness", "G18", witness.check),
    Gate("leak", "G19", resources.leak),  # first of its launch: memory that was freed would hide a leak
    Gate("poison", "G20", races.poison),
    Gate("parallel", "G12", parallel.check),
    Gate("startup", "G21", startup.check),
    Gate("memory", "G19", resources.against_incumbent),
)


def run(stage: str, ctx: GateContext) -> Iterator[GateResult]:
    """Results of "quick" or "full", as they are known; ends after the first that failed (parked ones go on). "static" are
    those of "quick" that start nothing.

    What a candidate does is a result. OracleError, SandboxError and OSError say nothing of it and are raised.
    """
    if stage not in ("static", "quick", "full"):
        raise ValueError(f"unknown stage {stage!r}; known: static, quick, full")
    lab = Lab(ctx)
    try:
        for gate in chosen(stage, ctx):
            result = one(gate, lab)
            yield result
            if not result.passed and not result.parked:
                return
    finally:
        lab.close()


def chosen(stage: str, ctx: GateContext) -> tuple[Gate, ...]:
    """The gates of a stage; the protocol may name a subset of the full ones."""
    if stage != "full":
        return QUICK if stage == "quick" else STATIC
    names = ctx.protocol.full_gates
    if names is None:
        return FULL
    unknown = sorted(set(names) - {gate.name for gate in FULL})
    if unknown:
        raise ValueError(
            f"protocol {ctx.protocol.name}: unknown gates {unknown}; known: {[g.name for g in FULL]}"
        )
    return tuple(gate for gate in FULL if gate.name in names)


def one(gate: Gate, lab: Lab) -> GateResult:
    """Run one gate; every way in which a candidate can break it becomes a result. Adds the time it took."""
    began, cpu = time.perf_counter(), lab.cpu_s()
    try:
        result = gate.run(lab)
    except Failed as error:
        result = failed(gate.name, error.check or gate.check, error.reason, error.detail)
    except LaunchError as error:
        result = failed(gate.name, gate.check, error.reason, error.detail)
    except ClientError as error:
        result = failed(gate.name, gate.check, RejectReason.CRASH, str(error))
    facts = result.facts | {"cpu_s": round(lab.cpu_s() - cpu, 3)}
    result = replace(result, detail=wire.plain(result.detail))
    return replace(result, seconds=time.perf_counter() - began, facts=facts)
