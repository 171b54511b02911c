"""The run repository: hermetic, complete, and blind to whatever git settings the user or the target has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from optimizer.runrepo import Conflict, GitError, RunRepo, SnapshotError, compose, matches, snapshot_files
from optimizer.target import load_target

TOML = 'schema = 1\nname = "t"\nserve = ["{socket}{model_dir}{trace_dir}"]\neditable = ["**/*.py"]\n'


@pytest.fixture
def target(tmp_path):
    place = tmp_path / "engine"
    (place / "sub").mkdir(parents=True)
    (place / "target.toml").write_text(TOML)
    (place / "a.py").write_text("one\ntwo\nthree\nfour\nfive\nsix\nseven\n")
    (place / "sub" / "b.py").write_bytes(b"crlf\r\nlatin \xe9\r\n")
    (place / "run.sh").write_text("#!/bin/sh\n")
    (place / "run.sh").chmod(0o755)
    return load_target(place)


@pytest.fixture
def repo(tmp_path, target):
    found = RunRepo(tmp_path / "run" / "repo.git", tmp_path / "run" / "worktrees")
    found.create(target)
    return found


def test_the_snapshot_holds_the_folder_byte_for_byte_and_no_history(tmp_path, target, repo):
    tree = repo.tree(repo.incumbent(), "base")
    for path in ("a.py", "sub/b.py", "target.toml"):
        assert (tree / path).read_bytes() == (target.root / path).read_bytes()
    assert (tree / "run.sh").stat().st_mode & 0o100
    assert not (tree / ".git").exists()
    assert repo.git("rev-list", "--count", "HEAD").strip() == "1"


def test_caches_large_files_and_nested_repositories_stay_out_attributes_do_not_act(tmp_path, target):
    place = target.directory
    (place / "__pycache__").mkdir()
    (place / "__pycache__" / "a.pyc").write_text("x")
    (place / ".gitattributes").write_text("*.py text eol=crlf filter=evil\n")
    (place / ".gitignore").write_text("a.py\n")
    (place / "nested" / ".git").mkdir(parents=True)
    (place / "nested" / "c.py").write_text("c\n")
    with (place / "weights.safetensors").open("wb") as big:
        big.truncate((32 << 20) + 1)
    repo = RunRepo(tmp_path / "r2" / "repo.git", tmp_path / "r2" / "w")
    snapshot = repo.create(target)
    assert snapshot.left_out == ("weights.safetensors",)
    tree = repo.tree(snapshot.commit, "base")
    assert (tree / "a.py").read_bytes() == (place / "a.py").read_bytes()
    assert (tree / "nested" / "c.py").exists() and not (tree / "nested" / ".git").exists()
    assert not list(tree.rglob("*.pyc"))


def test_links_inside_are_kept_and_links_outside_are_refused(target):
    (target.directory / "inner.py").symlink_to("a.py")
    assert ("inner.py", "120000") in snapshot_files(target)[0]
    (target.directory / "outer.py").symlink_to("/etc/passwd")
    with pytest.raises(SnapshotError, match=r"outer\.py"):
        snapshot_files(target)


def test_the_same_patch_on_the_same_parent_is_the_same_commit(repo):
    base = repo.incumbent()
    one, two = (repo.commit_sources(base, {"a.py": "new\n"}, "T", "why", {"Attempt": 1}) for _ in range(2))
    assert one == two
    assert repo.trailers(one) == {"Attempt": "1"}
    assert [(c.status, c.path) for c in repo.name_status(base, one)] == [("M", "a.py")]


def test_rewriting_replaces_trailers_and_keeps_tree_and_words(repo):
    base = repo.incumbent()
    commit = repo.commit_sources(base, {"a.py": "new\n"}, "Title", "Because.\n\nSecond: thought", {"Attempt": 1, "Mechanism": "m"})
    again = repo.rewrite(commit, base, {"Attempt": 1, "Gates-digest": "d"})
    assert repo.tree_of(again) == repo.tree_of(commit)
    assert repo.trailers(again) == {"Attempt": "1", "Gates-digest": "d"}
    assert repo.message(again).startswith("Title\n\nBecause.")


def test_replaying_around_a_commit_merges_and_names_conflicts(repo):
    base = repo.incumbent()
    text = repo.show(base, "a.py")
    first = repo.commit_sources(base, {"a.py": text.replace("one", "ONE")}, "1", "", {})
    second = repo.commit_sources(first, {"a.py": text.replace("one", "ONE").replace("seven", "SEVEN"), "n.py": "n\n"}, "2", "", {})
    without = repo.replay([second], base)
    assert repo.show(without, "a.py") == text.replace("seven", "SEVEN")
    assert repo.show(without, "n.py") == "n\n"
    third = repo.commit_sources(first, {"a.py": text.replace("one", "UNO")}, "3", "", {})
    with pytest.raises(Conflict, match=r"a\.py"):
        repo.replay([third], base)


def test_a_tree_that_was_tampered_with_by_name_is_made_anew_for_another_commit(repo):
    base = repo.incumbent()
    commit = repo.commit_sources(base, {"a.py": "new\n"}, "T", "", {})
    assert (repo.tree(base, "1") / "a.py").read_text() != "new\n"
    assert (repo.tree(commit, "1") / "a.py").read_text() == "new\n"


def test_paths_that_leave_the_target_are_refused(repo):
    for path in ("../x.py", "/etc/x", ".git/hooks/x", "a/../../b"):
        with pytest.raises(GitError):
            repo.commit_sources(repo.incumbent(), {path: "x"}, "T", "", {})


def test_no_user_configuration_hook_or_identity_reaches_git(tmp_path, target, monkeypatch):
    home = tmp_path / "home"
    (home / "hooks").mkdir(parents=True)
    hook = home / "hooks" / "reference-transaction"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    (home / ".gitconfig").write_text(f"[core]\nhooksPath = {home}/hooks\nautocrlf = true\n[user]\nname = Someone\nemail = a@b\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    repo = RunRepo(tmp_path / "r3" / "repo.git", tmp_path / "r3" / "w")
    repo.create(target)
    author = subprocess.run(
        ["git", f"--git-dir={repo.git_dir}", "log", "--format=%an"], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert author.stdout.strip() == "hotloop"
    assert not (tmp_path / "hooked").exists()


@pytest.mark.parametrize(
    ("path", "glob", "expected"),
    [
        ("engine/a.py", "engine/**/*.py", True),
        ("engine/x/y/a.py", "engine/**/*.py", True),
        ("engine/a.txt", "engine/**/*.py", False),
        ("other/engine/a.py", "engine/**/*.py", False),
        ("a.py", "*.py", True),
        ("x/a.py", "*.py", False),
        ("engine/tiny/w.bin", "engine/tiny/**", True),
    ],
)
def test_globs_span_folders_only_where_they_say_so(path, glob, expected):
    assert matches(path, (glob,)) is expected


def test_trailers_stay_on_one_line():
    assert compose("a\nb", "", {"K": "x\ny"}) == "a b\n\nK: x y\n"


def test_sources_are_read_byte_for_byte_whatever_they_hold(repo):
    base = repo.incumbent()
    text = "line\r\n\udce9 not utf-8\n\nend without newline"
    commit = repo.commit_sources(base, {"odd.py": text, "empty.py": "", "x/y.py": "y\n"}, "T", "", {})
    found = repo.sources(commit, ("**/*.py",))
    assert found["odd.py"] == text and found["empty.py"] == "" and found["x/y.py"] == "y\n"
    assert "target.toml" not in found and len(found) == 5


def test_a_run_is_found_by_a_relative_path_too(repo, monkeypatch):
    monkeypatch.chdir(repo.git_dir.parent)
    here = RunRepo(Path(repo.git_dir.name), Path("worktrees"))
    assert here.incumbent() == repo.incumbent()
