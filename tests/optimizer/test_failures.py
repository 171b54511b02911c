"""What breaks around a candidate ends its attempt under a name, and the loop goes on."""

from __future__ import annotations

import errno
from dataclasses import replace

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run

from optimizer.confine.launch import LaunchError
from optimizer.explain import compare
from optimizer.loop import Loop
from optimizer.measure import CandidateFailed, InfrastructureError
from optimizer.seal import SealBroken
from optimizer.services import Diagnosis
from optimizer.truth.oracle import OracleError
from optimizer.types import RejectReason

OTHER = fake.one(fake.speed(600))


def attempts(run):
    ends = ("accepted", "rejected", "undecided", "parked")
    return [(x["kind"], x["data"].get("stage"), x["data"].get("reason")) for x in run.ledger.lines() if x["kind"] in ends]


def broken_run(tmp_path, where: str, error: Exception, attempt: int = 1):
    """The first attempt meets `error` at the call named `where`; the second is a plain win."""
    run = new_run(tmp_path / "run")
    fakes = Fakes(run, [fake.WIN, OTHER])

    def strike(what: str) -> None:
        if what == where and fakes.asked == [attempt]:
            raise error

    fakes.on_call = strike
    Loop(fakes.services(), run).go()
    return run


@pytest.mark.parametrize(
    ("where", "error", "stage", "reason"),
    [
        ("pair screen", OSError(errno.ENOSPC, "No space left on device"), "screen", "infrastructure"),
        ("pair decide", OSError(errno.EADDRINUSE, "Address already in use"), "decide", "infrastructure"),
        ("pair decide", InfrastructureError("GPU 1 is gone"), "decide", "infrastructure"),
        ("pair confirm", CandidateFailed(RejectReason.CRASH, "rank 2 ended"), "confirm", "crash"),
        ("pair confirm", CandidateFailed(RejectReason.HANG, "a collective never ended"), "confirm", "hang"),
        ("gate greedy full", OracleError("no answer"), "full", "infrastructure"),
        ("gate greedy quick", LaunchError(RejectReason.BOOT, "ended"), "quick", "boot"),
        ("capture", LaunchError(RejectReason.CRASH, "while being profiled"), "trace", "crash"),
    ],
)
def test_a_failure_is_named_and_the_next_attempt_is_judged(tmp_path, where, error, stage, reason):
    run = broken_run(tmp_path, where, error)
    assert attempts(run) == [("rejected", stage, reason), ("accepted", None, None)]


def test_an_error_that_is_nobodys_fault_we_know_of_is_not_swallowed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        broken_run(tmp_path, "pair screen", ZeroDivisionError())
    with pytest.raises(PermissionError):
        broken_run(tmp_path / "b", "pair screen", PermissionError(errno.EACCES, "no"))


def test_a_broken_seal_ends_the_run_at_once(tmp_path):
    with pytest.raises(SealBroken):
        broken_run(tmp_path, "seal", SealBroken("gates/greedy.py has changed"))


def test_an_incumbent_that_fails_against_itself_is_no_run(tmp_path):
    from optimizer.run import RunError

    run = new_run(tmp_path / "run")

    def strike(what: str) -> None:
        if what == "pair calibrate":
            raise InfrastructureError("the incumbent's tokens are wrong")

    with pytest.raises(RunError, match="fails against itself"):
        Loop(Fakes(run, [fake.WIN], on_call=strike).services(), run).go()


def test_pairs_that_must_always_be_discarded_end_the_attempt_undecided(tmp_path, monkeypatch):
    run = new_run(tmp_path / "run")
    fakes = Fakes(run, [fake.WIN])
    services = fakes.services()

    def spoiled(a, b, stage, index, order):
        pair = fakes.run_pair(a, b, stage, index, order)
        lost = stage == "screen"
        return replace(pair, a_us_per_token=None, b_us_per_token=None, discarded="foreign load") if lost else pair

    Loop(replace(services, run_pair=spoiled), run).go()
    assert attempts(run)[0][0] == "undecided"
    pairs = [x for x in run.ledger.lines() if x["kind"] == "pair" and x["data"]["stage"] == "screen"]
    assert 1 <= len(pairs) <= 3


def candidate(activation):
    from optimizer.candidate import Candidate, Member
    from optimizer.types import Series

    patch = replace(fake.WIN.patches[0], activation=activation)
    member = Member(patch, "p", "c", "k", None)  # type: ignore[arg-type]
    return Candidate(1, Series((patch,), "t"), None, (member,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("activation", "missing"),
    [
        ({"appear": [{"row": "shm::*", "ranks": "all"}], "vanish": [{"row": "c10d::allreduce_"}]}, None),
        ({"appear": [{"row": "custom::*"}], "vanish": []}, "does not appear"),
        ({"appear": [{"row": "only::rank0", "ranks": "all"}], "vanish": []}, "does not appear"),
        ({"appear": [{"row": "only::rank0", "ranks": "any"}], "vanish": []}, None),
        ({"appear": [], "vanish": [{"row": "aten::item"}]}, "still there, 1 a step"),
        ({"appear": [], "vanish": [{"row": "aten::item", "fewer": True}]}, None),
        ({"appear": [], "vanish": [{"row": "aten::mm", "fewer": True}]}, "8 a step before, 8 a step after"),
        (None, None),
    ],
)
def test_a_mechanism_must_show_in_the_trace_as_its_patch_said(activation, missing):
    old = {"c10d::allreduce_": 4.0, "aten::item": 4.0, "aten::mm": 8.0}
    new = {"shm::all_reduce": 4.0, "aten::item": 1.0, "aten::mm": 8.0}
    before = Diagnosis((), 1000.0, 1, (old, old))
    after = Diagnosis((), 700.0, 1, ({**new, "only::rank0": 1.0}, new))
    found = compare(candidate(activation), before, after)
    assert (found.activation is None) if missing is None else missing in found.activation
    assert found.traced_us == 300.0


def test_products_are_counted_where_a_graph_replays_them_and_where_operators_run_on_a_cpu(repo):
    from optimizer.diagnose import PRODUCTS, _analyse, _rows
    from optimizer.services import Capture

    stored = repo / "baseline_traces"
    graph, = _rows(_analyse(Capture("graph", (stored / "h200_tp1" / "h200-final-decode-bs1.json.gz",), 1, 1, None), "graph"))
    assert graph[PRODUCTS] == 4 * 36 + 1, "qkv, o, gate and up, down of every layer, and the head"
    assert not any(name.startswith("aten::mm") for name in graph)
    on_cpu = _rows(_analyse(Capture("cpu", tuple(sorted((stored / "cpu_vllm").glob("*.json.gz")))[:1], 1, 1, None), "cpu"))[0]
    assert on_cpu[PRODUCTS] > 0
