"""Engines run confined, come up or fail by name, and leave nothing behind."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gates_toy import SERVER, toy

from optimizer.confine import cgroup, escapes, launch, procfs, sandbox
from optimizer.confine.launch import LaunchError
from optimizer.confine.sandbox import SandboxError, SandboxLevel
from optimizer.traffic.client import Request
from optimizer.types import RejectReason

WORKING = [name for name in sandbox.LADDER[1:] if sandbox._try(name) is None]


def leftovers() -> set[str]:
    own = f"hotloop-{os.getpid()}-*"
    groups = [p for parent in cgroup.available()[1] for p in parent.glob(own)]
    return {str(p) for p in (*Path("/tmp").glob(own), *groups) if "-jail-" not in p.name}


@pytest.mark.parametrize("name", WORKING)
def test_every_escape_that_was_seen_elsewhere_is_held(name):
    rows = list(escapes.self_test(SandboxLevel(name)))
    assert [row for row in rows if row[1] is False] == []
    if name in escapes.MOUNTED:
        assert all(held for _, held, _ in rows)
    assert len(rows) > 15 and leftovers() == set()


def test_the_bottom_of_the_ladder_is_only_taken_by_name():
    assert sandbox.detect().name != "none", "this machine offers nothing"
    with pytest.raises(SandboxError, match="known: auto, bwrap, namespaces, landlock, none"):
        sandbox.resolve("docker")


@pytest.mark.parametrize("name", WORKING)
def test_a_server_starts_serves_and_vanishes(tmp_path, name):
    with launch.launch(toy(tmp_path, sandbox=name)) as server:
        got = server.client.complete([Request((i, 2), 5) for i in range(8)], 10.0)
        assert [s.error for s in got] == [None] * 8 and got[3].token_ids == (5, 6, 7, 8, 9)
        pids = server.processes()
        assert len(server.ranks()) == 1 and server.census()["rss_bytes"] > 1 << 20 and server.cpu_s() > 0
        words = server.log_tail()
    assert "ANTHROPIC" not in words and "'PATH'" in words
    assert not any(procfs.rss_bytes(pid) for pid in pids) and leftovers() == set()


def test_the_environment_is_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    with launch.launch(toy(tmp_path)) as server:
        words = server.log_tail()
    assert "ANTHROPIC_API_KEY" not in words and "PYTHONHASHSEED" in words and "HOTLOOP_PAD" in words


def test_engines_on_gpus_start_without_nvlink_multicast(tmp_path):
    """Nothing of a host's environment comes through, so what keeps its GPUs safe from a dying candidate is set here."""
    with launch.launch(replace(toy(tmp_path, sandbox="none"), device="cuda")) as server:
        words = server.log_tail()
    assert all(repr(name) in words for name in launch.NO_MULTICAST)
    with launch.launch(toy(tmp_path)) as server:
        assert "NVLS" not in server.log_tail()


def test_an_engine_that_ends_is_a_failed_boot_with_its_last_words(tmp_path):
    with pytest.raises(LaunchError, match="no such model") as caught, launch.launch(toy(tmp_path, "exit")):
        pass
    assert caught.value.reason is RejectReason.BOOT and leftovers() == set()


def test_an_engine_that_never_answers_is_a_hang_and_is_killed(tmp_path):
    with pytest.raises(LaunchError) as caught, launch.launch(toy(tmp_path, "deaf", timeout_s=0.6)):
        pass
    assert caught.value.reason is RejectReason.HANG and leftovers() == set()


@pytest.mark.parametrize("name", WORKING)
def test_a_daemon_does_not_outlive_the_launch(tmp_path, name):
    with launch.launch(toy(tmp_path, "daemon", sandbox=name)) as server:
        known = procfs.identities(server.processes())
        assert len(known) >= 2
    time.sleep(0.05)
    assert [pid for pid, _ in procfs.identities([pid for pid, _ in known])] == []


def test_what_ran_into_its_limit_of_threads_is_named(tmp_path):
    if cgroup.available()[0] == "":
        pytest.skip("no control group can be made here")
    source = "import threading, time\ntry:\n    for _ in range(200):\n        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\nexcept RuntimeError:\n    pass\n" + SERVER
    limits = replace(launch.default_limits(toy(tmp_path)), pids=40)
    with pytest.raises(LaunchError, match="threads than its limit of 40"), launch.launch(
        toy(tmp_path, source=source, timeout_s=1.5), limits=limits
    ):
        pass


def test_an_exception_in_the_body_still_ends_the_engine(tmp_path):
    with pytest.raises(KeyError), launch.launch(toy(tmp_path)) as server:
        pids = server.processes()
        raise KeyError
    assert not any(procfs.rss_bytes(pid) for pid in pids) and leftovers() == set()


def test_only_source_files_are_loaded_from_the_tree(tmp_path):
    spec = toy(tmp_path, source="import toy.other\n" + SERVER)
    (tmp_path / "toy" / "other.py").write_text("print('from source', flush=True)\n")
    planted = tmp_path / "planted.py"
    planted.write_text("print('from byte code', flush=True)\n")
    import py_compile

    cache = tmp_path / "toy" / "__pycache__" / f"other.{__import__('sys').implementation.cache_tag}.pyc"
    cache.parent.mkdir()
    py_compile.compile(str(planted), cfile=str(cache), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    with launch.launch(spec) as server:
        words = server.log_tail()
    assert "from source" in words and "from byte code" not in words


def test_results_behind_links_and_odd_files_are_not_read(tmp_path):
    (tmp_path / "plain.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "plain.json")
    os.mkfifo(tmp_path / "pipe.json")
    os.link(tmp_path / "plain.json", tmp_path / "second.json")
    assert launch.read_result(tmp_path, "link.json", 100) is None
    assert launch.read_result(tmp_path, "pipe.json", 100) is None
    assert launch.read_result(tmp_path, "plain.json", 100) is None, "a hard link may be a host file"
    (tmp_path / "second.json").unlink()
    assert launch.read_result(tmp_path, "plain.json", 100) == b"{}"
    assert launch.read_result(tmp_path, "plain.json", 1) is None


def test_whatever_tree_a_candidate_leaves_is_counted_and_removed(tmp_path):
    """Too deep for names and recursion, closed folders, links to the host: nothing is left, nothing else is touched."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "file").write_text("kept")
    top = tmp_path / "work"
    top.mkdir()
    (top / "link").symlink_to(tmp_path / "host")
    (top / "closed").mkdir()
    (top / "closed" / "file").write_text("x")
    here = os.open(top, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (top / "closed").chmod(0)
    assert procfs.disk_used(top) >= 1000 * procfs.ENTRY_BYTES, "empty folders count"
    procfs.remove_tree(tmp_path / "work" / "link")
    assert (tmp_path / "host" / "file").read_text() == "kept"
    procfs.remove_tree(top)
    assert not top.exists() and (tmp_path / "host" / "file").read_text() == "kept"


def test_other_engines_are_masked_unless_the_target_is_one(tmp_path):
    python = Path(__import__("sys").executable)
    masked = sandbox.package_masks(python, frozenset())
    assert any(path.endswith("/transformers") for path in masked)
    assert sandbox.package_masks(python, frozenset({"transformers"})) == ()
    source = "import transformers\nprint('found', hasattr(transformers, 'AutoModel'), flush=True)\n" + SERVER
    if sandbox.detect().name in escapes.MOUNTED:
        with launch.launch(toy(tmp_path, source=source)) as server:
            assert "found False" in server.log_tail()
