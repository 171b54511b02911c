"""The headline's sitting on a CPU: a stand-in with vLLM's flags and surface, the fake engine as ours."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loop_fakes import new_run

from benchmarks import gpu_headline, headline_sitting, headline_steps
from benchmarks import headline_cells as cells
from benchmarks.headline_settings import DEFAULTS, JOINED, NCCL, SETTINGS, joined, settings
from optimizer.confine.launch import NO_MULTICAST
from optimizer.traffic.client import Request
from optimizer.types import Stream
from optimizer.vllm_server import Common, Setting, Stated, command, stated

DIMENSIONS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8}
OURS_S = 0.002  # a step of the fake engine here: half of the stand-in's fastest
FOUR = "defaults,eager,full graphs for decode only,FlashInfer attention"


@pytest.fixture
def folders(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path, Path]]:
    """(out, place, model): the fake weights under dimensions that a KV cache can be sized from; small batches."""
    monkeypatch.setattr(cells, "JOBS", tuple(replace(job, concurrency=min(job.concurrency, 3)) for job in cells.JOBS))
    model = tmp_path / "model"
    shutil.copytree(repo / "tests" / "fakes" / "weights", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | DIMENSIONS))
    shutil.copytree(repo / "tests" / "fakes" / "engine", tmp_path / "ours")
    server = (tmp_path / "ours" / "server.py").read_text()
    paced = server.replace("            last = index == count - 1\n", f"            __import__('time').sleep({OURS_S})\n            last = index == count - 1\n")
    assert paced != server
    (tmp_path / "ours" / "server.py").write_text(paced)
    yield tmp_path / "out", tmp_path / "place", model


def sit(repo: Path, folders: tuple[Path, Path, Path], *more: str) -> list[dict]:
    """One command of the sitting; its record."""
    out, place, model = folders
    program = f"{sys.executable} {repo / 'tests' / 'fakes' / 'vllm' / 'api_server.py'}"
    gpu_headline.main([
        str(out), "--place", str(place), "--model", str(model), "--ours", str(out.parent / "ours"), "--ours-args", "",
        "--device", "cpu", "--dtype", "float32", "--max-model-len", "4096", "--shrink", "8", "--seconds", "60", "--vllm-program", program,
        "--steps", "search,pairs", "--pairs", "6", "--sandbox", "none", *more,
    ])  # fmt: skip
    return [json.loads(line) for line in (out / "headline.jsonl").read_text().splitlines()]


def kind(record: list[dict], name: str) -> list[dict]:
    return [entry for entry in record if entry["kind"] == name]


def test_the_best_setting_meets_ours_in_pairs_and_a_setting_that_fails_is_a_line(repo, folders, capsys):
    record = sit(repo, folders, "--only", FOUR)
    status = {e["setting"]: e["status"] for e in kind(record, "setting")}
    assert status == {"defaults": "timed", "eager": "timed", "full graphs for decode only": "timed", "FlashInfer attention": "failed"}
    failed = next(e for e in kind(record, "setting") if e["status"] == "failed")
    assert "No module named 'flashinfer'" in failed["why"]
    ms = {e["setting"]: e["ms"]["decode, batch 1"] for e in kind(record, "setting") if e["status"] == "timed"}
    assert ms["eager"] > ms["defaults"] > ms["full graphs for decode only"] > 4.0
    taken = kind(record, "pair")
    assert all(p["order"][0] == ("ours", "vllm", "vllm", "ours")[p["index"] % 4] for p in taken) and len(taken) == 6
    assert {p["setting"] for p in taken} == {"full graphs for decode only"}
    assert len({p["prompts_sha"] for p in taken}) == 6, "prompts are fresh in every pair"
    (result,) = kind(record, "result")
    assert set(result["cells"]) == set(cells.CELLS) and result["pairs"] == 6
    row = result["cells"]["decode, batch 1"]
    assert row["ci95"][0] <= row["ratio"] <= row["ci95"][1] and row["ours_ms"] < row["vllm_ms"]
    assert result["short"] == ["only 3 settings were timed"]
    assert kind(record, "fairness")[0]["against"] == []
    assert "geometric mean" in capsys.readouterr().out


def test_two_ranks_try_the_all_reduce_too_and_are_kept_apart_from_one(repo, folders, capsys):
    one = sit(repo, folders, "--steps", "")
    record = sit(repo, folders, "--tp", "2", "--only", "defaults,NCCL all-reduce", "--pairs", "2", "--steps", "search,pairs,context")
    assert {e["key"] for e in record} & {e["key"] for e in one} == set() and kind(record, "sitting")[0]["tp"] == 2
    tried = kind(record, "setting")
    assert [(e["setting"], e["status"]) for e in tried] == [("defaults", "timed"), ("NCCL all-reduce", "timed")]
    assert all("--tensor-parallel-size 2" in e["command"] and "NCCL_NVLS_ENABLE=0" in e["command"] for e in tried)
    assert {p["setting"] for p in kind(record, "pair")} == {"NCCL all-reduce"}
    (result,), (checked,) = kind(record, "result"), kind(record, "fairness")
    assert checked["against"] == [] and checked["ours"]["tp"] == 2 and result["pairs"] == 2
    plain, hf = kind(record, "context")
    assert plain["metadata"]["tp"] == 2 and hf["why"] == "it does not run on 2 ranks"
    assert "not reached: 2048 batched tokens" in capsys.readouterr().out


def test_our_engine_on_two_ranks_takes_its_turns(repo, folders, monkeypatch):
    """The real one, over gloo, against one setting without a search. The stand-in speaks the fake engine's tokens: so there are pairs, and no ratio."""
    monkeypatch.setattr(cells, "JOBS", tuple(replace(job, concurrency=min(job.concurrency, 2), repeats=1) for job in cells.JOBS))
    out, place, _ = folders
    record = sit(
        repo, (out, place, repo / "engine" / "tiny_qwen3"), "--tp", "2", "--ours", str(repo / "engine"), "--only", "defaults", "--pairs", "1",
        "--max-model-len", "1024", "--shrink", "16", "--steps", "pairs",
    )  # fmt: skip
    assert not kind(record, "setting")
    (checked,) = kind(record, "fairness")
    assert (checked["ours"]["tp"], checked["ours"]["all_reduce_backend"]) == (2, "gloo")
    assert len(kind(record, "pair")) == 1 and len(checked["against"]) == 1 and "not the same model" in checked["against"][0]


