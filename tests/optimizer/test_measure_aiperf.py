"""AIPerf's artefacts are read as they are, and where it disagrees with our client nobody is believed.

`data/aiperf` holds trimmed artefacts of a real run of AIPerf 0.13.0 against the tiny engine.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from optimizer.target import load_target
from optimizer.traffic import aiperf
from optimizer.traffic import bench_aiperf as benching
from optimizer.traffic.aiperf import AiperfError, Numbers, Workload
from optimizer.traffic.client import Client, Request
from optimizer.traffic.forward import forwarded
from optimizer.traffic.null_server import running
from optimizer.types import LaunchSpec

DATA = Path(__file__).parent / "data" / "aiperf"
MODEL = Path(__file__).resolve().parents[2] / "engine" / "tiny_qwen3"


def edited(folder: Path, **changes) -> Path:
    data = json.loads((DATA / "profile_export_aiperf.json").read_text())
    (folder / "profile_export_aiperf.json").write_text(json.dumps(data | changes))
    return folder


def test_real_artefacts_are_read():
    found = aiperf.parse(DATA)
    raw = json.loads((DATA / "profile_export_aiperf.json").read_text())
    assert found.ttft_p50_ms == raw["time_to_first_token"]["p50"]
    assert found.tpot_p50_ms == raw["inter_token_latency"]["p50"]
    assert found.tokens_per_s == raw["output_token_throughput"]["avg"]
    assert (found.requests, found.output_tokens) == (12, 32.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"was_cancelled": True}, "cancelled"),
        ({"is_complete": False}, "incomplete"),
        ({"schema_version": "2.0"}, "schema"),
        ({"error_summary": [{"error": "500", "count": 1}]}, "requests failed"),
        ({"request_error_rate": {"unit": "%", "avg": 12.5}}, "requests failed"),
        ({"inter_token_latency": {"unit": "ms"}}, r"inter_token_latency\.p50"),
    ],
)
def test_a_result_that_cannot_be_trusted_is_an_error_not_a_number(tmp_path, changes, says):
    with pytest.raises(AiperfError, match=says):
        aiperf.parse(edited(tmp_path, **changes))


def test_a_missing_result_is_named(tmp_path):
    with pytest.raises(AiperfError, match="profile_export_aiperf"):
        aiperf.parse(tmp_path)


def test_its_prompts_become_the_same_tokens_for_our_client():
    prompts = aiperf.prompts_of(DATA, MODEL)
    assert len(prompts) == 4 and all(len(p) == 64 for p in prompts)


def test_more_than_five_percent_is_a_fault_of_measurement():
    own = Numbers(50.0, 10.0, 100.0, 24, 64.0)
    rows = benching.compare(own, Numbers(51.0, 10.8, 96.0, 24, 64.0))
    assert [(r.metric, r.fault) for r in rows] == [("ttft_p50_ms", False), ("tpot_p50_ms", True), ("tokens_per_s", False)]
    with pytest.raises(AiperfError, match="different work"):
        benching.compare(own, Numbers(50.0, 10.0, 100.0, 24, 63.0))


def test_a_fault_says_what_the_clients_differ_by_where_nothing_is_computed():
    """Seen on two cores: AIPerf 2.3 ms later at the first token of a tiny engine; that is its own, whatever the engine."""
    own = Numbers(15.8, 6.0, 160.0, 24, 64.0)
    clients = benching.Clients(Numbers(20.2, 10.0, 98.0, 8, 64.0), Numbers(22.5, 10.0, 97.0, 8, 64.0))
    own_fault = benching.compare(own, Numbers(18.1, 6.0, 156.0, 24, 64.0), clients, 0.6)[0]
    assert own_fault.fault and own_fault.why == "the clients themselves: on a server that computes nothing they say 20.20 and 22.50"
    crowded = benching.compare(own, Numbers(18.1, 9.0, 100.0, 24, 64.0), clients, 1.3)
    assert crowded[1].fault and crowded[1].why.startswith("+50.0% without") and "AIPerf kept 1.3 of " in crowded[1].why
    assert crowded[2].fault and crowded[2].why.startswith("-36") and "98.00 and 97.00" in crowded[2].why
    assert not benching.compare(own, own, clients, 1.3)[0].why


def test_a_missing_program_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AiperfError, match="make aiperf-env"):
        aiperf.find(tmp_path)


def program(folder: Path, text: str) -> Path:
    """A stand-in for the aiperf program."""
    path = folder / "aiperf"
    path.write_text(f"#!{sys.executable}\nimport json, pathlib, shutil, sys, time\nout = pathlib.Path(sys.argv[sys.argv.index('--artifact-dir') + 1])\n{text}\n")  # fmt: skip
    path.chmod(0o755)
    return path


def test_both_clients_meet_over_one_forwarded_socket(tmp_path):
    stand_in = program(tmp_path, f"shutil.copytree({str(DATA)!r}, out, dirs_exist_ok=True)")
    work = Workload(new_tokens=32, requests=4, warmup_requests=1)
    with running(tmp_path / "s.sock", 2.0) as path, forwarded(path) as url:
        assert Client(base_url=url).complete([Request((1, 2, 3), 5)], 10)[0].token_ids == (0, 1, 2, 3, 4)
        found = benching.bench_url("null", url, "null", MODEL, work, tmp_path / "out", stand_in)
    assert found["fault"] and 1.5 < found["ours"]["tpot_p50_ms"] < 6.0
    assert found["ours"]["output_tokens"] == 32
    text = "\n".join(benching.lines({"engines": [found]}))
    assert "fault of measurement" in text and "tpot_p50_ms" in text and found["aiperf_cores"] > 0


def test_both_clients_meet_a_server_that_computes_nothing_first(tmp_path):
    clients = benching.meet(program(tmp_path, f"shutil.copytree({str(DATA)!r}, out, dirs_exist_ok=True)"), Workload(new_tokens=32), MODEL, tmp_path / "out")
    assert clients.aiperf == aiperf.parse(DATA)
    assert 20.0 <= clients.ours.ttft_p50_ms < 40.0 and 9.0 < clients.ours.tpot_p50_ms < 20.0


def test_a_program_that_fails_or_hangs_is_named_and_gone(tmp_path):
    out = tmp_path / "out"
    failing = program(tmp_path, "sys.exit('no server')")
    with pytest.raises(AiperfError, match="no server"):
        aiperf.run([str(failing), "--artifact-dir", str(out)], out)
    hanging = program(tmp_path, "time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(AiperfError, match="did not end"):
        aiperf.run([str(hanging), "--artifact-dir", str(out)], out, timeout_s=0.3)
    assert time.monotonic() - began < 5
    shutil.rmtree(out)


def test_other_servers_are_named_with_their_model(tmp_path):
    class Repo:
        def incumbent(self) -> str:
            return "a"

    class Run:
        repo, base, dir, request = Repo(), "a", tmp_path, SimpleNamespace(python=Path("/nowhere"))

        def spec(self, *_) -> None:
            return None

    with pytest.raises(AiperfError, match="label=http"):
        benching.bench_run(Run(), Workload(), ["http://127.0.0.1:8000"])


def a_site(folder: Path, repo: Path) -> Path:
    """A folder with a vLLM in it: the stand-in, under the real one's name."""
    inner = folder / "vllm" / "entrypoints" / "openai"
    inner.mkdir(parents=True)
    for package in (folder / "vllm", folder / "vllm" / "entrypoints", inner):
        (package / "__init__.py").touch()
    fake = repo / "tests" / "fakes" / "vllm" / "api_server.py"
    (inner / "api_server.py").write_text(f"import runpy\nrunpy.run_path({str(fake)!r}, run_name='__main__')\n")
    return folder


