"""`optimize baseline` on a CPU: transformers, a stand-in for vLLM, a command line and a target folder, into one index."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimizer import baseline
from optimizer.cli import app
from optimizer.outside import OutsideError, parse, serve
from reports import baselines
from trace_diff import api, windows
from trace_diff.cut import choose
from trace_diff.types import Phase

DIMENSIONS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8}


@pytest.fixture
def want(tmp_path: Path, repo: Path) -> baseline.Wanted:
    """The fake weights; `engine` is left to the test."""
    model = tmp_path / "model"
    shutil.copytree(repo / "tests" / "fakes" / "weights", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | DIMENSIONS))
    return baseline.Wanted("hf", "eager", model, python=Path(sys.executable), repeats=2, sandbox="none")


@pytest.fixture
def site(tmp_path: Path, repo: Path) -> Path:
    """A folder in which `python -m vllm.entrypoints.openai.api_server` is the stand-in."""
    place = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    fake = repo / "tests" / "fakes" / "vllm" / "api_server.py"
    (place / "api_server.py").write_text(f"import runpy\nrunpy.run_path({str(fake)!r}, run_name='__main__')\n")
    return tmp_path / "site"


def test_vllm_is_timed_without_the_profiler_then_traced_and_kept_with_its_provenance(want, site, tmp_path):
    got = baseline.capture(replace(want, engine="vllm", vllm_site=site), tmp_path / "kept")
    assert (got.engine, got.version, got.mode, got.dtype, got.batch) == ("vLLM", "0.25.1", "eager", "float32", 1)
    assert got.clean["n"] == 2 and 9000 < got.clean["step_us"] < 60000, "the stand-in sleeps 9 ms a step with --enforce-eager"
    assert got.provenance["observer_ratio"] > 0 and len(got.provenance["prompts_sha256"]) == 64
    assert "--enforce-eager" in got.provenance["command"] and "--profiler-config" in got.provenance["command"]
    assert got.phases == ("decode", "prefill") and len(got.provenance["files"][0]["steps"]) == baseline.DECODE_STEPS + 1
    assert got.provenance["files"][0]["command"].startswith("trace-diff cut ")
    (again,) = baselines.load_index(tmp_path / "kept")
    assert again == got and baseline.fault(again) is None
    analysed = api.analyse(api.load(list(got.paths)))
    assert analysed.observer.control_us == pytest.approx(got.clean["step_us"]), "the cut file carries its control step"


def test_every_engine_is_sent_the_same_prompts(want, site, tmp_path, repo, monkeypatch):
    monkeypatch.chdir(repo)  # a program may be named from where the command is typed; it runs elsewhere
    command = (
        "{python} tests/fakes/vllm/api_server.py --model {model_dir} --uds {socket} --dtype float32 --kv-cache-memory-bytes 9999 "
        '--served-model-name m --max-model-len 4096 --profiler-config \'{"profiler": "torch", "torch_profiler_dir": "{trace_dir}"}\''
    )
    got = [
        baseline.capture(replace(want, engine=engine, id=name, vllm_site=site, version="7"), tmp_path / "kept")
        for name, engine in (("vllm", "vllm"), ("command", command))
    ]
    target = baseline.capture(replace(want, engine=str(repo / "tests" / "fakes" / "engine"), id="target", batch=2, phase="prefill", prompt_tokens=4), tmp_path / "kept")
    assert len({t.provenance["prompts_sha256"] for t in got}) == 1
    assert got[1].version == "7" and target.engine == "fake" and target.version.startswith("tree ")
    assert target.phases == ("prefill",) and "step_us" not in target.clean and target.clean["ttft_ms"] > 0
    assert [t.id for t in baselines.load_index(tmp_path / "kept")] == ["vllm", "command", "target"]


def test_transformers_is_captured_in_its_own_process(want, tmp_path, repo):
    got = baseline.capture(replace(want, model=repo / "engine" / "tiny_qwen3", batch=2), tmp_path / "kept")
    assert got.engine.startswith("transformers") and got.batch == 2 and got.clean["tok_s"] == pytest.approx(2e6 / got.clean["step_us"])
    assert got.provenance["observer_ratio"] > 0 and baseline.fault(got) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": "sglang"}, "neither vllm, nor hf"),
        ({"engine": "python server.py"}, "neither vllm, nor hf"),
        ({"mode": "graph"}, "a CPU has no CUDA graphs"),
        ({"mode": "graph", "device": "cuda"}, "no graph mode"),
        ({"phase": "both"}, "valid: decode, prefill"),
        ({"batch": 0}, "at least 1"),
        ({"model": Path("/nonexistent")}, "no config.json"),
        ({"engine": "false {socket}"}, "ended with status 1"),
    ],
)
def test_what_cannot_be_captured_is_one_clear_message_and_nothing_is_kept(want, tmp_path, change, words):
    with pytest.raises(baseline.BaselineCaptureError, match=words):
        baseline.capture(replace(want, **change), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_an_id_that_is_there_is_refused_before_anything_is_started(want, site, tmp_path):
    taken = replace(want, engine="vllm", vllm_site=site, id="one")
    baseline.capture(taken, tmp_path / "kept")
    with pytest.raises(baselines.BaselineError, match="already"):
        baseline.capture(replace(taken, engine="false {socket}"), tmp_path / "kept")
    baseline.capture(replace(taken, replace=True, repeats=1), tmp_path / "kept")
    (only,) = baselines.load_index(tmp_path / "kept")
    assert only.clean["n"] == 1


def test_verify_names_a_file_that_was_edited_and_one_that_holds_something_else(want, site, tmp_path):
    kept = tmp_path / "kept"
    got = baseline.capture(replace(want, engine="vllm", vllm_site=site, id="one"), kept)
    run = CliRunner()
    assert run.invoke(app, ["baseline", "verify", "--from", str(kept)]).output == "ok  one\n"
    index = json.loads((kept / "index.json").read_text())
    index["sets"][0]["phases"] = ["prefill"]
    (kept / "index.json").write_text(json.dumps(index))
    said = run.invoke(app, ["baseline", "verify", "--from", str(kept)])
    assert said.exit_code == 1 and "the index says prefill" in said.output
    got.paths[0].write_bytes(b"")
    assert "sha256" in run.invoke(app, ["baseline", "verify", "--from", str(kept)]).output
    assert "one" in run.invoke(app, ["baseline", "list", "--from", str(kept)]).output


def test_the_bundled_baselines_hold_what_their_index_says():
    assert {t.id: baseline.fault(t) for t in baselines.load_index(check=False) if t.device == "cpu"} == dict.fromkeys(
        (t.id for t in baselines.load_index(check=False) if t.device == "cpu"), None
    )


def test_a_cut_of_a_prefill_alone_keeps_a_prefill():
    trace = api.load(list(baselines.get("cpu-vllm-compile-tp1").paths))
    steps = [step for rank in trace for step in windows.steps(rank)]
    assert [s.phase for s in choose(steps, 1, 0)] == [Phase.PREFILL]


def test_a_command_that_nobody_could_reach_is_refused():
    with pytest.raises(OutsideError, match="neither"):
        parse("python -m http.server", "x")


def test_a_server_on_a_port_is_reached_and_nothing_of_it_is_left(tmp_path):
    code = (
        "import http.server, json, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def log_message(self, *a): pass\n"
        "    def do_GET(self):\n"
        "        body = json.dumps({'data': [{'id': 'm'}]}).encode()\n"
        "        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers(); self.wfile.write(body)\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    (tmp_path / "s.py").write_text(code)
    with serve(parse(f"{{python}} {tmp_path / 's.py'} {{port}}", "x"), tmp_path, Path(sys.executable), timeout_s=10) as server:
        assert server.client.health() and server.metadata == {"id": "m"}
        assert server._process is not None
        pid, work = server._process.pid, server.log_path.parent
    assert not Path(f"/proc/{pid}").exists() and not work.exists()


def test_a_server_that_never_gets_healthy_is_ended(tmp_path):
    with (
        pytest.raises(OutsideError, match="not healthy within"),
        serve(parse("sleep 60 {socket}".replace(" {socket}", " 0.{port}"), "x"), tmp_path, Path(sys.executable), timeout_s=0.3),
    ):
        raise AssertionError("never reached")
