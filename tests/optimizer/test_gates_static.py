"""Envelope, source policy, seal: what is decided without starting anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from optimizer import seal
from optimizer.gates import policy, scope
from optimizer.gates.scope import Change
from optimizer.runrepo import RunRepo
from optimizer.target import load_target

EDITABLE, FROZEN = ("engine/**/*.py",), ("engine/target.toml", "engine/frozen.py")
PLAIN = "100644"


def change(path="engine/a.py", status="M", old=PLAIN, new=PLAIN, added: int | None = 1, deleted: int | None = 1) -> Change:
    return Change(status, old if status != "A" else "000000", new, path, added, deleted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], "changes nothing"),
        ([change(status="D", new="000000")], "status D"),
        ([change(new="100755")], "modes stay"),
        ([change(status="A", new="120000")], "plain files only"),
        ([change(status="A", new="160000")], "plain files only"),
        ([change(added=None, deleted=None)], "binary"),
        ([change("engine/a.pyc", "A")], "only .py"),
        ([change("engine/x.pth", "A")], "only .py"),
        ([change("engine/target.toml")], "only .py"),
        ([change("engine/frozen.py")], "frozen by target.toml"),
        ([change("json.py", "A")], "not editable"),
        ([change("engine/conftest.py", "A")], "test harnesses"),
        ([change("engine/m\u043edel.py", "A")], "can look like"),
        ([change("engine/a\tb.py", "A")], "can look like"),
        ([change("engine/sitecustomize.py", "A")], "interpreters"),
        ([change(f"engine/{n}.py") for n in "abcd"], "4 files"),
        ([change(added=100, deleted=21)], "121 lines"),
    ],
)
def test_the_envelope_names_the_rule_that_is_broken(changes, words):
    assert words in (scope.envelope(changes, EDITABLE, FROZEN) or "")


def test_three_files_and_120_lines_fit_the_envelope():
    fits = [change("engine/a.py", added=60, deleted=20), change("engine/b/c.py", "A", added=40, deleted=0), change("engine/d.py", added=0, deleted=0)]
    assert scope.envelope(fits, EDITABLE, FROZEN) is None


BASE_TREE = frozenset({"engine/__init__.py", "engine/model.py", "engine/parts/a.py"})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("json.py", "hide the installed one"),
        ("json/__init__.py", "hide the installed one"),
        ("numpy/linalg.py", "hide the installed one"),
        ("engine/model/__init__.py", "hide engine/model.py"),
        ("engine/model/deep/a.py", "hide engine/model.py"),
        ("engine/parts.py", "hide engine/parts/"),
        ("engine/json.py", None),  # below a package nothing is hidden
        ("engine/parts/b.py", None),
        ("nobody_has_this/a.py", None),
    ],
)
def test_a_new_file_may_not_hide_a_module(path, words):
    wrong = scope.hidden_modules([change(path, "A")], BASE_TREE)
    assert wrong is None if words is None else words in (wrong or "")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"", b"# coding: raw_unicode_escape\nx = 1 # \\u000aimport os\n", "not UTF-8"),
        (b"", b"#!/usr/bin/python\n# vim: fileencoding=utf-7\n", "utf-7"),
        (b"", b"x = 1\ry = 2\n", "U+000D"),
        (b"", b"x = 1\x0cy = 2\n", "U+000C"),
        (b"", "x = 'a\u202eb'\n".encode(), "U+202E"),
        (b"", "y\u200b = 1\n".encode(), "U+200B"),
        (b"", b"\xff\n", "not UTF-8"),
        (b"", b"x = 1; " * 60 + b"\n", "420 characters"),
        (b"x\x0cy\n", b"x\x0cy\nz = 1\n", None),  # it was there before
        (b"x = 1\r\n", b"x = 1\r\ny = 2\r\n", None),
        (b"", b"# -*- coding: utf-8 -*-\nx = '\xc3\xa9'\n", None),
    ],
)
def test_text_that_is_read_otherwise_than_it_runs_is_refused(old, new, words):
    wrong = scope.unreadable(old, new)
    assert wrong is None if words is None else words in (wrong or "")


@pytest.fixture
def repo(tmp_path) -> RunRepo:
    package = tmp_path / "t" / "engine"
    package.mkdir(parents=True)
    (package / "target.toml").write_text(
        'schema = 1\nname = "t"\nroot = ".."\nserve = ["{python}"]\neditable = ["engine/**/*.py"]\n'
    )
    (package / "a.py").write_text('"""Doc."""\n\n\ndef f(x):\n    return x + 1\n')
    made = RunRepo(tmp_path / "repo.git", tmp_path / "trees")
    made.create(load_target(package))
    return made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""Another doc."""\n\n# a comment for the judge\ndef f(x):\n    """Verified."""\n    return x + 1\n', "nothing that runs"),
        ("def f(x:\n", "not Python"),
        ("def f(x):\n    return x + 2\n", None),
    ],
)
def test_a_commit_must_change_what_runs(repo, text, words):
    base = repo.incumbent()
    commit = repo.commit_sources(base, {"engine/a.py": text}, "t", "", {})
    found = scope.changes(repo.git_dir, base, commit)
    wrong = scope.same_program(repo.git_dir, base, commit, found)
    assert wrong is None if words is None else words in (wrong or "")