def test_a_run_is_compared_on_its_own_weights(tmp_path):
    run = new_run(tmp_path / "run")
    asked = [str(tmp_path / "out"), "--place", str(tmp_path / "place"), "--ours", str(run.dir)]
    run.ledger.close()
    assert gpu_headline.model_of(gpu_headline.options_of(asked)) == run.request.model_dir.resolve()


def test_a_second_command_goes_on_where_the_first_stopped(repo, folders):
    first = sit(repo, folders, "--only", "defaults", "--steps", "search")
    again = sit(repo, folders, "--only", "defaults,eager", "--pairs", "2")
    assert [e["setting"] for e in kind(again, "setting")] == ["defaults", "eager"]
    assert kind(again, "setting")[0] == kind(first, "setting")[0]
    assert len(kind(again, "pair")) == 2


def test_a_torn_line_of_a_killed_sitting_is_dropped(repo, folders):
    sit(repo, folders, "--only", "defaults", "--steps", "search")
    record = folders[1] / "headline.jsonl"
    record.write_text(record.read_text() + '{"kind": "setting", "set')
    assert [e["setting"] for e in kind(sit(repo, folders, "--only", "defaults", "--steps", "search"), "setting")] == ["defaults"]


@pytest.mark.parametrize(
    ("fault", "why"),
    [("hits", "came from a prefix cache"), ("float16", "computes in float16"), ("short", "tokens came, ")],
)
def test_a_setting_that_does_other_work_is_excluded_with_its_reason(repo, folders, monkeypatch, fault, why):
    monkeypatch.setenv("FAKE_VLLM", fault)
    record = sit(repo, folders, "--only", "defaults")
    (entry,) = kind(record, "setting")
    assert entry["status"] in ("unfair", "failed") and why in entry["why"]
    assert not kind(record, "pair") and kind(record, "no_pairs")[0]["why"] == "no vLLM setting was timed"


