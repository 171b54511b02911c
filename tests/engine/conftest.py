"""Fixtures of the engine's tests: transformers as the reference, servers shared by the session, odd models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from engine_client import RunningServer
from engine_local import LocalEngine
from engine_reference import Reference

TINY = Path(__file__).resolve().parents[2] / "engine" / "tiny_qwen3"


@pytest.fixture(scope="session")
def tiny() -> Path:
    return TINY


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    return Reference(tiny)


@pytest.fixture(scope="session")
def local(tiny: Path) -> LocalEngine:
    """One in-process engine for tests that leave it idle."""
    return LocalEngine(tiny)


@pytest.fixture(scope="session")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RunningServer]]:
    """server(tp): one per TP and session, started when first asked for. SIGTERM must end each with code 0."""
    running: dict[int, RunningServer] = {}

    def get(tp: int) -> RunningServer:
        if tp not in running:
            running[tp] = RunningServer(tiny, tp, tmp_path_factory.mktemp(f"tp{tp}")).wait_ready()
        return running[tp]

    yield get
    codes = {tp: one.stop() for tp, one in running.items()}
    assert all(code == 0 for code in codes.values()), codes


@pytest.fixture
def random_prompts() -> Callable[..., list[list[int]]]:
    """random_prompts(lengths, seed): random tokens, on which faults show that fluent text would hide."""

    def draw(lengths: list[int], seed: int = 0, vocab: int = 2048) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(3, vocab, n).tolist() for n in lengths]

    return draw


@pytest.fixture(scope="session")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, 2 KV heads, a vocabulary that 4 does not divide, several files, the old config keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=301,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4608,
        tie_word_embeddings=False,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        eos_token_id=[5, 6],
    )
    path = tmp_path_factory.mktemp("odd-qwen3")
    Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="100KB")
    raw = json.loads((path / "config.json").read_text())
    raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    raw["torch_dtype"] = raw.pop("dtype")
    (path / "config.json").write_text(json.dumps(raw))
    assert len(list(path.glob("*.safetensors"))) > 2
    return path