def test_git_tells_what_changed_not_the_patch(repo):
    base = repo.incumbent()
    commit = repo.commit_sources(base, {"engine/a.py": None, "engine/b.py": "x = 1\n"}, "t", "", {})
    found = {c.path: c for c in scope.changes(repo.git_dir, base, commit)}
    assert found["engine/a.py"].status == "D" and found["engine/b.py"].status == "A" and found["engine/b.py"].added == 1


REJECTED = {
    "import subprocess": "starts processes",
    "import os\nos.system('x')": "starts processes",
    "from os import fork as f\nf()": "starts processes",
    "import socket": "network",
    "import urllib.request as u": "network",
    "import vllm": "another engine",
    "from transformers import AutoModel": "another engine",
    "import gc\ngc.get_objects()": "frames",
    "import sys\nsys._getframe()": "frames",
    "import sys\nsys.modules['time'] = None": "another module",
    "import sys\nx = sys.modules": "import machinery",
    "import time\ntime.perf_counter = lambda: 0": "another module",
    "import torch\ntorch.nn.functional.linear = None": "another module",
    "import torch as t\nsetattr(t, 'x', 1)": "another module",
    "import os\nos.environ['A'] = 'b'": "environment",
    "import os\nos.environ.setdefault('A', 'b')": "environment",
    "import os\nos._exit(0)": "process",
    "eval('1')": "runs text",
    "__import__('os')": "import machinery",
    "import torch\nif torch.autograd._profiler_enabled(): pass": "profiler",
    "def f(p):\n    return p._is_profiler_enabled": "profiler",
    "x = open('/proc/self/maps')": "place of the machine",
    "p = '/weights/model.safetensors'": "place of the machine",
    "a = [5, 900, 3, 77, 12, 4, 1000, 8, 2, 99, 61, 7, 30, 11, 1, 6, 44]": "stored tokens",
    "import os\ngetattr(os, 'system')('x')": "starts processes",
    "import torch\ntorch.os.environ['A'] = 'b'": "environment",
    "import random\nrandom._os.system('x')": "starts processes",
    "from os import environ\nenviron['A'] = 'b'": "environment",
    "import os\nos.environ.__setitem__('A', 'b')": "environment",
    "import os\nos.environ |= {'A': 'b'}": "environment",
    "().__class__.__base__.__subclasses__()": "other code",
    "def f(step):\n    step.__code__ = f.__code__": "other code",
    "def f(core):\n    core.step.__globals__['x'] = 1": "other code",
    "import torch\ntorch.are_deterministic_algorithms_enabled()": "probes",
    "x = '/pro' + 'c/self/' + 'maps'": "place of the machine",
    "import \uff4fs\nos.system('x')": "starts processes",  # a name that Python reads as `os`
}
ASKED = {
    "import ctypes": "native code",
    "import time\nt = time.time()": "clock",
    "import importlib": "dynamic import",
    "import os\ngetattr(os, 'sys' + 'tem')('x')": "at run time",
    "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True": "setting",
    "x = open('notes.txt')": "files",
    "x = b'" + "\\x01" * 80 + "'": "literal",
    "from os.path import *": "everything",
    "import os\no = os": "hands a module on",
    "import os\nf(os)": "hands a module on",
    "import os\nx = os.environ.get('MALLOC_PERTURB_')": "environment",
    "from os import getenv\ngetenv('A')": "environment",
    "import torch\ntorch.set_num_threads(4)": "whole process",
    "import os\nos.sched_setaffinity(0, {1})": "whole process",
    "import threading\nthreading.Thread(target=f)": "thread",
    "def f(place):\n    return place.read_text()": "files",
    "import numpy as np\nx = np.fromfile('/tmp/x')": "files",
    "KNOWN = 'sha256:" + "0123456789abcdef" * 4 + "'": "digest",
}
ALLOWED = [
    "import os\nimport torch\nos.sched_yield()\ntorch.from_file('/dev/shm/x', shared=True, size=8)",
    "import threading\nthreading.Event().wait(0.1)",
    "from torch._C._profiler import _RecordFunctionFast as span",
    "import torch\ntorch.set_num_threads(1)\n\n@torch.inference_mode()\ndef f(): pass",
    "SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120]",
    "class A:\n    pass\n\n\nA.forward = None\nself = A()\nself.x = 1",
    "def f():\n    " + repr("a sentence of a docstring " * 20),
    "x = '/v1/completions'\ny = a.eval()\n",
    "import torch\nw = torch.signal.windows.hann(8)",
    "def load(model, model_dir: Path): return model_dir / 'config.json'",
    "import os\nimport sys\nprint(os.sched_yield(), sys.byteorder, os.path.join('a', 'b'), file=sys.stderr)",
]