@pytest.mark.parametrize("starts", [True, False])
def test_vllm_is_measured_where_it_is_installed(starts, repo, tmp_path, monkeypatch):
    """It is started with the model's tokenizer (AIPerf sends text); one that does not start costs no other result."""
    want = SimpleNamespace(python=Path(sys.executable), model_dir=MODEL, dtype="float32", tp=1)
    work = Workload(new_tokens=32, requests=4, warmup_requests=1)
    assert (benching.vllm_of(want, work, None) is None) == (importlib.util.find_spec("vllm") is None)
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(AiperfError, match=r"--vllm-site .*nothing: .* finds no vLLM there"):
            benching.vllm_of(want, work, tmp_path / "nothing")
    command = benching.vllm_of(want, work, a_site(tmp_path / "site", repo))
    assert command is not None and "--skip-tokenizer-init" not in command.argv
    if not starts:
        monkeypatch.setenv("FAKE_VLLM", "dies")
    program(tmp_path, f"shutil.copytree({str(DATA)!r}, out, dirs_exist_ok=True)").rename(tmp_path / "aiperf.real")
    (tmp_path / ".venv-aiperf" / "bin").mkdir(parents=True)
    (tmp_path / "aiperf.real").rename(tmp_path / ".venv-aiperf" / "bin" / "aiperf")
    engine = repo / "tests" / "fakes" / "engine"
    spec = LaunchSpec(engine, load_target(engine), Path(sys.executable), MODEL, 1, "cpu", label="fake", sandbox="none")
    found = benching.bench({"original": spec}, tmp_path / "out", root=tmp_path, work=work, vllm=command)
    assert [e["label"] for e in found["engines"]] == ["original", "vllm"][: 1 + starts]
    assert json.loads((tmp_path / "out" / "aiperf.json").read_text()) == found and found["null_server"]["pace_ms"] == 10.0
    assert ("vllm: not measured: " in benching.lines(found)[-1]) != starts
