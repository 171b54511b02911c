"""Knowledge: filled from runs, scoped exactly, admitted by a person only, and read by the playbook."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run

from optimizer.knowledge import blueprint as knowledge
from optimizer.knowledge import learning, writeback
from optimizer.knowledge.blueprint import (
    Audit,
    Blueprint,
    BlueprintError,
    Detection,
    Entry,
    Evidence,
    Gain,
    Gains,
    Scope,
    SourceRef,
    Status,
)
from optimizer.knowledge.check import Kind, check
from optimizer.ledger import Ledger
from optimizer.loop import Loop
from optimizer.proposers import Budget, Declined, ProposeContext, get
from optimizer.proposers.toolbox import Toolbox
from optimizer.review import queue as review
from optimizer.run import Run
from optimizer.types import Series
from trace_diff.types import Finding
from trace_diff.types import Status as Looked

FACTS = {"engine": "e", "engine_version": "v", "model": "m", "tp": 4, "batch": 1, "mode": "eager", "device": "cpu:x86_64", "dtype": "float32", "torch": "2.13.0"}
SCOPE = Scope(**{k: [v] for k, v in FACTS.items()})


def entry(name: str = "e1", **change: Any) -> Entry:
    base = {"id": name, "topic": "t", "mechanism": "m", "title": "t", "rule": "r", "why": "w", "detection": Detection(signature="s"), "scope": SCOPE}
    return Entry(**{**base, **change})


def run_with(tmp_path: Path, *script: Series) -> Run:
    run = new_run(tmp_path / "runs" / "run", environment={"hash": "env", "machine": "x86_64", "versions": {"torch": "2.13.0"}})
    fakes = Fakes(run, list(script))
    services = replace(fakes.services(), learn=lambda number: learning.learn(run, number))
    Loop(services, run).go()
    run.ledger.close()
    return run


def kinds(entries: list[Entry], **more: Any) -> set[Kind]:
    return {p.kind for p in check(entries, **more)}


# -- scope and files -------------------------------------------------------------------------------------------


def test_a_scope_holds_for_exactly_its_values_and_is_never_widened() -> None:
    assert SCOPE.holds(FACTS)
    for name, other in {**dict.fromkeys(FACTS, "another"), "tp": 2, "batch": 8}.items():
        assert not SCOPE.holds({**FACTS, name: other}), name
    assert not SCOPE.holds({k: v for k, v in FACTS.items() if k != "torch"})
    assert not Scope().holds(FACTS)  # unknown is not "any"
    assert SCOPE.model_copy(update={"tp": ["any"]}).holds({**FACTS, "tp": 2})


def test_only_accepted_entries_are_found(tmp_path: Path) -> None:
    book = Blueprint((), tmp_path)
    for status in Status:
        book.put(entry(status.value, status=status))
    book.save("t")
    assert [e.id for e in knowledge.accepted(FACTS, tmp_path)] == ["accepted"]
    assert knowledge.accepted({**FACTS, "dtype": "bfloat16"}, tmp_path) == []


def test_unknown_fields_and_wrong_names_are_errors_that_name_file_and_field(tmp_path: Path) -> None:
    book = Blueprint((), tmp_path)
    book.put(entry())
    file = book.save("t")
    data = json.loads(file.read_text())
    data["entries"][0]["surprise"] = 1
    file.write_text(json.dumps(data))
    with pytest.raises(BlueprintError, match=r"t\.json: entries\.0\.surprise"):
        Blueprint.load(tmp_path)
    file.rename(tmp_path / "other.json")
    data["entries"][0].pop("surprise")
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(BlueprintError, match="file name says 'other'"):
        Blueprint.load(tmp_path)


def test_the_shipped_blueprint_matches_its_schema_and_waits_for_a_person() -> None:
    schema = json.loads((knowledge.BLUEPRINT / "schema.json").read_text())
    assert schema == json.loads(json.dumps(knowledge.json_schema()))
    for file in sorted(knowledge.BLUEPRINT.glob("*.json")):
        if file.name != "schema.json":
            jsonschema.validate(json.loads(file.read_text()), schema)
    entries = Blueprint.load().entries()
    assert len(entries) >= 9 and all(e.status in review.WAITING for e in entries)


# -- contradictions --------------------------------------------------------------------------------------------


def test_contradictions_are_found() -> None:
    assert kinds([entry("a"), entry("b")]) == set()
    assert Kind.DUPLICATE_ID in kinds([entry("a"), entry("a")])
    assert kinds([entry("a", demands=["x"]), entry("b", forbids=["x"])]) == {Kind.DEMANDS_WHAT_IS_FORBIDDEN}
    assert kinds([entry("a", constants={"n": 128}), entry("b", constants={"n": 160})]) == {Kind.CONSTANT_DISAGREES}
    narrow = {"n": {"value": 160, "holds_for": {"batch": [1]}}}
    assert kinds([entry("a", constants=narrow)]) == set()
    wide = SCOPE.model_copy(update={"batch": [1, 8]})
    assert kinds([entry("a", constants=narrow, scope=wide)]) == {Kind.CONSTANT_NEEDS_NARROWER_SCOPE}
    assert kinds([entry("a", supersedes=["gone"])]) == {Kind.UNKNOWN_REFERENCE}
    assert kinds([entry("a", demands=["x"], forbids=["x"])]) == {Kind.SELF_CONFLICT}
    assert kinds([entry("a"), entry("b", helps=False)]) == {Kind.OPPOSITE_VERDICTS}


def test_a_conflict_that_is_settled_or_cannot_meet_is_none() -> None:
    one, two = entry("a", demands=["x"]), entry("b", forbids=["x"], scope=SCOPE.model_copy(update={"tp": [2]}))
    assert kinds([one, two]) == set()
    assert kinds([one, entry("b", forbids=["x"], supersedes=["a"])]) == set()
    assert kinds([one, entry("b", forbids=["x"], status=Status.REJECTED)]) == set()


def test_audits_are_run_on_the_engine_that_earned_the_entry() -> None:
    audit = Audit(kind="code", pattern=r"empty_like", files=["qwen.py"], most=0)
    sources = {"engine/qwen.py": "x = torch.empty_like(y)\n", "engine/sampler.py": "empty_like"}
    assert kinds([entry("a", audit=[audit])], evidence={"a": sources}) == {Kind.AUDIT_FAILS_ON_ITS_EVIDENCE, Kind.AUDIT_MISSES_FILES}
    assert kinds([entry("a", audit=[audit])], evidence={"a": {"engine/qwen.py": ""}}) == set()


def test_stale_and_missing_evidence_and_loosened_gates_are_found() -> None:
    proof = Evidence(gates_digest="old", traces={"before": "h1"}, ledger_hash="l")
    assert kinds([entry("a", evidence=proof)], gates_digest="new") == {Kind.STALE_GATES}
    assert kinds([entry("a", evidence=proof)], files=["h2"]) == {Kind.MISSING_EVIDENCE}
    gain = Gains(marginal=Gain(ratio=0.9, ci95=(0.8, 0.95), pairs=6))
    assert kinds([entry("a", gain=gain)]) == {Kind.MISSING_EVIDENCE}
    assert kinds([entry("a", rule="Lower the throughput floor of the gate first")]) == {Kind.LOOSENS_A_GATE}
    assert kinds([entry("a", preconditions=["disable the oracle for this shape"])]) == {Kind.LOOSENS_A_GATE}


def test_the_review_shows_stale_evidence_and_the_check_fails_for_accepted_entries_only(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from optimizer.cli import app

    proof = Evidence(gates_digest="old", traces={"before: traces/gone.json.gz": "0" * 64}, ledger_hash="l")
    book = Blueprint((), tmp_path)
    book.put(entry("a", evidence=proof, demands=["x"], forbids=["x"]))
    book.save("t")
    item = review.queue(tmp_path / "none", tmp_path)[0]
    assert {p.kind for p in review.problems(item, tmp_path)} >= {Kind.STALE_GATES, Kind.MISSING_EVIDENCE, Kind.SELF_CONFLICT}
    check_it = ["knowledge", "check", "--blueprint", str(tmp_path)]
    waiting = CliRunner().invoke(app, check_it)
    assert waiting.exit_code == 0 and "stale-gates" in waiting.output and "missing-evidence" in waiting.output
    book.put(entry("a", evidence=proof, demands=["x"], forbids=["x"], status=Status.ACCEPTED))
    book.save("t")
    assert CliRunner().invoke(app, check_it).exit_code == 1


# -- from a run to the blueprint -------------------------------------------------------------------------------


def test_an_accepted_patch_becomes_a_proposed_entry_filled_from_the_ledger(tmp_path: Path) -> None:
    run = run_with(tmp_path, fake.WIN, fake.NO_OP)
    found = {e.evidence.attempt: e for e in writeback.proposals(run.dir).entries()}
    win = found[1]
    assert win.status is Status.PROPOSED and win.helps and win.role == "win"
    assert win.gain.marginal is not None and win.gain.marginal.ratio == pytest.approx(0.7, rel=0.02)
    assert win.patch is not None and "+STEP_US = 700" in win.patch
    assert win.scope.tp == [1] and win.scope.dtype == ["float32"] and "any" not in json.dumps(win.scope.model_dump())
    accepted = next(x for x in run.ledger.lines() if x["kind"] == "accepted")
    assert win.evidence.ledger_hash == accepted["hash"] and win.evidence.gates_digest == "digest-of-seal"
    assert any(k.startswith("after") for k in win.evidence.traces) and any(k.startswith("before") for k in win.evidence.traces)
    assert not found[2].helps and "No effect" in found[2].title
    assert check([win, found[2]]) == []


@pytest.mark.parametrize(
    ("stages", "ruled_out"),
    [
        ([("screened", None, [0.50, 1.10]), ("decided", None, [0.63, 1.10])], False),  # a loud machine: 20 % may well be there
        ([("screened", None, [0.50, 1.10]), ("decided", None, [0.95, 1.04])], True),
        ([("screened", None, [0.93, 1.30])], True),
        ([("screened", 0, [0.97, 1.02])], False),  # of an enabler alone: nothing of the series
        ([], False),
    ],
)
def test_what_could_not_be_resolved_is_no_knowledge(stages, ruled_out) -> None:
    """Once an undecided +20 % became `brings nothing`, and the next engine never tried the patch that pays there."""
    measured = {kind: [{"member": member, "pairs": 4, "ci95": ci}] for kind, member, ci in stages}
    attempt: Any = SimpleNamespace(data=lambda kind: measured.get(kind, []))
    assert writeback._ruled_out(attempt) is ruled_out


def test_the_step_before_is_that_of_the_engine_which_the_patch_was_tried_on(tmp_path: Path) -> None:
    """Once it was always the first engine's: an accepted commit is captured before it gets its trailers."""
    run = run_with(tmp_path, fake.WIN, fake.one(fake.speed(500, was=700)))
    found = {e.evidence.attempt: list(e.evidence.traces) for e in writeback.proposals(run.dir).entries()}
    assert found[1] == ["before: traces/baseline/rank0.json.gz", "after: traces/1/rank0.json.gz"]
    assert found[2] == ["before: traces/1/rank0.json.gz", "after: traces/2/rank0.json.gz"]