@pytest.mark.parametrize("source", REJECTED)
def test_the_policy_rejects(source):
    found = [f for f in policy.findings(source) if f.action == policy.REJECT]
    assert found and any(REJECTED[source] in f.why for f in found), policy.findings(source)


@pytest.mark.parametrize("source", ASKED)
def test_the_policy_asks_a_person(source):
    found = policy.findings(source)
    assert {f.action for f in found} == {policy.ASK} and any(ASKED[source] in f.why for f in found), found


@pytest.mark.parametrize("source", ALLOWED)
def test_the_policy_lets_pass(source):
    assert policy.findings(source) == []


def test_a_name_that_was_imported_before_may_be_used_again():
    before = "from pathlib import Path\n"
    assert policy.new_findings({"a.py": before}, {"a.py": before + "def f(model_dir: Path): return Path(model_dir, 'x')\n"}) == []


def test_only_what_is_new_counts():
    before = "import os\nos.environ.setdefault('A', 'b')\n"
    assert policy.new_findings({"a.py": before}, {"a.py": before + "x = 1\n"}) == []
    assert policy.new_findings({"a.py": before}, {"a.py": "", "b.py": before}) == [], "moved, not new"
    assert len(policy.new_findings({"a.py": before}, {"a.py": before + before})) == 1


def test_every_policy_rule_uses_a_known_action():
    assert {action for _, action, _ in policy.RULES} == {policy.REJECT, policy.ASK}


# -- seal --------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path, repo) -> Path:
    root = tmp_path / "copy"
    for name in ("optimizer", "trace_diff", "reports"):
        shutil.copytree(seal.ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "SEAL"))
    return root


def test_the_seal_covers_what_judges_and_what_it_starts():
    sealed = set(seal.closure())
    for name in ("measure", "accept", "types", "seal", "gates/streams", "gates/policy", "truth/oracle", "truth/oracle_worker",
                 "truth/weights", "traffic/prompts", "traffic/texts", "traffic/client", "traffic/wire", "confine/launch",
                 "confine/launcher", "confine/jail", "confine/sandbox", "confine/seccomp"):  # fmt: skip
        assert f"optimizer/{name}.py" in sealed, name
    assert not [path for path in sealed if "proposers" in path or "knowledge" in path]


def test_the_seal_holds_until_a_sealed_file_changes(copy):
    assert seal.write("first", copy) == 1
    seal.verify(copy)
    (copy / "optimizer" / "cli.py").write_text("# not sealed\n")
    seal.verify(copy)
    for path in ("optimizer/gates/streams.py", "optimizer/accept.py", "optimizer/confine/launcher.py"):
        text = (copy / path).read_text()
        (copy / path).write_text(text + "\n# touched\n")
        with pytest.raises(seal.SealBroken, match=f"{path} has changed"):
            seal.verify(copy)
        (copy / path).write_text(text)
    seal.verify(copy)


def test_new_and_missing_files_break_the_seal(copy):
    seal.write("first", copy)
    extra = copy / "optimizer" / "gates" / "extra.py"
    extra.write_text("x = 1\n")
    with pytest.raises(seal.SealBroken, match=r"gates/extra\.py is not sealed"):
        seal.verify(copy)
    extra.unlink()
    (copy / "optimizer" / "gates" / "drift.py").unlink()
    with pytest.raises(seal.SealBroken, match=r"gates/drift\.py is gone"):
        seal.verify(copy)


def test_a_new_seal_needs_a_reason_and_raises_the_version(copy):
    with pytest.raises(ValueError, match="reason"):
        seal.write("  ", copy)
    path = copy / "optimizer" / "gates" / "SEAL"
    seal.write("first", copy)
    before = seal.digest(path)
    assert seal.write("stricter sampling", copy) == 2 == seal.version(path)
    assert seal.digest(path) != before and "# stricter sampling" in path.read_text()


def test_a_missing_seal_is_broken(copy):
    with pytest.raises(seal.SealBroken, match="optimize seal"):
        seal.digest(copy / "optimizer" / "gates" / "SEAL")
    with pytest.raises(seal.SealBroken):
        seal.verify(copy)
