"""The playbook's choices, skills as folders, and replay of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loop_fakes as fake
import pytest
from loop_fakes import Fakes, new_run

from optimizer.loop import Loop
from optimizer.patching import apply_edits, ast_hash
from optimizer.proposers import Budget, Declined, ProposeContext, get
from optimizer.proposers.base import HistoryItem
from optimizer.proposers.playbook import Playbook
from optimizer.proposers.replay import ReplayError, record
from optimizer.proposers.skillbook import SkillError, load_all
from optimizer.types import Series
from trace_diff.types import Finding, Status

SOURCES = {"a.py": "X = 1\n"}
CODEMOD = """
PARAMS = {params}
def propose(sources, finding):
    if "{mark}" in sources["a.py"]:
        return {{"declined": "already there"}}
    value = finding["params"].get("n", 0)
    return {{"sources": {{"a.py": sources["a.py"] + "{mark} = " + str(value) + "\\n"}}, "predicted_us": {predicted}}}
"""


def skill(folder: Path, name: str, answers: str = "rule", params: str = "{}", predicted: float = 10.0, code: str | None = None) -> None:
    place = folder / name
    place.mkdir(parents=True)
    place.joinpath("SKILL.md").write_text(f"---\nname: {name}\ndescription: does {name}\nmetadata:\n  answers: {answers}\n---\nText.\n")
    mark = name.upper().replace("-", "_")
    place.joinpath("codemod.py").write_text(code or CODEMOD.format(params=params, mark=mark, predicted=predicted))


def finding(name: str = "rule", bound: float | None = 100.0, skills: tuple[str, ...] = (), **more: Any) -> Finding:
    return Finding(name, name.partition(":")[0], Status.FOUND, name, bound_us=bound, skills=skills, **more)


def propose(folder: Path, *findings: Finding, history: tuple[HistoryItem, ...] = (), token_us: float = 1000.0, sources: dict[str, str] | None = None) -> Any:
    ctx = ProposeContext(sources or SOURCES, findings, history=history, budget=Budget(token_us=token_us, margin=0.02))
    return Playbook([folder], built_in=None).propose(ctx)


def test_a_skill_is_added_by_adding_one_folder(tmp_path: Path) -> None:
    skill(tmp_path, "mine", answers="some-rule")
    answer = propose(tmp_path, finding("some-rule:with-suffix"))
    assert isinstance(answer, Series)
    patch = answer.patches[0]
    assert patch.mechanism == "mine" and patch.finding_ids == ("some-rule:with-suffix",)
    assert apply_edits(SOURCES, patch)["a.py"] == "X = 1\nMINE = 0\n"


def test_the_dearest_finding_comes_first_and_named_skills_before_volunteers(tmp_path: Path) -> None:
    for name, answers in (("one", "cheap"), ("two", "dear"), ("three", "dear")):
        skill(tmp_path, name, answers)
    answer = propose(tmp_path, finding("cheap", 30.0), finding("dear", 90.0, skills=("two",)), finding("unbounded", None, skills=("one",)))
    assert answer.patches[0].mechanism == "two"


def test_what_cannot_reach_the_margin_is_not_tried(tmp_path: Path) -> None:
    skill(tmp_path, "mine")
    answer = propose(tmp_path, finding(bound=15.0))
    assert isinstance(answer, Declined) and "below the margin of 2.00%" in str(answer)
    assert isinstance(propose(tmp_path, finding(bound=25.0)), Series)


def test_what_a_patch_answers_in_passing_counts_against_the_margin_too(tmp_path: Path) -> None:
    """Of a step whose idle time was all waiting for late ranks, nothing was left for the finding that graphs answer."""
    skill(tmp_path, "mine", code=CODEMOD.format(params="{}", mark="MINE", predicted="None").replace('"predicted_us"', '"also": ["waits"], "predicted_us"'))
    answer = propose(tmp_path, finding(bound=0.0), finding("waits", 400.0))
    assert isinstance(answer, Series)
    assert answer.patches[0].predicted_us == 400.0 and answer.patches[0].finding_ids == ("rule", "waits")
    assert isinstance(propose(tmp_path, finding(bound=0.0), finding("waits", 15.0)), Declined)


def test_a_finding_without_time_of_its_own_does_not_count_what_it_borrows_twice(tmp_path: Path) -> None:
    """A late rank is the other ranks' waiting: 44 ms of it were predicted twice, and more than the step takes in all."""
    skill(tmp_path, "mine", answers="waits", code=CODEMOD.format(params="{}", mark="MINE", predicted="None").replace('"predicted_us"', '"also": ["waits"], "predicted_us"'))
    answer = propose(tmp_path, finding("late", None, skills=("mine",)), finding("waits", 400.0, skills=("mine",)))
    assert sum(patch.predicted_us for patch in answer.patches) == 400.0