def test_no_ratio_is_printed_when_the_servers_do_not_serve_the_same_model(repo, folders, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_VLLM", "other-tokens")
    record = sit(repo, folders, "--only", "defaults", "--pairs", "2")
    (result,) = kind(record, "result")
    assert "not the same model" in result["excluded"][0] and "cells" not in result
    assert "no ratio" in capsys.readouterr().out


def test_time_that_is_up_leaves_settings_out_and_says_so(repo, folders, capsys):
    record = sit(repo, folders, "--only", FOUR, "--seconds", "0.01")
    assert not kind(record, "setting")
    assert "not reached: defaults" in capsys.readouterr().out


def test_flags_carry_the_same_cache_and_no_prefix_caching(folders):
    _, _, model = folders
    how = command(Common(model=model, dtype="float32", kv_tokens=160, profile=True), Setting("x", ("--block-size", "32"), {"cudagraph_mode": "FULL"}))
    text = str(how)
    assert "--no-enable-prefix-caching" in how.argv and "--skip-tokenizer-init" in how.argv and "VLLM_USE_FLASHINFER_SAMPLER=0" in text
    layers, heads, size = 2, 1, 4
    assert how.argv[how.argv.index("--kv-cache-memory-bytes") + 1] == str(2 * layers * heads * size * 4 * 160)
    profiler = json.loads(how.argv[how.argv.index("--profiler-config") + 1])
    assert profiler["torch_profiler_dir"] == "{trace_dir}" and profiler["torch_profiler_with_stack"] is False


def test_on_several_ranks_nothing_of_vllm_multicasts_and_each_holds_its_share_of_the_cache(folders):
    *_, model = folders
    how = {tp: command(Common(model=model, dtype="float32", kv_tokens=160, tp=tp), NCCL) for tp in (1, 2)}
    env = {tp: dict(one.env) for tp, one in how.items()}
    assert NO_MULTICAST.items() <= env[2].items() and env[2]["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    assert env[2]["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm" and not env[1].keys() & (NO_MULTICAST.keys() | {"VLLM_ALLREDUCE_USE_SYMM_MEM"})
    assert "--disable-custom-all-reduce" in how[2].argv and how[2].argv[how[2].argv.index("--tensor-parallel-size") + 1] == "2"
    config = json.loads((model / "config.json").read_text())
    wide = {}
    for heads in (1, 4):
        (model / "config.json").write_text(json.dumps(config | {"num_key_value_heads": heads}))
        wide[heads] = [Common(model=model, dtype="float32", kv_tokens=160, tp=tp).kv_bytes() for tp in (1, 2)]
    assert wide[4][0] == 2 * wide[4][1] and wide[1][0] == wide[1][1], "one head is on both ranks"


def test_settings_of_several_ranks_are_those_of_one_with_the_all_reduce_second():
    assert settings(1) == SETTINGS and NCCL not in SETTINGS
    assert settings(2) == settings(4) and settings(4)[:2] == (SETTINGS[0], NCCL) and settings(4)[2:] == SETTINGS[1:]
    found = joined({DEFAULTS: 0.0, NCCL.name: -0.02, "block size 32": -0.01}, settings(2))
    assert found is not None and found.flags == ("--block-size", "32", "--disable-custom-all-reduce")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--tp", "0"), "--tp 0"),
        (("--tp", "3"), "--tp 3: fake allows 1, 2"),
        (("--tp", "2", "--vllm-gpu", "1"), "--vllm-gpu 1: ours has GPUs 0 to 1, vLLM would have GPUs 1 to 2"),
        (("--vllm-gpu", "0"), "--vllm-gpu 0: ours has GPU 0"),
    ],
)
def test_ranks_that_cannot_be_placed_are_refused_by_the_name_of_the_option(repo, folders, given, named):
    with pytest.raises(SystemExit, match=named):
        sit(repo, folders, *given)


def test_gpus_begin_where_the_options_say_and_must_be_there(repo, folders, monkeypatch):
    out, place, model = folders
    options = gpu_headline.options_of([str(out), "--place", str(place), "--ours", str(out.parent / "ours"), "--tp", "2", "--gpu", "2", "--vllm-gpu", "0"])
    monkeypatch.setattr(headline_sitting, "query_gpus", lambda _: (None,) * 4)
    headline_sitting.check_gpus(options)
    assert headline_sitting.gpus_of(options, options.gpu) == (2, 3) and headline_sitting.gpus_of(options, options.vllm_gpu) == (0, 1)
    ours, plain = headline_sitting.our_arms(options, model)
    assert (ours.tp, ours.devices) == (plain.tp, plain.devices) == (2, (2, 3))
    monkeypatch.setattr(headline_sitting, "query_gpus", lambda _: (None,) * 3)
    with pytest.raises(SystemExit, match="--gpu 2 with --tp 2 means GPUs 2 to 3; this machine has GPUs 0 to 2"):
        headline_sitting.check_gpus(options)


