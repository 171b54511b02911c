"""What comes out of a run can be merged: on the tree, on a branch, by mail; and its claims can be checked."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import loop_fakes as fake
import pytest
from loop_fakes import ENGINE, Fakes, new_run

from optimizer import seal
from optimizer.apply import NotApplied, to_branch, to_tree
from optimizer.export import export
from optimizer.ledger import canonical, line_hash
from optimizer.loop import Loop
from optimizer.run import Run, load
from optimizer.truth import weights
from optimizer.verify import verify

GIT = ["git", "-c", "user.name=U", "-c", "user.email=u@u", "-c", "init.defaultBranch=main"]


def git(where: Path, *args: str) -> str:
    return subprocess.run([*GIT, *args], cwd=where, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Run:
    """A run with a series of two and another win, on a copy of the fake engine inside a user's repository."""
    home = tmp_path_factory.mktemp("user")
    shutil.copytree(ENGINE, home / "code" / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "README").write_text("mine\n")
    git(home, "init", "-q")
    git(home, "add", "-A")
    git(home, "commit", "-q", "-m", "start")
    engine = home / "code" / "engine"
    run = new_run(
        home / "runs" / "r", engine=engine, gates_digest=seal.digest(), weights_sha256=weights.digest(fake.WEIGHTS)
    )
    script = [fake.ENABLED_WIN, fake.one(fake.speed(500, was=700, title="faster | still"))]
    Loop(Fakes(run, script).services(), run).go()
    run.ledger.close()
    return run


def final(run: Run) -> str:
    return run.repo.incumbent()


@pytest.fixture
def user(finished, tmp_path) -> Path:
    """A clone of the user's repository; returns the engine's folder in it."""
    git(tmp_path, "clone", "-q", str(finished.target.root.parent.parent), "clone")
    return tmp_path / "clone" / "code" / "engine"


def test_applying_to_the_tree_gives_the_final_engine(finished, user):
    done = to_tree(finished.repo, finished.base, final(finished), user)
    assert done.commits == 3 and done.files == ("model.py",)
    assert (user / "model.py").read_text() == finished.repo.show(final(finished), "model.py")
    again = to_tree(finished.repo, finished.base, final(finished), user)
    assert again.files == ()


def test_applying_merges_with_what_the_user_changed_elsewhere(finished, user):
    (user / "model.py").write_text((user / "model.py").read_text() + "\n# mine\n")
    to_tree(finished.repo, finished.base, final(finished), user)
    text = (user / "model.py").read_text()
    assert "STEP_US = 500" in text and text.endswith("# mine\n")


def test_a_conflict_refuses_the_whole(finished, user):
    (user / "model.py").write_text((user / "model.py").read_text().replace("STEP_US = 1000", "STEP_US = 999"))
    before = {p: p.read_bytes() for p in user.iterdir() if p.is_file()}
    with pytest.raises(NotApplied, match=r"model\.py changed since the snapshot"):
        to_tree(finished.repo, finished.base, final(finished), user)
    assert {p: p.read_bytes() for p in user.iterdir() if p.is_file()} == before


def test_a_folder_that_is_no_checkout_is_called_so(finished, tmp_path):
    """An empty or missing folder was told that a file of it was removed since the snapshot."""
    (tmp_path / "empty").mkdir()
    for name, why in (("missing", "no such folder"), ("empty", "no checkout of the target: it has none of")):
        with pytest.raises(NotApplied, match=why):
            to_tree(finished.repo, finished.base, final(finished), tmp_path / name)
    assert not (tmp_path / "missing").exists() and not list((tmp_path / "empty").iterdir())