def test_wrong_tokens_teach_nothing_and_a_series_names_its_enabler(tmp_path: Path) -> None:
    run = run_with(tmp_path, fake.WRONG_TOKENS, fake.ENABLED_WIN)
    found = writeback.proposals(run.dir).entries()
    assert [(e.evidence.attempt, e.role) for e in sorted(found, key=lambda e: e.id)] == [(2, "enabler"), (2, "win")]
    assert all(e.gain.series is not None and e.gain.marginal is None for e in found)
    assert found[-1].failed_variants and "wrong_tokens" in found[-1].failed_variants[0].reason
    assert all(e.pitfalls == ["Can end in wrong tokens (quick): attempt 1."] for e in found)


def repository(place: Path) -> Path:
    place.mkdir()
    for args in (["init", "-q"], ["config", "user.name", "A Reviewer"], ["config", "user.email", "r@example.org"]):
        subprocess.run(["git", *args], cwd=place, check=True)
    (place / "blueprint").mkdir()
    return place / "blueprint"


def test_a_decision_is_an_entry_a_commit_and_a_ledger_line(tmp_path: Path) -> None:
    run, folder = run_with(tmp_path, fake.WIN, fake.NO_OP), repository(tmp_path / "repo")
    items = review.queue(tmp_path / "runs", folder)
    assert len(items) == 2
    done = review.accept(review.find(items, items[0].entry.id), folder=folder)
    assert done.reviewer == "A Reviewer" and done.decided_on
    assert knowledge.accepted(learning.facts(run), folder) == [done]
    review.reject(items[1], "measured on one machine only", folder=folder)
    log = subprocess.run(["git", "log", "--format=%s|%an"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert log.splitlines() == [f"Reject knowledge {items[1].entry.id}|A Reviewer", f"Accept knowledge {done.id}|A Reviewer"]
    lines = [x for x in Ledger(run.dir / "ledger.jsonl").lines() if x["kind"] == "reviewed"]
    assert [(x["data"]["entry"], x["data"]["decision"]) for x in lines] == [(done.id, "accepted"), (items[1].entry.id, "rejected")]
    body = subprocess.run(["git", "log", "--format=%B"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert all(f"Ledger-hash: {x['hash']}" in body for x in lines)
    assert review.queue(tmp_path / "runs", folder) == []  # decided once, and still so when entries are filled again


def test_while_the_run_goes_on_nothing_is_decided(tmp_path: Path) -> None:
    run, folder = run_with(tmp_path, fake.WIN), repository(tmp_path / "repo")
    item = review.queue(tmp_path / "runs", folder)[0]
    run.ledger.append("budget", None, {})  # the run's process holds its ledger
    with pytest.raises(review.ReviewError, match="still going"):
        review.accept(item, folder=folder)
    run.ledger.close()
    assert list(folder.iterdir()) == [] and len(review.queue(tmp_path / "runs", folder)) == 1


@pytest.mark.parametrize(("record", "tp", "count"), [("h200-tp1", 1, 8), ("h200-tp2", 2, 10)])
def test_what_ships_as_proposed_is_what_the_committed_record_says(tmp_path: Path, repo: Path, record, tp, count) -> None:
    made = writeback.ship(repo / "reports" / "gallery" / record, tmp_path, record)
    shipped = {e.id: e for e in Blueprint.load().entries() if e.id.startswith(f"{record}.")}
    assert {e.id for e in made} == set(shipped) and len(made) == count
    for entry in made:
        if shipped[entry.id].status is Status.PROPOSED:  # a person may have decided since
            assert entry == shipped[entry.id]
        assert entry.scope.device == ["NVIDIA H200"] and entry.scope.dtype == ["bfloat16"] and "dummy" not in str(entry.scope.model)
        # A faster all-reduce was worth 15 % between graphs, and nothing in front of ranks that launch kernel by kernel.
        assert (entry.scope.tp, entry.scope.mode) == ([tp], ["eager" if entry.evidence.attempt == 1 else "graph"])


def test_what_was_seen_between_graphs_speaks_of_a_run_once_it_has_some(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", environment={"hash": "env", "machine": "x86_64", "versions": {"torch": "2.13.0"}})
    folder = tmp_path / "book"
    known = Blueprint((), folder)
    known.put(entry("between-graphs", status=Status.ACCEPTED, reviewer="me", scope=Scope(**{k: [v] for k, v in (learning.facts(run) | {"mode": "graph"}).items()})))
    known.save("t")
    run.request = replace(run.request, knowledge=folder)
    assert [e.id for e in learning.accepted(run, "graph")] == ["between-graphs"] and not learning.accepted(run)
    run.ledger.append("captured", None, {"commit": run.base, "tree": "t", "traces": [], "metadata": {"cuda_graph": True}})
    assert [e.id for e in learning.accepted(run)] == ["between-graphs"]


def test_what_a_guard_stopped_is_not_called_without_effect() -> None:
    stopped = Blueprint.load().get("h200-tp1.5")  # 0.949 of the time
    assert not stopped.helps and stopped.title.startswith("Made something else worse: ") and "worse is mended" in stopped.rule


def test_an_id_is_never_given_to_something_else(tmp_path: Path) -> None:
    one, two = run_with(tmp_path / "a", fake.WIN), run_with(tmp_path / "b", fake.WIN, fake.NO_OP)
    folder = repository(tmp_path / "repo")
    assert [e.id for e in writeback.ship(one.dir, folder)] == ["run.1"]
    assert review.queue(tmp_path / "a" / "runs", folder)[0].run is None  # the same entry is not there twice
    with pytest.raises(BlueprintError, match="ids are never reused"):
        writeback.ship(two.dir, folder)
    item = review.find([i for i in review.queue(tmp_path / "b" / "runs", folder) if i.run], "run.1")
    assert any(p.kind is Kind.DUPLICATE_ID and p.blocking for p in review.problems(item, folder))
    for decide in (lambda: review.accept(item, folder=folder), lambda: review.reject(item, "no", folder=folder)):
        with pytest.raises(review.ReviewError, match="ids are never reused"):
            decide()
    assert {e.id for e in writeback.ship(two.dir, folder, "other")} == {"other.1", "other.2"}
    assert [i.entry.id for i in review.queue(tmp_path / "b" / "runs", folder)] == ["other.1", "other.2", "run.1"]
    review.reject(review.find(review.queue(tmp_path / "none", folder), "other.1"), "slow elsewhere", folder=folder)
    assert [e.id for e in writeback.ship(two.dir, folder, "other")] == ["other.2"]  # what was decided stays
    assert Blueprint.load(folder).get("other.1").status is Status.REJECTED


def test_random_weights_are_known_by_their_shape_and_an_engine_by_its_text(tmp_path: Path) -> None:
    shape = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096}
    run = new_run(tmp_path / "run", model=shape, weights_seed=7)
    assert learning.facts(run)["model"] == "qwen3 36x4096, random weights"
    assert learning.version({"a.py": "x = 1\n"}) != learning.version({"a.py": "x = 1  # why\n"})


def test_nothing_contradictory_or_vague_can_be_accepted(tmp_path: Path) -> None:
    book = Blueprint((), tmp_path)
    book.put(entry("a", demands=["x"], status=Status.ACCEPTED))
    book.put(entry("b", forbids=["x"], status=Status.IMPORTED, scope=Scope()))
    book.save("t")
    item = review.find(review.queue(tmp_path / "none", tmp_path), "b")
    with pytest.raises(review.ReviewError, match="scope says nothing"):
        review.accept(item, folder=tmp_path)
    with pytest.raises(review.ReviewError, match="forbids it"):
        review.accept(item, scope={k: [v] for k, v in FACTS.items()}, folder=tmp_path)
    elsewhere = {**{k: [v] for k, v in FACTS.items()}, "tp": [2]}
    assert review.accept(item, reviewer="me", scope=elsewhere, folder=tmp_path).scope.tp == [2]
    with pytest.raises(review.ReviewError, match="scope: nonsense"):
        review.accept(item, scope={"nonsense": [1]}, folder=tmp_path)
    with pytest.raises(review.ReviewError, match="needs a reason"):
        review.reject(item, " ", folder=tmp_path)


# -- knowledge that something reads ----------------------------------------------------------------------------

SOURCES = {"engine/run.py": "import torch\n\n\nclass Runner:\n    def step(self, ids):\n        return self.model(ids)\n"}
FOUND = (
    Finding("autograd-recording", "autograd-recording", Looked.FOUND, "recording", bound_us=100.0, skills=("inference-mode",)),
    Finding("host-reads", "host-reads", Looked.FOUND, "reads", bound_us=50.0, skills=("remove-host-reads",)),
)


def propose(*entries: Entry, **more: Any) -> Series | Declined:
    ctx = ProposeContext(SOURCES, FOUND, knowledge=entries, budget=Budget(token_us=1000.0, margin=0.02), **more)
    return get("playbook").propose(ctx)


def test_accepted_knowledge_changes_what_the_playbook_skips_and_with_which_parameters() -> None:
    without = propose()
    assert isinstance(without, Series) and without.patches[0].mechanism == "inference-mode"
    skipped = propose(entry("k", mechanism="inference-mode", helps=False, why="measured twice"))
    assert isinstance(skipped, Declined) and "measured twice" in str(skipped)
    tuned = propose(entry("k", mechanism="inference-mode", params={"how": "no_grad"}))
    assert isinstance(tuned, Series) and tuned.patches[0].params["how"] == "no_grad"


def order(*entries: Entry) -> list[str]:
    """Skills in the order in which the playbook would try them."""
    ctx = ProposeContext(SOURCES, FOUND, knowledge=entries, budget=Budget(token_us=1000.0, margin=0.02))
    return [skill.name for _, skill, _ in get("playbook")._candidates(ctx)]  # type: ignore[attr-defined]


def test_deleting_an_accepted_entry_changes_order_skip_and_parameter() -> None:
    """The same question, asked with the entries and without them: all three answers differ."""
    proven = entry("p", mechanism="remove-host-reads", gain=Gains(marginal=Gain(ratio=0.97, ci95=(0.9, 0.99), pairs=6)))
    assert order()[0] == "inference-mode" and order(proven)[0] == "remove-host-reads"  # though its finding is the cheaper one
    assert isinstance(propose(), Series) and isinstance(propose(entry("n", mechanism="inference-mode", helps=False)), Declined)
    tuned = propose(entry("t", mechanism="inference-mode", params={"how": "x"}))
    bare = propose()
    assert isinstance(tuned, Series) and isinstance(bare, Series)
    assert tuned.patches[0].params == {"how": "x"} and bare.patches[0].params == {}


def test_an_agent_reads_where_a_fast_path_is_and_is_told_what_to_ask_first() -> None:
    ref = SourceRef(repository="vllm", file="csrc/layernorm_kernels.cu", commit="abc1234")
    known = entry("k", source_refs=[ref], remaining_gaps=["the sampler"])
    rows = json.loads(Toolbox(ProposeContext(SOURCES, FOUND, knowledge=(known, entry("l"))), {}, "me").call("knowledge", {}))
    assert rows[0]["source_refs"] == [ref.model_dump()] and rows[0]["remaining_gaps"] == ["the sampler"]
    assert "exist here" in rows[0]["ask_first"] and "ask_first" not in rows[1]


def test_an_entry_that_advises_against_what_was_faster_shows_both() -> None:
    gain = knowledge.Gain(ratio=0.949, ci95=(0.929, 0.969), pairs=4)
    against = entry("g", helps=False, gain=knowledge.Gains(marginal=gain))
    assert review.effect(against) == "advises against: +5.4% [+3.2%, +7.6%]"
    assert review.effect(entry("n", helps=False)) == "advises against: not measured here"
