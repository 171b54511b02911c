"""The command line: one clear line for every mistake, and thin commands over the modules that do the work."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import loop_fakes as fake
import pytest
from loop_fakes import ENGINE, WEIGHTS, Fakes, new_run

from optimizer import cli, seal, start
from optimizer.loop import Loop


@pytest.fixture(autouse=True)
def sealed(monkeypatch):
    """Whatever the state of the working tree: the seal has tests of its own."""
    monkeypatch.setattr(seal, "verify", lambda: None)
    monkeypatch.setattr(seal, "digest", lambda: "digest-of-seal")


@pytest.fixture
def optimize(tmp_path, monkeypatch, capsys):
    """Call the command line; returns (exit status, stdout, stderr)."""

    def call(*argv: object):
        monkeypatch.setattr(sys, "argv", ["optimize", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out = capsys.readouterr()
        code = end.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out.out, out.err

    return call


def fake_args(*more: object) -> list[object]:
    return ["--target-dir", ENGINE, "--model", WEIGHTS, *more]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bogus"], "No such option: --bogus"),
        (["--target-dir", "/nowhere"], "no such folder: /nowhere"),
        (fake_args("--goal", "fast"), "--goal 'fast': give a factor above 1"),
        (fake_args("--goal", "0.5x"), "above 1"),
        (fake_args("--tp", 3), "--tp 3: fake allows 1, 2"),
        (fake_args("--tp", "many"), "--tp"),
        (fake_args("--device", "tpu"), "--device tpu: fake runs on cpu"),
        (fake_args("--target", "speed"), "unknown target 'speed'; valid: tok/s"),
        (fake_args("--target", "ttft", "--goal", "soon"), "a number of ms such as 60"),
        (fake_args("--agent", "gpt"), "--agent gpt: valid are playbook"),
        (fake_args("--protocol", "slow"), "--protocol slow: valid are quick, full"),
        (fake_args("--attempts", 0), "--attempts 0: must be above 0"),
        (fake_args("--budget-minutes", "nan"), "--budget-minutes nan: must be above 0"),
        (fake_args("--max-usd", "inf"), "--max-usd inf: must be above 0"),
        (fake_args("--budget-minutes", -1), "--budget-minutes -1"),
        (fake_args("--python", "/no/python"), "no such interpreter"),
        (fake_args("--devices", "a,b"), "give indices such as 0,1"),
        (fake_args("--trust-skills", "/nowhere"), "--trust-skills /nowhere: no such folder"),
        (fake_args("--agent-option", "model"), "--agent-option model: give KEY=VALUE"),
        (["--target-dir", ENGINE], "--model is needed"),
        (["--target-dir", ENGINE, "--model", "/nowhere"], "no config.json there; give a Hugging Face model folder, or with --load-format dummy one of: qwen3-8b"),
        (["--target-dir", ENGINE, "--model", "qwen3-8b"], "only the dimensions are here; --load-format dummy draws random weights"),
        (fake_args("--load-format", "gguf"), "--load-format gguf: there are auto, safetensors, dummy"),
        (["--target-dir", ENGINE, "--model", start.MODELS / "qwen3-8b", "--load-format", "safetensors"], "no *.safetensors in"),
        (["resume", "x"], "no runs in"),
        (["status", "--runs", "/nowhere"], "no runs in /nowhere"),
        (["check", "/nowhere"], "no such folder"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(optimize, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = optimize(*argv)
    assert code == 2
    assert words in err and err.startswith("optimize: ") and err.count("\n") == 1
    assert not (tmp_path / "runs").exists(), "nothing may be made before the request is checked"


def test_without_a_sandbox_only_the_unsafe_flag_starts(optimize, monkeypatch, tmp_path):
    from optimizer.confine import sandbox

    monkeypatch.setattr(sandbox, "detect", lambda: sandbox.SandboxLevel("none", ("no bwrap: not installed",)))
    code, _, err = optimize(*fake_args("--runs", tmp_path))
    assert code == 2 and "--unsafe-no-sandbox" in err and "not installed" in err


@pytest.mark.parametrize(
    ("best", "asked", "agent", "level"),
    [
        ("bwrap", "auto", "claude", "bwrap"),
        ("bwrap", "namespaces", "playbook", "namespaces"),
        ("bwrap", "landlock", "playbook", "one level lower"),
        ("bwrap", "namespaces", "claude", "a model wrote"),
        ("landlock", "auto", "claude", "landlock"),
        ("bwrap", "none", "playbook", "--unsafe-no-sandbox"),
        ("bwrap", "chroot", "playbook", "known: auto"),
    ],
)
def test_only_our_own_patches_run_one_level_lower(monkeypatch, best, asked, agent, level):
    from optimizer.confine import sandbox

    monkeypatch.setattr(sandbox, "detect", lambda: sandbox.SandboxLevel(best))
    monkeypatch.setattr(sandbox, "_try", lambda name: None)
    options = start.Options(sandbox=asked, agent=agent)
    if level in sandbox.LADDER:
        assert start._sandbox(options) == level
    else:
        with pytest.raises(start.Refused, match=level):
            start._sandbox(options)


def test_a_run_is_pinned_before_it_works(optimize, monkeypatch, tmp_path):
    from optimizer import session
    from optimizer.run import load

    monkeypatch.setattr(session, "work", lambda run, console: 0)
    code, out, _ = optimize(*fake_args("--runs", tmp_path, "--seed", 5, "--tp", 2, "--goal", "1.5x", "--attempts", 3, "--agent-option", "a=1", "--agent-option", "b=x=y"))
    assert code == 0 and "sandbox" in out
    run = load(next(tmp_path.glob("*/run.json")).parent)
    want = run.request
    assert (want.tp, want.seed, want.limits.attempts, str(want.goal), want.dtype) == (2, 5, 3, "1.5x", "float32")
    assert want.options == {"a": 1, "b": "x=y"}
    assert want.weights_sha256 and len(want.prompt_key) == 64 and want.environment["hash"]
    assert "prompt_key" not in run.ledger.lines()[0]["data"], "the key of the prompts is for run.json alone"
    again = optimize(*fake_args("--run-dir", run.dir))
    assert again[0] == 2 and "optimize resume" in again[2]


def test_weights_that_are_missing_are_made_once_from_the_seed(optimize, monkeypatch, tmp_path):
    from optimizer import session
    from optimizer.run import MODEL_CONFIG, load

    model = tmp_path / "model"
    model.mkdir()
    config = '{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, '
    (model / "config.json").write_text(config + '"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true}')
    monkeypatch.setattr(session, "work", lambda run, console: 0)
    shas = []
    for name in ("a", "b"):
        optimize("--target-dir", ENGINE, "--model", model, "--seed", 3, "--run-dir", tmp_path / name)
        want = load(tmp_path / name).request
        assert want.weights_seed == 3 and list(want.model_dir.glob("*.safetensors"))
        shas.append((want.model_dir / "model.safetensors").read_bytes())
    assert shas[0] == shas[1]
    assert not list(model.glob("*.safetensors"))
    # the same by a name, and in place of weights that are there
    monkeypatch.setattr(start, "MODELS", tmp_path)
    monkeypatch.chdir(tmp_path / "a")
    stored = tmp_path / "stored"
    shutil.copytree(model, stored)
    (stored / "model.safetensors").write_bytes(b"not read")
    for name, given in (("c", "MODEL"), ("d", stored)):
        optimize("--target-dir", ENGINE, "--model", given, "--load-format", "dummy", "--seed", 3, "--run-dir", tmp_path / name)
        want = load(tmp_path / name).request
        assert want.weights_seed == 3 and (want.model_dir / "model.safetensors").read_bytes() == shas[0]
        assert (tmp_path / name / MODEL_CONFIG).read_text() == (model / "config.json").read_text()
    assert (stored / "model.safetensors").read_bytes() == b"not read"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("cli")
    shutil.copytree(ENGINE, home / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    run = new_run(home / "runs" / "first", engine=home / "engine")
    Loop(Fakes(run, [fake.WIN, fake.NO_OP]).services(), run).go()
    run.ledger.close()
    return home


def test_status_report_apply_and_export_work_from_the_id(optimize, finished, tmp_path, monkeypatch):
    monkeypatch.setattr("reports.html.run_report", lambda run_dir, out: out / run_dir.name)
    runs = ["--runs", finished / "runs"]
    code, out, _ = optimize("status", "fi", *runs)
    assert code == 0 and "1 accepted" in out and "accept" in out and "finished: the proposer has nothing left" in out
    code, out, _ = optimize("report", *runs, "--out", "there")
    assert code == 0 and "wrote there/first" in out
    code, out, _ = optimize("export", "first", "--out", tmp_path / "patches", *runs)
    assert code == 0 and (tmp_path / "patches" / "PULL_REQUEST.md").exists()
    code, out, _ = optimize("apply", *runs)
    assert code == 0 and "applied 1 patches" in out
    assert "STEP_US = 700" in (finished / "engine" / "model.py").read_text()


def test_a_finished_run_is_only_taken_up_with_a_new_limit(optimize, finished):
    code, _, err = optimize("resume", "first", "--runs", finished / "runs")
    assert code == 2 and "has finished" in err


def test_a_finished_run_stays_finished_when_a_person_has_reviewed_it(optimize, finished):
    from optimizer.ledger import Ledger

    ledger = Ledger(finished / "runs" / "first" / "ledger.jsonl")
    ledger.append("reviewed", 1, {"entry": "first.1", "decision": "accepted", "reviewer": "Ada"})
    ledger.close()
    code, _, err = optimize("resume", "first", "--runs", finished / "runs")
    assert code == 2 and "has finished" in err


def test_verify_says_what_is_wrong_and_fails(optimize, finished):
    code, out, _ = optimize("verify", "--runs", finished / "runs")
    assert code == 1 and "weights" in out and "NO" in out


def test_init_and_check_an_engine_of_ones_own(optimize, tmp_path):
    (tmp_path / "serve.py").write_text("pass\n")
    assert optimize("init", tmp_path)[0] == 0
    assert optimize("check", tmp_path)[0] == 0
    (tmp_path / "serve.py").unlink()
    code, out, _ = optimize("check", tmp_path)
    assert code == 1 and "matches no file" in out


def test_help_does_not_wait_for_torch(repo):
    import subprocess

    probe = "import sys; sys.argv=['optimize','--help']\nimport optimizer.cli as c\ntry:\n c.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=repo)
    assert done.stdout.strip().endswith("False")


@pytest.mark.parametrize("text", ["peak_memory_bytes", "peak_memory_bytes=much", "=0.1", "peak_memory_bytes=0", "peak_memory_bytes=2"])
def test_a_margin_that_cannot_be_read_is_refused_with_its_text(text):

    with pytest.raises(start.Refused, match=f"--guard-margin {text}"):
        start.prepare(start.Options(guard_margins=(text,), tp=1, device="cpu"))


@pytest.mark.parametrize(("options", "message"), [
    ({"guard_margins": ("peak_memory=0.1",)}, "--guard-margin peak_memory=0.1: no guard of that name here; there are: .*peak_memory_bytes"),
    ({"guard_margins": ("peak_memory_bytes=0.1",), "metric": "memory"}, "no guard of that name"),
    ({"engine_args": "--name 'open"}, "--engine-args --name 'open: No closing quotation"),
    ({"protocol": "quickest"}, "--protocol quickest: valid are quick, full"),
])  # fmt: skip
def test_what_can_be_refused_is_refused_before_weights_are_written(options, message, monkeypatch):
    """An unknown guard ended a run after its calibration, minutes in; a wrong protocol after 16 GB of weights."""

    monkeypatch.setattr(start, "_weights", lambda *_: pytest.fail("weights were touched"))
    with pytest.raises(start.Refused, match=message):
        start.prepare(start.Options(tp=1, device="cpu", **options))


@pytest.mark.parametrize("record", ["h200-tp1", "h200-tp2", "mcp-tiny"])
def test_the_guards_of_a_run_are_among_those_that_its_protocol_names(record, repo):
    from optimizer import guard_names
    from optimizer.targets import PROTOCOLS, protocol_for

    place = repo / "reports/gallery" / record
    want = json.loads((place / "run.json").read_text())
    lines = [json.loads(line) for line in (place / "ledger.jsonl").read_text().splitlines()]
    measured = {name for line in lines if line["kind"] == "pair" for name in line["data"]["guards"]}
    named = guard_names.possible(protocol_for(PROTOCOLS[want["protocol"]], want["metric"], want["device"]))
    assert measured and measured <= named and len(named) <= len(measured) + 2