def test_a_failure_half_way_undoes_what_was_done(finished, user, monkeypatch):
    base = finished.base
    text = finished.repo.show(base, "server.py")
    both = finished.repo.commit_sources(final(finished), {"server.py": text + "\n# two\n", "new.py": "x = 1\n"}, "two", "", {})
    before = {p.name: p.read_bytes() for p in user.iterdir() if p.is_file()}
    real, calls = Path.replace, []

    def failing(self, to):
        calls.append(to)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(self, to)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(NotApplied, match="the tree is as it was"):
        to_tree(finished.repo, base, both, user)
    assert {p.name: p.read_bytes() for p in user.iterdir() if p.is_file()} == before


def test_a_branch_gets_one_commit_per_patch_and_the_tree_stays(finished, user):
    top = user.parent.parent
    done = to_branch(finished.repo, finished.base, final(finished), user, "fast")
    assert done.commits == 3
    assert git(top, "rev-list", "--count", "main..fast").strip() == "3"
    assert git(top, "show", "fast:code/engine/model.py") == finished.repo.show(final(finished), "model.py")
    assert "Gates-digest" in git(top, "log", "-1", "--format=%B", "fast")
    assert git(top, "status", "--porcelain") == ""
    with pytest.raises(NotApplied, match="exists already"):
        to_branch(finished.repo, finished.base, final(finished), user, "fast")


def test_a_branch_needs_a_repository_and_a_fit(finished, user, tmp_path):
    with pytest.raises(NotApplied, match="in no git repository"):
        to_branch(finished.repo, finished.base, final(finished), tmp_path, "x")
    (user / "model.py").write_text("other\n")
    git(user, "commit", "-q", "-a", "-m", "other")
    with pytest.raises(NotApplied, match="changed since the snapshot"):
        to_branch(finished.repo, finished.base, final(finished), user, "fast")
    assert "fast" not in git(user, "branch")


def test_nothing_accepted_is_nothing_to_apply(finished, user):
    with pytest.raises(NotApplied, match="accepted nothing"):
        to_tree(finished.repo, finished.base, finished.base, user)


def test_an_exported_series_goes_through_git_am(finished, user, tmp_path):
    paths = export(finished, tmp_path / "out")
    patches = [str(p) for p in paths if p.suffix == ".patch"]
    assert [Path(p).name[:5] for p in patches] == ["0001-", "0002-", "0003-"]
    git(user.parent.parent, "am", "-q", "--directory=code/engine", *patches)
    assert (user / "model.py").read_text() == finished.repo.show(final(finished), "model.py")
    body = (tmp_path / "out" / "PULL_REQUEST.md").read_text()
    for words in ("2.0", "faster \\| still", "host-reads", "Ledger-hash", finished.ledger.lines()[-1]["hash"]):
        assert words in body


