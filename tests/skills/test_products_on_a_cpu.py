"""What a CPU trace says about products that read their weights slowly, and which skill it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from trace_diff import api
from trace_diff.types import Status


def traced(place: Path, inner: int, outer: int) -> dict:
    """Findings by rule of eight decode steps through four layers of two products."""
    layers = nn.ModuleList(nn.ModuleList([nn.Linear(inner, outer, bias=False), nn.Linear(outer, inner, bias=False)]) for _ in range(4))
    norm = nn.RMSNorm(inner)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        for _ in range(8):
            with record_function("execute_context_0(0)_generation_1(1)"):
                x = torch.ones(1, inner)
                for up, down in layers:
                    x = x + down(nn.functional.silu(up(norm(x))))
                x.argmax()
    place.mkdir()
    prof.add_metadata_json("distributedInfo", '{"rank": 0, "world_size": 1}')
    prof.export_chrome_trace(str(place / "rank0.json.gz"))
    return {f.rule: f for f in api.find(api.analyse(api.load(place, "x")))}


def test_weights_larger_than_a_cache_have_a_byte_bound_and_name_the_layout(tmp_path: Path) -> None:
    found = traced(tmp_path / "large", 256, 2048)["roofline-gap"]
    assert found.status is Status.FOUND and "weight-layout" in found.skills
    row = next(r for r in found.evidence if "byte_bound_us" in r)
    assert row["count"] == 8 and row["bytes"] == pytest.approx(8 * 4 * 256 * 2048, rel=0.02)
    assert row["byte_bound_us"] == pytest.approx(row["bytes"] / 40e3, rel=0.02) and row["us"] > row["byte_bound_us"]


def test_weights_that_a_cache_holds_have_none(tmp_path: Path) -> None:
    found = traced(tmp_path / "small", 64, 128)["roofline-gap"]
    assert found.status is Status.NOT_FOUND
