"""The replay: exact without an edit, and aware of what is hidden behind what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.planted import programs
from benchmarks.planted.machine import Machine, run
from benchmarks.planted.programs import Plant
from trace_diff import api
from trace_diff.findings.context import Context
from trace_diff.whatif import Edit


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., Context]:
    def build(program=programs.eager, plant: Plant | None = None) -> Context:
        machine = Machine()
        run(lambda m, _: program(m, plant or Plant()), [machine], 8)
        path = tmp_path / "rank0.json"
        path.write_text(json.dumps(machine.trace(None)))
        return Context(api.analyse(api.load(path, "built")))

    return build


@pytest.mark.parametrize("program", [programs.eager, programs.graphed])
@pytest.mark.parametrize("plant", [Plant(), Plant(reads_per_step=6), Plant(duty=0.25), Plant(side_copy_ns=300_000)])
def test_without_an_edit_the_replay_is_the_traced_wall(context, program, plant: Plant):
    model = context(program, plant).model
    assert model.wall_with(Edit()) == pytest.approx(model.wall, abs=2.0)


def test_a_kernel_of_a_busy_device_is_worth_its_time(context):
    c = context()
    gemm = [r for r in c.model.rows if "gate_up" in c.trace.name(r)]
    whole = sum(float(c.trace.events.dur_ns[r]) for r in gemm)
    gain = c.model.wall - c.model.wall_with(Edit(device=dict.fromkeys(gemm, 0.0)))
    # 12 gaps go too; what is left of the step is then paced by the host, so not all of it is gained
    assert 0.5 * whole < gain <= whole + 12 * 1000


def test_a_kernel_of_a_starving_device_is_worth_nothing(context):
    c = context(plant=Plant(duty=0.1, host_op_ns=20_000))
    gemm = [r for r in c.model.rows if "gate_up" in c.trace.name(r)]
    assert c.model.wall - c.model.wall_with(Edit(device=dict.fromkeys(gemm, 0.0))) == pytest.approx(0.0, abs=500.0)


def test_host_time_of_a_busy_device_is_worth_nothing(context):
    c = context()
    cuts = c.subtree_cuts(c.rows_named(lambda n: n == "aten::op"))
    assert sum(cuts.values()) > 100_000
    assert c.model.wall - c.model.wall_with(Edit(host_cuts=cuts)) == pytest.approx(0.0, abs=500.0)


def test_a_copy_on_another_stream_is_a_dependency_not_launch_delay(context):
    c = context(plant=Plant(side_copy_ns=300_000))
    copy = [r for r in c.model.rows if c.trace.events.stream[r] == 13]
    assert len(copy) == 1
    gain = c.model.wall - c.model.wall_with(Edit(device={copy[0]: 0.0}))
    assert gain == pytest.approx(300_000, rel=0.05)


def test_the_replay_never_takes_longer_or_less_than_nothing(context):
    c = context(plant=Plant(reads_per_step=4))
    everything = Edit(host_cuts=dict.fromkeys(c.model.host_start, 1e9), device=dict.fromkeys(c.model.rows, 0.0))
    assert 0.0 <= c.model.wall_with(everything) <= c.model.wall
