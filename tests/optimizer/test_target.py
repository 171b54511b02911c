"""target.toml: strict, and every error names the key and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.target import TargetError, load_target, render_serve
from optimizer.target_init import check, draft

GOOD = """
schema = 1
name = "mine"
serve = ["{python}", "{launcher}", "serve", "--uds", "{socket}", "--model", "{model_dir}", "--traces", "{trace_dir}"]
editable = ["**/*.py"]
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "target.toml").write_text(text)
    return folder


def test_the_embedded_engine_and_the_fake_one_load(repo):
    engine = load_target(repo / "engine")
    assert engine.root == repo and engine.directory == repo / "engine" and 4 in engine.tp
    assert load_target(repo / "tests" / "fakes" / "engine").name == "fake"


def test_defaults_are_a_cpu_target_at_tp_1(tmp_path):
    target = load_target(write(tmp_path, GOOD))
    assert (target.devices, target.tp, target.dtype["cpu"], target.root) == (("cpu",), (1,), "float32", tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("editables = []", "unknown key editables; valid keys: .*editable"),
        ("schema = 2", "schema = 2 is not known; valid: 1"),
        ("serve = []", "serve must hold the command"),
        ('serve = ["{sock}"]', "unknown placeholder {sock}; valid: .*socket"),
        ('serve = ["{"]', "serve"),
        ("editable = []", "editable must name at least one glob"),
        ('editable = ["/etc/*"]', "relative to root"),
        ('editable = ["../*.py"]', "stay inside"),
        ("tp = [0]", "tp must be a list of whole numbers"),
        ("tp = 2", "tp must be a list"),
        ('devices = ["tpu"]', "valid: cpu, cuda"),
        ('dtype = { cpu = "float31" }', "valid: float32"),
        ('devices = ["cuda"]\ndtype = { cpu = "float32" }', "dtype lacks cuda"),
        ("start_timeout_s = 0", "seconds above 0"),
        ('root = "elsewhere"', "this folder or one that contains it"),
        ("name = 3", "name must be a non-empty string"),
    ],
)
def test_a_wrong_value_is_named_with_the_right_ones(tmp_path, line, words):
    key = line.split(" ")[0]
    kept = "\n".join(row for row in GOOD.splitlines() if not row.startswith(f"{key} "))
    with pytest.raises(TargetError, match=words):
        load_target(write(tmp_path, f"{kept}\n{line}\n"))


def test_a_missing_folder_file_or_key_says_so(tmp_path):
    with pytest.raises(TargetError, match="no such folder"):
        load_target(tmp_path / "none")
    with pytest.raises(TargetError, match="optimize init"):
        load_target(tmp_path)
    with pytest.raises(TargetError, match="missing key name"):
        load_target(write(tmp_path, GOOD.replace('name = "mine"', "")))
    with pytest.raises(TargetError, match="not TOML"):
        load_target(write(tmp_path, "schema = "))


def test_the_command_is_rendered_from_the_placeholders(repo):
    target = load_target(repo / "tests" / "fakes" / "engine")
    values = {"python": "py", "launcher": "l", "model_dir": "/weights", "tp": 2, "device": "cpu", "socket": "s", "trace_dir": "t"}
    argv = render_serve(target, **values)
    assert argv[:4] == ["py", "-I", "-B", "l"] and argv[argv.index("--tp") + 1] == "2"
    with pytest.raises(TargetError, match=r"\{socket\}"):
        render_serve(target, **{k: v for k, v in values.items() if k != "socket"})


def test_a_draft_of_a_package_loads_and_checks_clean(tmp_path):
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "__init__.py").write_text("")
    (engine / "server.py").write_text("pass\n")
    draft(engine)
    assert load_target(engine).root == tmp_path
    assert check(engine) == []
    with pytest.raises(TargetError, match="exists already"):
        draft(engine)


def test_check_names_what_is_missing(tmp_path):
    write(tmp_path, GOOD.replace('"serve"', '"nowhere"').replace('["**/*.py"]', '["core/*.py", "*.toml"]') + 'frozen = ["data/*"]\ntp = [1, 2]\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    found = "\n".join(check(tmp_path))
    for words in ("'core/*.py' matches no file", "'data/*' matches no file", "starts module 'nowhere'", "does not use {tp}", "covers target.toml"):
        assert words in found