def checks(place: Path) -> dict[str, bool | None]:
    return {check.what: check.ok for check in verify(place)}


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    shutil.copytree(finished.dir, tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_verifies(finished, monkeypatch):
    monkeypatch.setattr(seal, "verify", lambda: None)
    found = checks(finished.dir)
    assert all(found.values()), found
    assert {"attempt 1", "attempt 2", "repository", "weights"} <= found.keys()


def test_a_changed_ledger_line_is_found(copy):
    path = copy / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"passed":true', b'"passed":null', 1))
    assert checks(copy) == {"ledger chain": False}


def test_a_chain_that_was_forged_whole_is_still_found_by_what_it_says(copy):
    run = load(copy)
    lines = [line for line in run.ledger.lines() if line["data"].get("stage") != "full"]
    prev = "0" * 64
    for seq, line in enumerate(lines):
        line["seq"], line["prev"] = seq, prev
        line["hash"] = prev = line_hash(line)
    (copy / "ledger.jsonl").write_bytes(b"".join(canonical(line) + b"\n" for line in lines))
    problems = {check.what: check.detail for check in verify(copy) if not check.ok}
    assert "full gates of patch 1 are not in the ledger" in problems["attempt 1"]
    assert "Ledger-hash" in problems["attempt 1"]


def failed(place: Path) -> dict[str, str]:
    return {check.what: check.detail for check in verify(place) if check.ok is False}


def test_swapped_patches_are_found(copy, monkeypatch):
    monkeypatch.setattr(seal, "verify", lambda: None)
    one, two = copy / "attempts" / "1" / "patch.json", copy / "attempts" / "2" / "patch.json"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    found = failed(copy)
    assert set(found) == {"attempt 1", "attempt 2"} and "patch_sha" in found["attempt 1"]
    one.write_bytes(first)
    two.write_text('{"patches": 7}')
    assert "patch.json cannot be read" in failed(copy)["attempt 2"]


def test_a_program_that_was_not_proposed_is_found(copy):
    """All of the chain and the trailers forged: the commit's program still is not the one that was proposed."""
    run = load(copy)
    old = final(run)
    other = run.repo.commit_sources(f"{old}~1", {"model.py": "x = 1\n"}, "a", "", {})
    commit = run.repo.git("commit-tree", run.repo.tree_of(other), "-p", f"{old}~1", "-F", "-", stdin=run.repo.message(old) + "\n").strip()
    run.repo.set_incumbent(commit)
    path = copy / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(old.encode(), commit.encode()))
    lines, prev, names = [json.loads(raw) for raw in path.read_bytes().splitlines()], "0" * 64, {}
    for line in lines:
        text = canonical(line)
        for before, after in names.items():
            text = text.replace(before.encode(), after.encode())
        line.update(json.loads(text))
        line["prev"], was = prev, line["hash"]
        line["hash"] = prev = names[was] = line_hash(line)
    path.write_bytes(b"".join(canonical(line) + b"\n" for line in lines))
    assert "(ast_hash)" in " ".join(failed(copy).values())


def test_a_request_that_was_changed_afterwards_is_found(copy, monkeypatch):
    monkeypatch.setattr(seal, "verify", lambda: None)
    raw = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**raw, "accept_numeric_drift": True}))
    assert "accept_numeric_drift is 'True'" in failed(copy)["run.json"]


def test_lines_cut_off_at_the_end_are_said(copy):
    path = copy / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    found = {check.what: check for check in verify(copy)}
    assert "20 bytes" in found["ledger chain"].detail or "torn" in found["ledger chain"].detail
    assert found["end of the ledger"].ok is None and "cut off" in found["end of the ledger"].detail


def test_a_commit_that_the_ledger_does_not_know_is_found(copy):
    run = load(copy)
    run.repo.set_incumbent(run.repo.commit_sources(final(run), {"model.py": "x = 1\n"}, "smuggled", "", {}))
    assert checks(copy)["repository"] is False


def test_another_seal_is_found(copy, monkeypatch):
    monkeypatch.setattr(seal, "verify", lambda: None)
    monkeypatch.setattr(seal, "digest", lambda path=None: "another")
    found = checks(copy)
    assert found["seal of this checkout"] is False and found["one seal throughout"] is True


def test_an_older_seal_that_the_run_kept_is_said_and_is_no_failure(copy, monkeypatch):
    had = load(copy).request.gates_digest
    (copy / "seal").mkdir(exist_ok=True)
    (copy / "seal" / "SEAL").write_text("version 3\n")
    monkeypatch.setattr(seal, "verify", lambda: None)
    monkeypatch.setattr(seal, "digest", lambda path=None: "another" if path is None else had)
    found = {check.what: check for check in verify(copy)}["seal of this checkout"]
    assert found.ok is None and "gates version 3" in found.detail


def test_random_weights_on_another_machine_are_said_and_are_no_failure(copy, monkeypatch):
    monkeypatch.setattr(seal, "verify", lambda: None)
    raw = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**raw, "model_dir": "/nowhere", "weights_seed": 11}))
    assert checks(copy)["weights"] is None
    (copy / "run.json").write_text(json.dumps({**raw, "model_dir": "/nowhere", "weights_seed": None}))
    assert checks(copy)["weights"] is False