def test_a_skill_named_in_passing_is_bounded_by_what_it_answers_itself(tmp_path: Path) -> None:
    skill(tmp_path, "mine", answers="own", predicted=500.0)
    waits = finding("waits", 900.0, skills=("mine",))
    answer = propose(tmp_path, waits, finding("own", 40.0))
    assert answer.patches[0].finding_ids == ("waits",) and answer.patches[0].predicted_us == 40.0
    small = propose(tmp_path, waits, finding("own", 5.0))
    assert isinstance(small, Declined) and "below the margin" in str(small)
    alone = propose(tmp_path, waits)
    assert isinstance(alone, Declined) and "what it answers itself (own) was not found" in str(alone)


def item(**change: Any) -> HistoryItem:
    base: HistoryItem = {"attempt": 1, "verdict": "reject", "reason": "wrong_tokens", "mechanism": "mine", "finding_ids": ["rule"], "params": {}, "ast_hash": "other", "token_us": 1000.0}
    return {**base, **change}  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("history", "token_us", "why"),
    [
        ([item()], 1000.0, "rejected for wrong_tokens"),
        ([item(verdict="parked", reason="drift")], 1000.0, "waits for a person"),
        ([item(reason="no_gain")], 900.0, "not much faster since"),
        ([item(verdict="undecided", reason=None)], 900.0, "not much faster since"),
        ([item(reason="infrastructure")] * 2, 1000.0, "stopped twice"),
        ([item(mechanism="x", ast_hash=ast_hash({"a.py": "X = 1\nMINE = 0\n"}))], 1000.0, "was this very program"),
    ],
)
def test_history_forbids(history: list[HistoryItem], token_us: float, why: str, tmp_path: Path) -> None:
    skill(tmp_path, "mine")
    answer = propose(tmp_path, finding(), history=tuple(history), token_us=token_us)
    assert isinstance(answer, Declined) and why in str(answer)


@pytest.mark.parametrize(
    ("history", "token_us"),
    [
        ([item(finding_ids=["another"])], 1000.0),
        ([item(reason="no_gain")], 700.0),  # the rest of the step has shrunk: the effect may show now
        ([item(reason="infrastructure")], 1000.0),
        ([item(verdict="accept", reason=None)], 1000.0),  # there may be another place
    ],
)
def test_history_allows(history: list[HistoryItem], token_us: float, tmp_path: Path) -> None:
    skill(tmp_path, "mine")
    assert isinstance(propose(tmp_path, finding(), history=tuple(history), token_us=token_us), Series)


def test_parameters_are_searched_in_order(tmp_path: Path) -> None:
    skill(tmp_path, "mine", params='{"n": [4, 8]}')
    first = propose(tmp_path, finding())
    assert first.patches[0].params == {"n": 4}
    second = propose(tmp_path, finding(), history=(item(reason="no_gain", params={"n": 4}),))
    assert second.patches[0].params == {"n": 8}
    both = (item(reason="no_gain", params={"n": 4}), item(reason="no_gain", params={"n": 8}))
    assert isinstance(propose(tmp_path, finding(), history=both), Declined)


def test_a_prediction_never_exceeds_the_bound(tmp_path: Path) -> None:
    skill(tmp_path, "mine", predicted=500.0)
    assert propose(tmp_path, finding(bound=100.0)).patches[0].predicted_us == 100.0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def propose(s, f):\n    raise KeyError('x')\n", "codemod failed: KeyError"),
        ("def propose(s, f):\n    return None\n", "pattern is not there"),
        ("def propose(s, f):\n    return {'sources': {'a.py': 'def ('}}\n", "unparsable"),
        ("def propose(s, f):\n    return {'sources': {'a.py': 'Y = 1\\n' * 200}}\n", "over the envelope"),
        ("def propose(s, f):\n    return {'sources': {f'{i}.py': 'Y = 1\\n' for i in range(4)}}\n", "over the envelope"),
        ("def propose(s, f):\n    return {'sources': dict(s)}\n", "changes nothing"),
    ],
)
def test_a_faulty_codemod_is_a_decline_with_its_reason(code: str, why: str, tmp_path: Path) -> None:
    skill(tmp_path, "mine", code=code)
    answer = propose(tmp_path, finding())
    assert isinstance(answer, Declined) and why in str(answer)


