"""AIPerf's artefacts are read as they are, and where it disagrees with our client nobody is believed.

`data/aiperf` holds trimmed artefacts of a real run of AIPerf 0.13.0 against the tiny engine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from optimizer.traffic import bench_aiperf as aiperf
from optimizer.traffic import loadgen
from optimizer.traffic.bench_aiperf import AiperfError, Numbers, Workload
from optimizer.traffic.client import Client, Request
from optimizer.traffic.forward import forwarded

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
    rows = aiperf.compare(own, Numbers(51.0, 10.8, 96.0, 24, 64.0))
    assert [(r.metric, r.fault) for r in rows] == [("ttft_p50_ms", False), ("tpot_p50_ms", True), ("tokens_per_s", False)]
    with pytest.raises(AiperfError, match="different work"):
        aiperf.compare(own, Numbers(50.0, 10.0, 100.0, 24, 63.0))


def test_a_missing_program_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AiperfError, match="make aiperf-env"):
        aiperf.find(tmp_path)


@contextmanager
def null_server(folder: Path, pace_ms: float):
    import subprocess

    path = folder / "s.sock"
    argv = [sys.executable, "-P", "-m", "optimizer.traffic.null_server", str(path), str(pace_ms)]
    env = os.environ | {"PYTHONPATH": str(Path(loadgen.__file__).resolve().parents[2])}
    with subprocess.Popen(argv, env=env) as process:
        try:
            deadline = time.monotonic() + 10
            while not Client(socket_path=path).health():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield path
        finally:
            process.terminate()


def program(folder: Path, text: str) -> Path:
    """A stand-in for the aiperf program."""
    path = folder / "aiperf"
    path.write_text(f"#!{sys.executable}\nimport json, pathlib, shutil, sys, time\nout = pathlib.Path(sys.argv[sys.argv.index('--artifact-dir') + 1])\n{text}\n")  # fmt: skip
    path.chmod(0o755)
    return path


def test_both_clients_meet_over_one_forwarded_socket(tmp_path):
    stand_in = program(tmp_path, f"shutil.copytree({str(DATA)!r}, out, dirs_exist_ok=True)")
    work = Workload(new_tokens=32, requests=4, warmup_requests=1)
    with null_server(tmp_path, 2.0) as path, forwarded(path) as url:
        assert Client(base_url=url).complete([Request((1, 2, 3), 5)], 10)[0].token_ids == (0, 1, 2, 3, 4)
        found = aiperf.bench_url("null", url, "null", MODEL, work, tmp_path / "out", stand_in)
    assert found["fault"] and 1.5 < found["ours"]["tpot_p50_ms"] < 6.0
    assert found["ours"]["output_tokens"] == 32
    text = "\n".join(aiperf.lines({"engines": [found]}))
    assert "fault of measurement" in text and "tpot_p50_ms" in text


def test_a_program_that_fails_or_hangs_is_named_and_gone(tmp_path):
    out = tmp_path / "out"
    failing = program(tmp_path, "sys.exit('no server')")
    with pytest.raises(AiperfError, match="no server"):
        aiperf.run_aiperf([str(failing), "--artifact-dir", str(out)], out)
    hanging = program(tmp_path, "time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(AiperfError, match="did not end"):
        aiperf.run_aiperf([str(hanging), "--artifact-dir", str(out)], out, timeout_s=0.3)
    assert time.monotonic() - began < 5
    shutil.rmtree(out)


def test_other_servers_are_named_with_their_model(tmp_path):
    class Repo:
        def incumbent(self) -> str:
            return "a"

    class Run:
        repo, base, dir = Repo(), "a", tmp_path

        def spec(self, *_) -> None:
            return None

    with pytest.raises(AiperfError, match="label=http"):
        aiperf.bench_run(Run(), Workload(), ["http://127.0.0.1:8000"])
