"""The machine's state is read from outside, and two arms that ran under different load do not make a pair."""

from __future__ import annotations

import time

import pytest

from optimizer import environment
from optimizer.environment import Snapshot, Window, disagreement, parse_gpus, window
from optimizer.traffic import loadgen


def arm(**changes) -> Window:
    base = {"seconds": 5.0, "foreign_cores": 0.1, "own_cores": 1.9, "steal_share": 0.0, "pressure_share": 0.2, "load1": 2.0}
    return Window(**(base | changes))


def test_foreign_load_is_what_is_left_after_the_arm_and_its_client():
    before = Snapshot(100.0, 50.0, 1.0, 3.0, 1.0, own_s=10.0)
    after = Snapshot(110.0, 68.0, 1.5, 8.0, 2.0, own_s=22.0)
    w = window(before, after, cores=2)
    assert (w.foreign_cores, w.own_cores, w.steal_share, w.pressure_share) == pytest.approx((0.6, 1.2, 0.025, 0.5))


def test_reasons_are_symmetric_and_few():
    for changes, reason in [
        ({"foreign_cores": 0.9}, "load"),
        ({"steal_share": 0.2}, "steal"),
        ({"throttled": True}, "throttle"),
        ({"foreign_gpu_pids": 1}, "foreign_gpu_process"),
        ({"sm_mhz": (1200.0,)}, "gpu_clock"),
        ({"own_cores": 0.2, "seconds": 50.0, "load1": 9.0}, None),  # the arm's own doing is no reason
    ]:
        a, b = arm(sm_mhz=(1500.0,)), arm(**({"sm_mhz": (1500.0,)} | changes))
        assert disagreement(a, b, cores=2) == disagreement(b, a, cores=2) == reason
    assert disagreement(arm(foreign_cores=0.9), arm(), cores=64) is None


def test_this_machine_can_be_read():
    before = environment.snapshot()
    sum(i * i for i in range(300_000))
    w = window(before, environment.snapshot())
    assert w.seconds > 0 and w.own_cores > 0


def test_cards_are_read_from_csv_and_garbage_is_left_out():
    text = (
        "0, GPU-1, 1980, 2619, 41, 118.2, 1024, 0x0000000000000000, 550.1, NVIDIA H200\n"
        "1, GPU-2, 345, 2619, 88, [N/A], 0, 0x0000000000000040, 550.1, NVIDIA H200\n"
        "No devices were found\n"
    )
    gpus = parse_gpus(text)
    assert [g.sm_mhz for g in gpus] == [1980.0, 345.0] and gpus[1].watts is None
    assert [bool(g.throttle & environment.THROTTLE_MASK) for g in gpus] == [False, True]


def test_memory_of_gpu_processes_is_read_per_process(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '41, 1024'\necho '41, 512'\necho '42, [N/A]'\necho 'No running processes found'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert environment.gpu_memory((0, 1)) == {41: 1536 * 2**20}
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    assert environment.gpu_memory(None) == {} and environment.query_gpus(None) == ()


def test_the_client_costs_little_and_reads_in_time():
    """32 streams paced at 10 ms from a server that computes nothing: the client's own CPU, by its own process clock."""
    began = time.monotonic()
    found = loadgen.self_test(tokens=30, repeats=2)
    assert found.cpu_us_per_token <= 1.5 * loadgen.CPU_US_GOAL  # other tests share the cores here
    assert found.measured_gap_ms >= 9.0
    assert time.monotonic() - began < 30
