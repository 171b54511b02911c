"""What an engine compiles is made once by a launch that nobody judges, and copied: launches tell each other nothing."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from gates_toy import SERVER, toy

from optimizer.confine import compiled, sandbox
from optimizer.confine.launch import LaunchError, compiling, launch
from optimizer.types import LaunchSpec

COMPILES = """
import os
place = os.environ["TRITON_CACHE_DIR"]
os.makedirs(place + "/deep", exist_ok=True)
print("found", sorted(n for _, _, names in os.walk(place) for n in names), flush=True)
open(f"{place}/deep/{'second' if os.path.exists(place + '/deep/first') else 'first'}", "w").write("compiled")
if not os.path.lexists(place + "/link"):
    os.symlink("/etc/passwd", place + "/link")
""" + SERVER


def seen(spec: LaunchSpec) -> str:
    with launch(spec) as server:
        return next(line for line in server.log_tail(50).splitlines() if line.startswith("found"))


@pytest.mark.parametrize("level", ["bwrap", "landlock"])
def test_every_launch_starts_from_what_the_first_unjudged_one_left(tmp_path: Path, level: str) -> None:
    try:
        sandbox.resolve(level)
    except sandbox.SandboxError as error:
        pytest.skip(str(error))
    spec = replace(toy(tmp_path, source=COMPILES, sandbox=level), compiled=tmp_path / "cache" / "commit")
    assert seen(spec) == "found ['first']", "the launch that compiled was another one"
    assert seen(spec) == "found ['first']", "what the judged launch added is gone"
    kept = [p.relative_to(tmp_path / "cache").as_posix() for p in (tmp_path / "cache").rglob("*") if not p.is_dir()]
    assert kept == ["commit/triton/deep/first"], "no link is copied to the host"


def test_a_changed_program_starts_from_what_the_one_before_it_compiled_and_leaves_that_alone(tmp_path: Path) -> None:
    before, after = (tmp_path / "cache" / name for name in ("before", "after"))
    spec = replace(toy(tmp_path, source=COMPILES), compiled=after, compiled_before=before)
    assert seen(spec) == "found ['first']", "nothing was there before"
    for folder in (before / "triton/deep", after):
        shutil.rmtree(folder, ignore_errors=True)
    (before / "triton/deep").mkdir(parents=True)
    (before / "triton/deep/first").write_text("of the program before")
    assert seen(spec) == "found ['first', 'second']"
    assert [p.name for p in before.rglob("*") if p.is_file()] == ["first"]
    assert (after / "triton/deep/first").read_text() == "of the program before"


def test_arms_that_start_at_once_compile_once(tmp_path: Path) -> None:
    spec = replace(toy(tmp_path, source=COMPILES), compiled=tmp_path / "cache" / "commit")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(seen, [spec, spec])) == ["found ['first']"] * 2
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["commit"]


def test_programs_that_will_be_judged_are_compiled_beside_other_work(tmp_path: Path) -> None:
    toys = [toy(tmp_path / "good", source=COMPILES), toy(tmp_path / "bad", mode="exit")]
    specs = [replace(spec, compiled=tmp_path / "cache" / f"commit{n}") for n, spec in enumerate(toys)]
    with compiling([*specs, toy(tmp_path / "cpu", source=COMPILES)]):  # the last is one that compiles nothing, as on a CPU
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "cache").glob("commit*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (specs[0].compiled / "triton/deep/first").is_file(), "kept for its launches"
    assert not list(specs[1].compiled.iterdir()), "one that does not start fails when it is judged"
    assert seen(specs[0]) == "found ['first']"


def test_work_that_ends_early_leaves_the_rest_uncompiled(tmp_path: Path) -> None:
    specs = [replace(toy(tmp_path, source=COMPILES), compiled=tmp_path / "cache" / f"commit{n}") for n in range(3)]
    with pytest.raises(KeyError), compiling(specs):
        raise KeyError
    kept = sorted(p.name for p in (tmp_path / "cache").iterdir()) if (tmp_path / "cache").is_dir() else []
    assert kept in ([], ["commit0"]), "at most what was under way, and that whole"


def test_an_engine_that_does_not_start_fails_as_itself_and_is_not_compiled_again(tmp_path: Path) -> None:
    spec = replace(toy(tmp_path, mode="exit"), compiled=tmp_path / "cache" / "commit")
    for _ in range(2):
        with pytest.raises(LaunchError, match="candidate ended before it was healthy"), launch(spec):
            pass
        assert list((tmp_path / "cache").iterdir()) == [tmp_path / "cache" / "commit"]


def test_only_regular_files_within_the_limits_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "good").write_text("12345")
    (source / "large").write_text("x" * 100)
    os.link(source / "sub" / "good", source / "twice")
    (source / "away").symlink_to("/etc")
    os.mkfifo(source / "pipe")
    (source / "alone").write_text("123")
    monkeypatch.setattr(compiled, "MOST_BYTES", 50)
    compiled.copy(source, tmp_path / "target")
    assert sorted(p.name for p in (tmp_path / "target").rglob("*") if not p.is_dir()) == ["alone"]
