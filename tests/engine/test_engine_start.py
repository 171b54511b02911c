"""Starting and ending: models and options that cannot be used, ranks that die."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from engine_client import RunningServer, wait_gone
from engine_local import LocalEngine
from safetensors.torch import load_file, save_file

from engine import weights
from engine.attention import SdpaAttention
from engine.config import ConfigError, EngineConfig, Limits, ModelConfig, check_tp, limits
from engine.model import Qwen3ForCausalLM
from engine.parallel import TensorParallel
from engine.serve import main
from engine.worker import build_model


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    path = tmp_path / "model"
    shutil.copytree(tiny, path, ignore=shutil.ignore_patterns("*.py", "training.json"))
    return path


def _edit(path: Path, **changes: object) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw |= changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; valid values: qwen3"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"vocab_size": ...}, "vocab_size is None"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"rope_parameters": ...}, "rope_theta is None"),
        ({"dtype": "int4"}, "dtype is 'int4'; valid values: float32"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_config_that_cannot_be_used_names_the_field(changes, says, copy):
    _edit(copy, **changes)
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_dir(copy)


def test_old_and_new_keys_mean_the_same(copy):
    new = ModelConfig.from_dir(copy)
    _edit(copy, rope_parameters=..., rope_theta=10000.0, rope_scaling=None, dtype=..., torch_dtype="bfloat16")
    assert ModelConfig.from_dir(copy) == new


def test_the_dimensions_of_qwen3_8b_are_read():
    raw = {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "eos_token_id": 151645, "rope_scaling": None, "hidden_act": "silu",
    }  # fmt: skip
    config = ModelConfig.from_raw(raw, eos_token_ids=(151645, 151643))
    assert limits(EngineConfig(Path()), config).max_model_len == 8192
    for tp in (1, 2, 4, 8, 16):
        check_tp(config, tp)
    with pytest.raises(ConfigError, match="--tp 3 does not divide num_attention_heads"):
        check_tp(config, 3)


def test_a_tensor_of_the_wrong_shape_is_named(copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(768, 255)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \[768, 255\].*\[768, 256\]"):
        LocalEngine(copy, num_kv_blocks=4)


def test_a_missing_tensor_and_a_missing_file_are_named(copy, odd_model, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor named model\.norm\.weight"):
        LocalEngine(copy, num_kv_blocks=4)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        LocalEngine(copy, num_kv_blocks=4)
    shards = tmp_path / "shards"
    shutil.copytree(odd_model, shards)
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ConfigError, match=f"{victim.name}: no such file"):
        LocalEngine(shards, num_kv_blocks=4)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tp", "3"], "--tp 3 does not divide num_attention_heads (8)"),
        (["--tp", "16"], "num_attention_heads"),
        (["--max-model-len", "4096"], "1024 positions"),
        (["--max-num-batched-tokens", "100"], "--max-num-batched-tokens is 100"),
        (["--attention-backend", "flash"], "valid here: auto, sdpa"),
        (["--model", "/nonexistent"], "/nonexistent/config.json: no such file"),
    ],
)
def test_options_that_cannot_be_used_end_with_code_2(argv, says, tiny, capfd):
    assert main(["--model", str(tiny), "--num-kv-blocks", "4", *argv]) == 2
    assert says in capfd.readouterr().err


def test_an_address_that_cannot_be_had_ends_with_code_1(tiny, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own handlers stay
    assert main(["--model", str(tiny), "--num-kv-blocks", "4", "--uds", str(tmp_path / "missing" / "s.sock")]) == 1
    assert "HTTP server: " in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(tiny, capfd):
    assert main(["--model", str(tiny), "--device", "cuda"]) == 2
    assert "needs 1 GPUs; this process sees 0" in capfd.readouterr().err


def test_dummy_weights_depend_on_the_seed_alone(tiny, random_prompts):
    prompts = random_prompts([10, 20])
    runs = [
        [r.tokens for r in LocalEngine(tiny, load_format="dummy", seed=s).generate(prompts, max_tokens=8)]
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_the_ranks_slices_make_up_the_whole(load_format, odd_model):
    config = ModelConfig.from_dir(odd_model)

    def load(rank: int, size: int) -> Qwen3ForCausalLM:
        tp = TensorParallel(rank, size, torch.device("cpu"), "none")
        model = build_model(config, tp, SdpaAttention(), torch.float32, Limits(64, 1, 64))
        if load_format == "dummy":
            weights.load_dummy(model, seed=3)
        else:
            weights.load_safetensors(model, odd_model)
        return model

    whole, ranks = load(0, 1), [load(rank, 4) for rank in range(4)]
    for name, full in whole.named_parameters():
        shard = getattr(whole.get_submodule(name.rpartition(".")[0]), "shard", None)
        parts: list[torch.Tensor] = [rank.get_parameter(name) for rank in ranks]
        if shard is None:
            assert all(torch.equal(part, full) for part in parts)
            continue
        if "k_proj" in name or "v_proj" in name:  # 2 KV heads: ranks 0 and 1 share the first
            assert torch.equal(parts[0], parts[1]) and torch.equal(parts[2], parts[3])
            parts = parts[::2]
        joined = torch.cat(parts, dim=shard.dim)
        assert torch.equal(joined.narrow(shard.dim, 0, shard.full), full)
        assert not joined.narrow(shard.dim, shard.full, joined.shape[shard.dim] - shard.full).any()


def test_a_rank_that_cannot_load_ends_the_server_with_code_2(odd_model, tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(odd_model, shards)
    sorted(shards.glob("*.safetensors"))[1].unlink()
    server = RunningServer(shards, 2, tmp_path)
    assert server.process.wait(60) == 2
    assert "no such file, but model.safetensors.index.json names it" in server.log.read_text()


def test_a_rank_that_dies_takes_the_server_with_it(tiny, tmp_path):
    server = RunningServer(tiny, 2, tmp_path).wait_ready()
    (rank,) = server.ranks()
    connection, _ = server.open_stream("/v1/completions", {"prompt": [5], "max_tokens": 900, "ignore_eos": True})
    os.kill(rank, signal.SIGKILL)
    assert server.process.wait(60) == 1
    connection.close()
    assert "rank1 died (exit code -9)" in server.log.read_text()


def test_ranks_end_when_the_server_is_killed(tiny, tmp_path):
    server = RunningServer(tiny, 2, tmp_path).wait_ready()
    ranks = server.ranks()
    assert len(ranks) == 1
    server.kill()
    assert wait_gone(ranks)


def test_sigterm_ends_open_streams_and_all_ranks(tiny, tmp_path):
    server = RunningServer(tiny, 2, tmp_path).wait_ready()
    ranks = server.ranks()
    connection, response = server.open_stream(
        "/v1/completions", {"prompt": [5], "max_tokens": 900, "ignore_eos": True}
    )
    response.readline()  # it runs
    assert server.stop() == 0
    rest = response.read().decode()
    connection.close()
    assert '"finish_reason":"abort"' in rest
    assert wait_gone(ranks)
    assert not server.socket.exists()