def test_a_codemod_may_answer_with_a_series(tmp_path: Path) -> None:
    code = "def propose(s, f):\n    return [{'sources': {'a.py': 'X = 1\\nY = 2\\n'}, 'predicted_us': 0.0}, {'sources': {'a.py': 'X = 1\\nY = 2\\nZ = 3\\n'}}]\n"
    skill(tmp_path, "mine", code=code)
    series = propose(tmp_path, finding())
    assert [p.predicted_us for p in series.patches] == [0.0, 100.0]
    after = apply_edits(apply_edits(SOURCES, series.patches[0]), series.patches[1])
    assert after["a.py"] == "X = 1\nY = 2\nZ = 3\n"


def test_enablers_that_act_come_first_in_one_series_and_never_alone(tmp_path: Path) -> None:
    needs = "def propose(s, f):\n    if 'HELPER' not in s['a.py']:\n        return {'declined': 'needs helper'}\n    return {'sources': {'a.py': s['a.py'] + 'WIN = 1\\n'}}\n"
    skill(tmp_path, "helper", answers="none")
    skill(tmp_path, "win", code=needs)
    file = tmp_path / "win/SKILL.md"
    file.write_text(file.read_text().replace("  answers: rule\n", "  answers: rule\n  enablers: helper\n"))
    series = propose(tmp_path, finding())
    assert [(p.mechanism, p.predicted_us) for p in series.patches] == [("helper", 0.0), ("win", 100.0)]
    already = propose(tmp_path, finding(), sources={"a.py": "X = 1\nHELPER = 0\n"})
    assert [p.mechanism for p in already.patches] == ["win"]
    file.with_name("codemod.py").write_text("def propose(s, f):\n    return {'declined': 'not here'}\n")
    assert isinstance(propose(tmp_path, finding()), Declined)


def test_frozen_files_are_not_shown_to_codemods_and_still_count_in_the_hash(tmp_path: Path) -> None:
    code = "def propose(s, f):\n    return {'sources': {n: t + 'Y = 1\\n' for n, t in s.items()}}\n"
    skill(tmp_path, "mine", code=code)
    sources = {"a.py": "X = 1\n", "models/train.py": "Z = 1\n"}
    after = {"a.py": "X = 1\nY = 1\n", "models/train.py": "Z = 1\n"}
    ctx = ProposeContext(sources, [finding()], frozen=("models/**",))
    series = Playbook([tmp_path], built_in=None).propose(ctx)
    assert isinstance(series, Series) and [e.file for e in series.patches[0].edits] == ["a.py"]
    tried = ProposeContext(sources, [finding()], frozen=("models/**",), history=(item(mechanism="x", ast_hash=ast_hash(after)),))
    assert "this very program" in str(Playbook([tmp_path], built_in=None).propose(tried))


def test_broken_folders_are_errors_that_name_themselves(tmp_path: Path) -> None:
    skill(tmp_path / "a", "mine", code="x = \n")
    with pytest.raises(SkillError, match=r"mine/codemod\.py: cannot be loaded: SyntaxError"):
        load_all([tmp_path / "a"])
    skill(tmp_path / "b", "mine")
    (tmp_path / "b/mine/SKILL.md").write_text("no front matter")
    with pytest.raises(SkillError, match="front matter"):
        load_all([tmp_path / "b"])
    skill(tmp_path / "c", "mine")
    with pytest.raises(SkillError, match="already used"):
        load_all([tmp_path / "c", tmp_path / "c"])


def test_the_same_question_gets_the_same_answer(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        skill(tmp_path, name)
    answers = [propose(tmp_path, finding(), finding("other")) for _ in range(3)]
    assert isinstance(answers[0], Series) and answers[0] == answers[1] == answers[2]


def test_a_run_is_replayed_patch_by_patch(tmp_path: Path) -> None:
    run = new_run(tmp_path / "one")
    Loop(Fakes(run, [fake.NO_OP, fake.WIN]).services(), run).go()
    file = tmp_path / "recording.jsonl"
    assert record(run.dir, file) == 2
    sources = run.repo.sources(run.base, run.target.editable)
    for recording in (run.dir, file):
        replay = get("replay", recording=str(recording))
        ctx = ProposeContext(sources, [])
        assert [replay.propose(ctx), replay.propose(ProposeContext(sources, [], history=(item(),)))] == [fake.NO_OP, fake.WIN]
        ended = replay.propose(ProposeContext(sources, [], history=(item(), item())))
        assert isinstance(ended, Declined) and "ends after 2" in str(ended)
        other = replay.propose(ProposeContext({"model.py": "nothing like it\n"}, []))
        assert isinstance(other, Declined) and "made for other sources" in str(other)


def test_a_recording_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    for recording, why in ((None, "recording="), (tmp_path, "no series"), (tmp_path / "gone", "not a recording")):
        with pytest.raises(ReplayError, match=why):
            get("replay", recording=recording)
    with pytest.raises(ValueError, match="known: playbook, claude, mcp, replay"):
        get("nobody")
