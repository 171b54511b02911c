"""The gates on the real engine: a good patch passes the quick ones, the red team's fast cases stop where they should.

The whole table is `make redteam`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))  # redteam/ is no installed package

from optimizer import gates  # noqa: E402
from optimizer.confine import sandbox  # noqa: E402
from optimizer.confine.launch import LaunchError, launch  # noqa: E402
from optimizer.gates import context, logprobs  # noqa: E402
from optimizer.traffic.client import Request  # noqa: E402
from optimizer.truth.oracle import Bands  # noqa: E402
from optimizer.types import RejectReason  # noqa: E402
from redteam.arena import Arena  # noqa: E402
from redteam.benign import BENIGN  # noqa: E402
from redteam.beyond import BEYOND  # noqa: E402
from redteam.case import Case, Stale  # noqa: E402
from redteam.cheats import CHEATS  # noqa: E402
from redteam.controls import CONTROLS  # noqa: E402
from redteam.engineer import ENGINEER  # noqa: E402
from redteam.judge import judge  # noqa: E402
from redteam.measured import MEASURED, run  # noqa: E402
from redteam.more import MORE  # noqa: E402

ALL = (*CHEATS, *MORE, *BEYOND, *CONTROLS, *BENIGN, *ENGINEER)
STATIC = [c for c in (*CHEATS, *BEYOND) if c.fast and c.expected & {"G01", "G02"} and c.id != "R39"]
RUNNING = [c for c in CHEATS if c.id in ("R03", "R17", "R55")]


@pytest.fixture(scope="module")
def arena():
    with Arena() as made:
        yield made


def unsealed(case: Case) -> Case:
    """The seal is judged by its own test: a working copy may be between two seals."""
    return replace(case, without=(*case.without, "seal"))


def test_every_case_still_fits_the_engine(arena):
    sources = arena.sources()
    stale = {}
    for case in ALL:
        try:
            assert case.make(sources)
        except Stale as error:
            stale[case.id] = str(error)
    assert stale == {}


def test_the_list_is_whole():
    listed = {c.id for c in (*CHEATS, *MEASURED)}
    wanted = {f"R{n:02d}" for n in range(1, 89, 2)}
    assert wanted <= listed, sorted(wanted - listed)
    assert {f"C{n}" for n in range(1, 11)} == {c.id for c in CONTROLS} and len((*BENIGN, *ENGINEER)) >= 40
    every = [c.id for c in (*ALL, *MEASURED)]
    assert len(every) == len(set(every)), "each has a name of its own"
    assert all(c.expected for c in (*CHEATS, *MORE, *BEYOND)) and not any(c.expected for c in (*CONTROLS, *BENIGN, *ENGINEER))


def test_what_all_patches_give_away_together_is_held_against_the_first_engine(arena):
    """Each patch may cost a few cache pages of what its incumbent has; all of them together only as much of the first's."""
    lab = context.Lab(arena.context(arena.base, 1))
    lab.remember("a" * 40, {"num_kv_blocks": 1000})
    try:
        lab.remember(arena.base, {"num_kv_blocks": 950})
        assert lab.incumbent_metadata()["num_kv_blocks"] == 950 and lab.first_metadata()["num_kv_blocks"] == 1000
    finally:
        for name in ("a" * 40, arena.base, "first"):
            lab.stated(name).unlink()


@pytest.mark.parametrize("case", STATIC, ids=lambda c: c.id)
def test_cheats_that_the_source_shows_are_stopped_before_anything_starts(arena, case):
    outcome = judge(arena, unsealed(case))
    assert outcome.right, outcome.caught_by()
    assert outcome.stopped and outcome.stopped.gate in ("scope", "policy")


@pytest.mark.parametrize("case", RUNNING, ids=lambda c: c.id)
def test_cheats_are_stopped_for_their_reason(arena, case):
    outcome = judge(arena, unsealed(case))
    assert outcome.right, outcome.caught_by()


@pytest.mark.parametrize("case", MEASURED, ids=lambda c: c.id)
def test_cheats_on_the_measurement_are_stopped(case):
    stopped, by, _ = run(case)
    assert stopped, by


def test_a_good_patch_passes_and_every_gate_states_what_it_cost(arena):
    case = next(c for c in BENIGN if c.id == "B33")
    commit = arena.commit(case.make(arena.sources()), case.idea)
    lab = context.Lab(arena.context(commit, 1))
    try:
        results = [gates.one(gate, lab) for gate in gates.QUICK if gate.name != "seal"]
        results += [gates.one(gate, lab) for gate in gates.FULL if gate.name in ("swap", "physics")]
    finally:
        lab.close()
    assert [r.detail for r in results if not r.passed] == []
    assert all(r.seconds > 0 and r.facts["cpu_s"] >= 0 for r in results)
    assert next(r for r in results if r.gate == "swap").facts["natural_ends"] >= 1


def test_what_sets_the_bands_is_measured_whatever_the_bands_say(arena):
    """On an engine whose tokens lay outside the bands of a small model, the divergence was taken for none."""
    made = arena.context(arena.base, 1)
    before, made.oracle.bands = made.oracle.bands, Bands(-1.0, -1.0, -1.0)  # nothing is within
    lab = context.Lab(made)
    try:
        found = logprobs.against_oracle(lab, lab.setup(), "bands", (16, 33))
        judged = logprobs.compare(lab, lab.setup(), "bands", (16, 33))
    finally:
        lab.close()
        made.oracle.bands = before
    assert not judged.passed
    assert isinstance(found, logprobs.Compared) and len(found.streams) == 2 and found.mean_kl > 0 and found.max_error < 1e-3


def test_an_engine_that_does_not_start_is_a_result_not_an_exception(arena):
    def dead(lab):
        raise LaunchError(RejectReason.BOOT, "no")

    result = gates.one(gates.Gate("boot", "G05", dead), context.Lab(arena.context(arena.base, 1)))
    assert (result.passed, result.reason, result.check) == (False, RejectReason.BOOT, "G05")


def test_ranks_meet_at_the_lowest_level_that_confines(arena):
    """Without namespaces the ranks' library reads more of the host: it must be let."""
    level = next((name for name in ("landlock", "namespaces", "bwrap") if sandbox._try(name) is None), None)
    if level is None:
        pytest.skip("no level works here")
    spec = replace(arena.spec(arena.base, 2, "incumbent"), sandbox=level)
    with launch(spec) as server:
        got = server.client.complete([Request(p, 4) for p in arena.prompts.draw("low", 2, 12)], 60.0)
    assert all(score.ok for score in arena.oracle.score(got))


def test_unknown_stages_and_gates_name_the_known_ones(arena):
    ctx = arena.context(arena.base, 1)
    with pytest.raises(ValueError, match="quick, full"):
        next(gates.run("slow", ctx))
    odd = replace(ctx, protocol=replace(ctx.protocol, full_gates=("swap", "magic")))
    with pytest.raises(ValueError, match=r"magic.*shapes"):
        gates.chosen("full", odd)