@pytest.mark.parametrize(("tp", "kv"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_each_rank_reads_its_share_of_the_weights(tmp_path, tp, kv):
    """Qwen3-8B's dimensions: 36 layers, 32 heads and 8 KV heads of 128, an untied head."""
    config = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
              "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = 4096 * 128 * 2 * (32 // tp + kv) + 3 * 4096 * 12288 // tp + 2 * 4096 + 2 * 128
    assert headline_steps.rank_bytes(Common(model=tmp_path, tp=tp)) == 2 * (36 * layer + 4096 * 151936 // tp + 4096)


def test_what_helped_is_joined_and_the_fastest_has_the_last_word():
    scores = {DEFAULTS: 0.0, "full graphs for all": -0.02, "full graphs for decode only": -0.05, "block size 32": -0.01, "the first model runner": -0.03, "eager": 0.7}
    found = joined(scores)
    assert found is not None and found.name == JOINED
    assert found.flags == ("--block-size", "32") and found.compilation == {"cudagraph_mode": "FULL_DECODE_ONLY"}
    assert found.env == (("VLLM_USE_V2_MODEL_RUNNER", "0"),)
    assert joined({DEFAULTS: 0.0, "block size 32": -0.01}) is None
    assert len(SETTINGS) >= 8 and len({s.name for s in SETTINGS}) == len(SETTINGS)


def test_what_a_server_does_not_say_counts_against_it():
    nothing = stated("", "")
    against = cells.unfair(cells.Terms("bfloat16", 8192, 65536), nothing, None)
    assert len(against) == 6, against


LOG = (
    "(EngineCore pid=7) INFO 11-29 20:00:00 [core.py:115] Initializing a V1 LLM engine (v0.25.1) with config: model='/m', tokenizer='/m', "
    "skip_tokenizer_init=True, dtype=torch.bfloat16, max_seq_len=8192, quantization=None, kv_cache_dtype=auto, device_config=cuda, "
    "enable_prefix_caching=False, compilation_config={'mode': 3}\n"
    "(EngineCore pid=7) INFO 11-29 20:00:09 [cuda.py:477] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].\n"
    "(EngineCore pid=7) INFO 11-29 20:00:10 [kv_cache_utils.py:9] GPU KV cache size: 65,536 tokens\n"
)


def test_a_server_is_taken_at_its_log_where_its_metrics_do_not_say():
    said = stated(LOG, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n')
    assert said == Stated("0.25.1", "bfloat16", "auto", False, None, None, 65536, "FLASH_ATTN")
    assert cells.unfair(cells.Terms("bfloat16", 8192, 65536), said, 8192) == []
    assert cells.unfair(cells.Terms("bfloat16", 4096, 65536), said, 8192) == ["max_model_len 8192, asked for 4096"]


def _stream(*arrivals_ms: float) -> Stream:
    n = len(arrivals_ms)
    usage = {"prompt_tokens": 1, "completion_tokens": n}
    return Stream((1,), tuple(range(n)), "", "length", 0, tuple(int(ms * 1e6) for ms in arrivals_ms), usage)


def test_steps_that_take_longer_and_tokens_that_come_in_bunches_count_in_full():
    assert cells.step_ms([_stream(1, 2, 3, 4, 5)]) == 1.0
    assert cells.step_ms([_stream(1, 2, 4, 4, 6, 6, 8, 8, 10, 10)]) == pytest.approx(1.0)
    assert cells.step_ms([_stream(1, 9, 10, 11, 12, 17)]) == pytest.approx(2.0)  # the first gap is left out, the last long one is not


def test_a_stream_is_held_to_what_was_asked_for():
    assert cells.other_work(Request((1,), 3), _stream(1, 2, 3)) is None
    assert "2 tokens came" in (cells.other_work(Request((1,), 3), _stream(1, 2)) or "")
    assert "usage says" in (cells.other_work(Request((1, 2), 3), _stream(1, 2, 3)) or "")
