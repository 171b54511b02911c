"""Capture from the real sandboxed server, read by the real trace diff; and what the server says of itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from loop_fakes import ENGINE, WEIGHTS, new_run

from optimizer import baseline, context, measure, preflight
from optimizer import capture as capturing
from optimizer.capture import capture
from optimizer.confine.launch import LaunchError
from optimizer.diagnose import DiagnoseError, diagnose
from optimizer.measure import PROTOCOLS
from optimizer.services import Capture
from optimizer.target import load_target
from optimizer.traffic.prompts import PromptSource
from optimizer.types import Cell, LaunchSpec, RejectReason

CELL = Cell("decode", 8, 10)
PROMPTS = PromptSource(b"k" * 32, WEIGHTS)


def spec(tree, tp: int = 1) -> LaunchSpec:
    return LaunchSpec(tree=tree, target=load_target(ENGINE), python=Path(sys.executable), model_dir=WEIGHTS, tp=tp)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    return capture(spec(ENGINE, 2), tmp_path_factory.mktemp("t") / "baseline", CELL, PROMPTS)


def test_every_rank_leaves_one_trace_named_by_rank(captured):
    assert [path.name for path in captured.traces] == ["rank0.json.gz", "rank1.json.gz"]
    assert all(path.stat().st_size for path in captured.traces)
    assert captured.control_us_per_token is None or captured.control_us_per_token > 0
    assert captured.metadata["tp"] == 2


def test_the_trace_diff_reads_it_and_its_step_is_the_fake_engines(captured):
    found = diagnose(captured, (), "fake")
    assert found.step_us == pytest.approx(1000, rel=0.02)
    assert found.tokens_per_step == 1
    assert found.findings and found.shown
    assert found.facts["diff"]["engines"][0]["label"] == "fake"


def test_a_reference_that_cannot_be_read_is_left_out_by_name(captured, tmp_path):
    broken = tmp_path / "rank0.json.gz"
    broken.write_bytes(b"not gzip")
    reference = Capture("hf", (broken,), 1, 1, 5.0, {"engine": "transformers"})
    found = diagnose(captured, (reference,), "fake")
    assert len(found.facts["left_out"]) == 1 and "transformers TP=1" in found.facts["left_out"][0]


def test_own_traces_that_cannot_be_read_are_an_error_that_names_them(tmp_path):
    broken = tmp_path / "rank0.json.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(DiagnoseError, match="baseline"):
        diagnose(Capture("baseline", (broken,), 1, 1, 5.0))


def test_a_server_that_writes_no_trace_is_a_named_failure(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in ENGINE.glob("*.py"):
        (tree / path.name).write_bytes(path.read_bytes())
    text = (tree / "server.py").read_text()
    (tree / "server.py").write_text(text.replace("tracing.write(", "len((").replace("Handler.profiled or 0)", "Handler.profiled or 0))"))
    with pytest.raises(LaunchError, match="no trace of rank 0") as caught:
        capture(spec(tree), tmp_path / "out", CELL, PROMPTS)
    assert caught.value.reason is RejectReason.WITNESS


def test_what_the_server_reports_is_shown_and_every_difference_named(tmp_path):
    request = replace(new_run(tmp_path / "run").request, tp=2)
    protocol = PROTOCOLS["quick"]
    good = {"tp": 2, "dtype": "torch.float32", "device": "cpu:0", "max_model_len": 4096}
    preflight.check(request, good, protocol)
    preflight.check(request, {}, protocol)
    assert preflight.table(request, good, protocol).row_count > 5
    bad = {"tp": 1, "dtype": "bfloat16", "device": "cuda", "max_model_len": 4}
    with pytest.raises(preflight.Differs) as caught:
        preflight.check(request, bad, protocol)
    for words in ("tp: asked for 2, the server runs 1", "dtype", "device", "max_model_len"):
        assert words in str(caught.value)


def test_requests_are_profiled_as_they_are_timed(monkeypatch):
    """With `min_tokens`, which no timed request has, an engine took another way for the sampling of each traced step."""
    prompts = PromptSource(b"0123456789abcdef", WEIGHTS)
    cell = Cell("decode", 16, 8)

    def bodies(requests):
        return [{k: v for k, v in json.loads(r.body("m")).items() if k not in ("prompt", "max_tokens")} for r in requests]

    timed = bodies(measure._job(cell, "timed", prompts).rounds[0])
    assert bodies(capturing._requests(cell, prompts, "profiled")) == timed
    wanted = type("Wanted", (), {"phase": "decode", "batch": 1, "prompt_tokens": 16})
    assert bodies(baseline._requests(wanted, prompts, "profiled", 8)) == timed


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (("cuda", 1, 1), ["vLLM graph", "vLLM eager", "MetaInfer meta0"]),
        (("cuda", 1, 32), ["vLLM graph, batch 32", "vLLM eager, batch 32"]),
        (("cuda", 2, 1), ["vLLM graph, TP=2, custom all-reduce", "vLLM graph, TP=2, NCCL", "vLLM eager, TP=2, custom all-reduce"]),
        (("cpu", 4, 1), ["vLLM CPU compiled, TP=1", "vLLM CPU eager, TP=1", "vLLM CPU eager, TP=2"]),
    ],
)
def test_stored_engines_are_those_of_the_nearest_cell_and_vllm_first(cell, shown) -> None:
    assert [found.label for found in context.stored(*cell)][: len(shown)] == shown
