"""The worked example of the first hour: transformers' own generate loop, served, launched, traced and right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optimizer import target_init
from optimizer.confine.launch import launch
from optimizer.gates import boot, streams
from optimizer.target import load_target
from optimizer.traffic.client import Request
from optimizer.truth.oracle import Oracle
from optimizer.types import LaunchSpec
from trace_diff import api

REPO = Path(__file__).resolve().parents[1]
EXAMPLE, MODEL = REPO / "docs" / "examples" / "hf_target", REPO / "engine" / "tiny_qwen3"


def test_check_finds_nothing_missing():
    assert target_init.check(EXAMPLE) == []


@pytest.fixture(scope="module")
def served():
    spec = LaunchSpec(tree=EXAMPLE, target=load_target(EXAMPLE), python=Path(sys.executable), model_dir=MODEL, tp=1)
    with launch(spec) as server:
        yield server


def greedy(*lengths: int, new: int = 8, **more) -> list[Request]:
    return [Request(tuple(range(7, 7 + n)), new, **more) for n in lengths]


def test_what_it_answers_is_right_and_accounted_for(served):
    client = served.client
    fixed = client.complete(greedy(1, 15, 16, 17), 60)
    free = client.complete(greedy(5, 30, new=40, ignore_eos=False), 60)
    tokenizer = streams.tokenizer_of(MODEL)
    ends = frozenset(_ends())
    for stream in fixed:
        assert streams.account(stream, 8) is None and streams.text_fault(stream, tokenizer) is None
    for stream in free:
        assert streams.account(stream, streams.Expected(40, ends)) is None and streams.text_fault(stream, tokenizer) is None
    with Oracle(MODEL, "cpu", "float32") as oracle:
        assert all(score.ok and score.band == "equal" for score in oracle.score([*fixed, *free]))


def _ends() -> list[int]:
    from optimizer.truth import weights

    return list(weights.eos_ids(MODEL))


def test_one_seed_gives_one_stream_and_another_gives_another(served):
    ask = [greedy(9, temperature=1.0, seed=s)[0] for s in (1, 1, 2)]
    first, again, other = served.client.complete(ask, 60)
    assert first.token_ids == again.token_ids != other.token_ids


def test_what_cannot_be_served_gets_a_400_and_its_neighbour_an_answer(served):
    client, limit = served.client, served.metadata["max_model_len"]
    long, normal, leaving = client.complete([*greedy(limit, new=1), *greedy(6), *greedy(8, new=200, abort_after=2)], 60)
    assert long.status == 400 and normal.error is None and len(normal.token_ids) == 8
    assert client.post("/v1/completions", b'{"prompt": [1').status == 400
    assert client.post("/v1/completions", b'{"prompt": [-1], "max_tokens": 2}').status == 400
    assert leaving.error and client.complete(greedy(6), 60)[0].token_ids == normal.token_ids


def test_its_trace_has_the_steps_it_took(served, tmp_path):
    served.client.start_profile(record_shapes=True)
    served.client.complete(greedy(12, new=9), 60)
    served.client.stop_profile()
    traces = served.collect_traces(tmp_path)
    found = api.analyse(api.load([*traces], "example"))
    assert found.cell.tp == 1 and found.cell.batch == 1 and found.cell.layers == 4
    assert 5 <= len(found.steps[0]) <= 8


def test_it_states_what_it_is_and_loads_no_engine_besides_the_one_it_names(served):
    about = served.metadata
    assert about["engine"] == "transformers" and about["dtype"] == "float32" and about["tp"] == 1
    command = " ".join(load_target(EXAMPLE).serve)
    assert boot.foreign_engines(served.maps(), command) == set()
