"""The planted variants and the controls: which program, what is planted, which rule must name it first.

Not for: running them (bench).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from benchmarks.planted import programs
from benchmarks.planted.machine import Machine, Yield
from benchmarks.planted.programs import K, Plant

NOTHING = Plant()

Program = Callable[[Machine, Plant], Generator[Yield, int, None]]


@dataclass(frozen=True)
class Variant:
    """One planted inefficiency. The cost is wall(plant) - wall(fixed), both run on the machine."""

    name: str
    rule: str | None  # id of the rule that must rank first; None: a control, nothing may be found
    program: Program
    plant: Plant
    fixed: Plant = NOTHING
    world: int = 1
    fixed_program: Program | None = None  # where the fix is another program
    reference: bool = False  # give the fixed program's trace as a reference engine


G, E, C = programs.graphed, programs.eager, programs.cpu
SHORT = 0.25  # device times of a host-bound engine
TP = Plant(transfer_ns=4 * K)

VARIANTS: tuple[Variant, ...] = (
    Variant("graph: 6 host reads cut the graph", "host-reads", G, Plant(reads_per_step=6)),
    Variant("eager: a host read in every layer", "host-reads", E, Plant(reads_per_step=12)),
    Variant("eager: 60 more copies make the host the slower side", "host-device-copies", E, Plant(duty=0.7, copies_per_step=60), Plant(duty=0.7)),
    Variant("eager: 200 tensor allocations make the host the slower side", "allocations", E, Plant(duty=0.7, empties_per_step=200), Plant(duty=0.7)),
    Variant("eager: device allocations make the host the slower side", "allocations", E, Plant(duty=0.7, mallocs_per_step=5), Plant(duty=0.7)),
    Variant("CPU: 900 us of scheduling between steps", "between-steps", C, Plant(between_ns=900 * K)),
    Variant("graph: compiles in every step", "recompilation", G, Plant(compile_ns=4000 * K)),
    Variant("graph: down product 1.8 x the reference's", "slower-kernels", G, Plant(slow=(("down", 1.8),)), reference=True),
    Variant("graph: attention 3 x the reference's", "slower-kernels", G, Plant(slow=(("attention", 3.0),)), reference=True),
    Variant("graph: split residual add + RMSNorm, reference fuses", "unfused-chains", G, Plant(split_norm=True), reference=True),
    Variant("graph: split residual add + RMSNorm, no reference", "unfused-chains", G, Plant(split_norm=True)),
    Variant("graph: split SwiGLU, reference fuses", "unfused-chains", G, Plant(split_silu=True), reference=True),
    Variant("graph: q, k, v apart, reference merges", "split-products", G, Plant(split_qkv=True), reference=True),
    Variant("graph: 3 device copies a layer", "redundant-copies", G, Plant(device_copies=3)),
    Variant("graph: 3 device copies a layer, none in the reference", "redundant-copies", G, Plant(device_copies=3), reference=True),
    Variant("graph: metadata kernel in every layer", "step-invariant-work", G, Plant(metadata=True)),
    Variant("eager: gate and up product at 60 % of the bandwidth", "roofline-gap", E, Plant(slow=(("gate_up", 1.6),))),
    Variant("eager: host 4 x too slow for the device", "launch-bound-decode", E, Plant(duty=SHORT, host_op_ns=10 * K), Plant(duty=SHORT), fixed_program=G),
    Variant("eager: autograd makes the host the slower side", "autograd-recording", E, Plant(duty=0.7, autograd=(1_900, 2_100)), Plant(duty=0.7)),
    Variant("TP 2 eager: rank 1 late to every all-reduce", "comm-wait", E, Plant(late_rank_ns=150 * K), TP, world=2),
    Variant("TP 2 eager: all-reduce of 60 us", "slow-transfer", E, Plant(transfer_ns=60 * K), TP, world=2),
    Variant("eager: exposed copy on a second stream", "overlap", E, Plant(side_copy_ns=400 * K)),
    Variant("CPU: autograd recording", "autograd-recording", C, Plant(autograd=(1_500, 1_600))),
    Variant("CPU: split RMSNorm", "unfused-chains", C, Plant(split_norm=True)),
    Variant("CPU: q, k, v apart", "split-products", C, Plant(split_qkv=True)),
    Variant("CPU: 4 clones a layer", "redundant-copies", C, Plant(clones=4)),
    Variant("CPU: masks made anew in every layer", "step-invariant-work", C, Plant(metadata=True)),
    Variant("CPU: the cache is gathered in every layer", "gathered-attention", C, Plant(gathers=2)),
    Variant("CPU: ten sampling operators", "sampling-cost", C, Plant(sampling=10)),
    Variant("graph: ten sampling kernels", "sampling-cost", G, Plant(sampling=10)),
    Variant("CPU: 200 tensor allocations", "allocations", C, Plant(empties_per_step=200)),
    Variant("CPU: 6 us of Python per operator", "python-time", C, Plant(python_ns=6 * K)),
    Variant("TP 4 CPU: rank 1 late to every all-reduce", "comm-wait", C, Plant(late_rank_ns=300 * K), TP, world=4),
    Variant("TP 4 CPU: all-reduce of 700 us", "slow-transfer", C, Plant(transfer_ns=700 * K), TP, world=4),
)  # fmt: skip

CONTROLS: tuple[Variant, ...] = (
    Variant("control: graph", None, G, Plant()),
    Variant("control: graph with a reference", None, G, Plant(), reference=True),
    Variant("control: eager, device busy", None, E, Plant()),
    Variant("control: eager, host reads beside queued work", None, E, Plant(side_reads=4)),
    Variant("control: eager, allocations behind queued work", None, E, Plant(empties_per_step=20)),
    Variant("control: CPU", None, C, Plant()),
    Variant("control: TP 2 eager", None, E, TP, TP, world=2),
    Variant("control: TP 4 CPU", None, C, TP, TP, world=4),
)

QUICK = ("graph: 6 host reads cut the graph", "graph: split SwiGLU, reference fuses", "CPU: autograd recording", "TP 4 CPU: all-reduce of 700 us", "control: eager, device busy", "control: TP 2 eager", "control: CPU")  # fmt: skip
