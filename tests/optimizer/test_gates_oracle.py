"""The oracle, secret prompts and secret weights: what is right is known, and known to nobody else."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loop_fakes import new_run
from rich.console import Console

from optimizer import wiring
from optimizer.gates import sampling, streams
from optimizer.gates.streams import Expected
from optimizer.traffic import prompts as prompts_module
from optimizer.traffic.prompts import PAGE_LENGTHS, PromptSource
from optimizer.truth import weights
from optimizer.truth.oracle import BANDS, Bands, Oracle, OracleError, calibrated
from optimizer.types import RejectReason, Stream
from optimizer.view import Terminal

MODEL = Path(__file__).resolve().parents[2] / "engine" / "tiny_qwen3"
KEY = b"0123456789abcdef"


def stream(prompt, tokens, **changes) -> Stream:
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    made = Stream(tuple(prompt), tuple(tokens), "", "length", 0, tuple(range(len(tokens))), usage)
    return replace(made, **changes)


@pytest.fixture(scope="module")
def oracle():
    with Oracle(MODEL) as made:
        yield made


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return PromptSource(KEY, MODEL)


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Path:
    return weights.write_random(MODEL, tmp_path_factory.mktemp("w") / "a", 5)


# -- oracle ------------------------------------------------------------------------------------------------


def test_its_own_tokens_are_equal_and_a_changed_one_is_found(oracle, source):
    drawn = source.draw("own", 6, [15, 16, 17, 33, 48, 64])
    tokens = oracle.generate(drawn, 8)
    good = [stream(p, t) for p, t in zip(drawn, tokens, strict=True)]
    assert all(s.ok and s.max_gap <= 1e-3 for s in oracle.score(good))
    changed = replace(good[2], token_ids=(*tokens[2][:5], (tokens[2][5] + 1) % 2048, *tokens[2][6:]))
    score = oracle.score([good[0], changed, good[1]])[1]
    assert (score.ok, score.first_bad, score.band, score.expected) == (False, 5, "wrong", tokens[2][5])


def test_no_tokens_and_impossible_tokens_are_wrong(oracle):
    empty, outside = oracle.score([stream((1, 2, 3), ()), stream((1, 2, 3), (5000,))])
    assert not empty.ok and not outside.ok and outside.max_gap == float("inf")


def test_what_is_no_token_in_the_middle_of_a_stream_is_a_verdict_not_an_error(oracle):
    score = oracle.score([stream((1, 2, 3), (70_000, 5, 2**31 - 1))])[0]
    assert (score.ok, score.first_bad, score.max_gap) == (False, 0, float("inf"))
    assert oracle.mass([stream((1, 2, 3), (70_000, 5))], 1.0)[0][0] == (pytest.approx(1.0), 0.0)


def test_sixteen_streams_of_64_tokens_are_scored_in_a_moment(oracle, source):
    drawn = source.draw("time", 16, 64)
    before = oracle.cpu_s()
    oracle.score([stream(p, range(64)) for p in drawn])
    assert oracle.cpu_s() - before < 2.0


def test_logprobs_and_masses_agree_with_the_logits(oracle, source):
    drawn = source.draw("agree", 3, 20)
    table = oracle.logits(drawn)
    best = table.argmax(-1)
    one = [stream(p, (int(t),)) for p, t in zip(drawn, best, strict=True)]
    values = oracle.logprobs(one, [[[int(t), 7]] for t in best])
    masses = oracle.mass(one, 1.0)
    for row, t, value, mass in zip(table, best, values, masses, strict=True):
        p = sampling.softmax(row)
        assert value[0] == pytest.approx([np.log(p[t]), np.log(p[7])], abs=1e-4)
        assert mass[0] == pytest.approx((0.0, p[t]), abs=1e-5)


def test_other_weights_give_other_tokens_in_the_same_process(oracle, source, secret):
    drawn = source.draw("swap", 2, 20)
    there = oracle.at(secret)
    assert there.generate(drawn, 6) != oracle.generate(drawn, 6)
    assert all(s.ok for s in there.score([stream(p, t) for p, t in zip(drawn, there.generate(drawn, 6), strict=True)]))


def test_a_failing_oracle_is_an_error_not_a_verdict(oracle, tmp_path):
    with pytest.raises(OracleError, match="oracle, score"):
        oracle.at(tmp_path).score([stream((1, 2), (3,))])
    assert oracle.score([stream((1, 2), (3,))]), "and it goes on"


def test_on_gpus_the_oracle_takes_the_first_that_the_run_was_given():
    """`--devices 1` left the engines on that card and put the oracle, and the measured bandwidth, on card 0."""
    with Oracle(MODEL, devices=(3, 2)) as made:
        where, until = Path(f"/proc/{made._link._process.pid}/environ"), time.monotonic() + 10
        while not (environment := where.read_bytes()) and time.monotonic() < until:
            time.sleep(0.01)  # a process that has begun its program has none for a moment
        assert b"CUDA_VISIBLE_DEVICES=3" in environment.split(b"\0")


def test_a_run_hands_its_devices_to_the_oracle(tmp_path, monkeypatch):
    def asked(*_, devices, **__):
        raise OracleError(f"asked for {devices}")

    monkeypatch.setattr("optimizer.truth.oracle.Oracle", asked)
    run = new_run(tmp_path / "run")
    run.request = replace(run.request, device="cuda", devices=(1,))
    with pytest.raises(OracleError, match=r"asked for \(1,\)"), wiring.real(run, Terminal(Console())):
        pass


def test_a_closed_oracle_says_so():
    made = Oracle(MODEL)
    made.close()
    with pytest.raises(OracleError):
        made.score([stream((1, 2), (3,))])


def test_bands():
    bands = Bands(1e-3, 1e-2)
    assert [bands.name(g) for g in (0.0, 1e-4, 5e-3, 0.5, float("inf"))] == ["equal", "reorder", "tolerance", "wrong", "wrong"]
    floor = BANDS["bfloat16"]
    assert calibrated([0.1, 0.2], floor) == floor
    assert calibrated([0.6], floor).reorder == 1.2


# -- accounts of streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ({}, 4, None),
        ({"finish_reason": "stop"}, 4, "not 'length'"),
        ({}, 5, "4 tokens came, 5"),
        ({}, 3, "4 tokens came, 3"),
        ({"usage": {"prompt_tokens": 2, "completion_tokens": 5}}, 4, "usage says 5"),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, 4, "prompt tokens"),
        ({"usage": None}, 4, "usage says None"),
        ({"error": "boom"}, 4, "boom"),
        ({}, Expected(9, frozenset({13})), None),
        ({"finish_reason": "length"}, Expected(9, frozenset({13})), "not 'stop'"),
        ({}, Expected(9, frozenset({11})), "2 more tokens"),
        ({}, Expected(9, frozenset({99})), "no end-of-text"),
    ],
)
def test_the_account_of_a_stream(changes, expected, words):
    made = stream((1, 2), (10, 11, 12, 13), **changes)
    if isinstance(expected, Expected) and "finish_reason" not in changes:
        made = replace(made, finish_reason="stop" if 13 in expected.eos else made.finish_reason)
    wrong = streams.account(made, expected)
    assert wrong is None if words is None else words in (wrong or "")


def test_text_must_be_what_the_tokens_say():
    tokenizer = streams.tokenizer_of(MODEL)
    ids = tokenizer.encode("for x in größer: 日本").ids
    assert streams.text_fault(stream((1,), ids, text=tokenizer.decode(ids)), tokenizer) is None
    assert "at character 4" in (streams.text_fault(stream((1,), ids, text="for y in größer: 日本"), tokenizer) or "")


def test_drift_is_parked_and_accepted_only_on_request(oracle, source):
    drawn = source.draw("drift", 1, 24)[0]
    tokens = oracle.generate([drawn], 6)[0]
    table = oracle.logits([drawn])[0]
    second = int(np.argsort(-table)[1])
    gap = float(table.max() - table[second])
    wide = oracle.at(MODEL, Bands(gap / 2, gap * 2))
    off = stream(drawn, (second,))
    parked = streams.check([off], wide, [1])
    assert parked.parked and not parked.passed and parked.reason is RejectReason.DRIFT
    assert streams.check([off], wide, [1], accept_numeric_drift=True).passed
    wrong = streams.check([off], oracle, [1])
    assert not wrong.parked and wrong.reason is RejectReason.WRONG_TOKENS and wrong.check == "G08"
    assert streams.check([stream(drawn, tokens)], oracle, [6]).passed


# -- prompts -----------------------------------------------------------------------------------------------


def test_prompts_have_the_length_asked_for_and_no_special_tokens(source):
    lengths = [*PAGE_LENGTHS, 1, 1000]
    for kind in prompts_module.ALL_KINDS:
        drawn = source.draw(f"len/{kind}", len(lengths), lengths, kinds=(kind,))
        assert [len(p) for p in drawn] == lengths
        special = {0, 1, 2} & {t for p in drawn for t in p}
        assert special == ({0, 1, 2} if kind == "marked" else set()) and max(max(p) for p in drawn) < 2048


def test_marked_prompts_hold_special_tokens_as_chats_do(source):
    special = set(source.special_ids.tolist())
    drawn = source.draw("marked", 20, 32, kinds=("marked",))
    assert special and not special & set(source.ordinary_ids.tolist())
    assert all(len(p) == 32 and special & set(p) and set(p) - special for p in drawn)
    assert len(source.draw("short", 1, 1, kinds=("marked",))[0]) == 1


def test_a_prompt_depends_on_key_evaluation_and_place_alone(source):
    one = source.draw("e", 4, 32)
    assert one == PromptSource(KEY, MODEL).draw("e", 4, 32) and len(set(one)) == 4
    assert one != source.draw("f", 4, 32)
    assert one != PromptSource(KEY[::-1], MODEL).draw("e", 4, 32)
    assert source.sha(one) == source.sha(list(one)) != source.sha(one[:3])


def test_bad_requests_for_prompts_name_what_is_known(source):
    with pytest.raises(ValueError, match="rare_scripts"):
        source.draw("e", 1, 4, kinds=("poetry",))
    with pytest.raises(ValueError, match="length"):
        source.draw("e", 2, [4])
    with pytest.raises(ValueError, match="16 bytes"):
        PromptSource(b"short", MODEL)


def test_random_prompts_use_the_whole_vocabulary(source):
    drawn = source.draw("cover", 1, 20_000, kinds=("random",))[0]
    counts = np.bincount(drawn, minlength=2048)[3:]
    assert (counts > 0).mean() > 0.99 and counts.max() < 40


# -- weights -----------------------------------------------------------------------------------------------


def test_secret_weights_have_the_same_form_and_look_the_same_from_inside(secret, tmp_path):
    real, drawn = weights.read_header(MODEL / "model.safetensors"), weights.read_header(secret / "model.safetensors")
    form = lambda header: {n: (e["shape"], e["dtype"]) for n, e in header.items()}  # noqa: E731
    assert form(real) == form(drawn)
    assert {p.name for p in secret.iterdir()} == {p.name for p in MODEL.iterdir() if p.is_file()}
    other = weights.write_random(MODEL, tmp_path / "b", 6)
    assert weights.digest(other) != weights.digest(secret) != weights.digest(MODEL)
    again = weights.write_random(MODEL, tmp_path / "c", 5)
    assert (again / "model.safetensors").read_bytes() == (secret / "model.safetensors").read_bytes()


def test_one_changed_layer_changes_nothing_else(tmp_path):
    out = weights.write_perturbed(MODEL, tmp_path / "p", 1, 3)
    header = weights.read_header(MODEL / "model.safetensors")

    def tensors(folder: Path) -> dict[str, bytes]:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        own = weights.read_header(path)
        base = 8 + int.from_bytes(data[:8], "little")
        return {n: data[base + e["data_offsets"][0] : base + e["data_offsets"][1]] for n, e in own.items()}

    before, after = tensors(MODEL), tensors(out)
    changed = {n for n in header if before[n] != after[n]}
    assert changed == {n for n in header if ".layers.1." in n and "norm" not in n}


def test_touched_weights_are_noticed_cheaply(secret, tmp_path):
    copy = weights.write_random(MODEL, tmp_path / "d", 7)
    before = weights.fingerprint(copy)
    time.sleep(0.01)
    (copy / "model.safetensors").touch()
    assert weights.fingerprint(copy) != before


def test_end_of_text_is_frequent_under_secret_weights(oracle, source, secret):
    ends = weights.eos_ids(secret)
    tokens = [t for row in oracle.at(secret).generate(source.draw("ends", 6, 24), 24) for t in row]
    assert 0.01 < np.isin(tokens, list(ends)).mean() < 0.6


# -- sampling statistics -----------------------------------------------------------------------------------


def test_sampling_statistics_accept_the_right_and_reject_the_wrong_distribution():
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1.0, 2048) * 2.5
    right, wrong = sampling.softmax(logits), sampling.softmax(logits / 1.15)
    p_right = [sampling.chi_square_p(rng.choice(2048, 600, p=right).tolist(), right) for _ in range(200)]
    assert min(p_right) > 1e-4 and 0.35 < np.mean(p_right) < 0.65
    p_wrong = [sampling.chi_square_p(rng.choice(2048, 3000, p=wrong).tolist(), right) for _ in range(20)]
    assert np.median(p_wrong) < sampling.ALPHA
    one = np.zeros(2048)
    one[3] = 1.0
    assert sampling.chi_square_p([5], one) == 0.0 and sampling.chi_square_p([3] * 50, one) == 1.0


def test_the_stated_power_is_what_simulation_finds():
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 3.0, (4, 512))
    draws, hits = 1500, 0
    stated = sampling.power_against(logits, logits / 1.12, draws)
    for _ in range(150):
        places = []
        for row in logits:
            p, q = sampling.softmax(row), sampling.softmax(row / 1.12)
            order = np.argsort(-p, kind="stable")
            above = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
            at = np.argsort(order)[rng.choice(512, draws // 4, p=q)]
            places.append(above[at] + rng.random(len(at)) * p[order][at])
        counts = np.histogram(np.concatenate(places), sampling.UNIFORM_BINS, (0, 1 + 1e-9))[0]
        hits += sampling.uniform_p(counts) < sampling.ALPHA
    assert abs(hits / 150 - stated) < 0.15


def test_sets_of_top_k_and_top_p():
    p = np.array([0.4, 0.3, 0.2, 0.1])
    assert sampling.kept(p, top_k=2) == ({0}, {0, 1}) or sampling.kept(p, top_k=2)[1] == {0, 1}
    assert sampling.kept(p, top_p=0.6) == ({0, 1}, {0, 1})
    assert sampling.kept(p, top_p=0.70001)[1] == {0, 1, 2}, "at the edge a token may be in or out"
    assert json.dumps(sorted(sampling.kept(p, top_p=0.01)[1])) == "[0]"
