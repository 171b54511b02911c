"""Which products of a layer could be one, from their recorded shapes: as a plain model (transformers' Qwen3) runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from build import Build

from trace_diff.api import analyse, find
from trace_diff.ingest import load_many
from trace_diff.types import Finding, Status

HIDDEN, INNER = 256, 768
NORM = ("to", "pow", "mean", "add", "rsqrt", "mul", "mul")


class Model:
    """A CPU trace of decode steps; every operator takes 10 us."""

    def __init__(self, shapes: bool = True) -> None:
        self.build, self.now, self.shapes = Build(), 0, shapes

    def op(self, name: str, *dims: list[int]) -> None:
        args = {"Input Dims": list(dims), "Input type": ["float"] * len(dims)} if self.shapes else {}
        self.build.op(f"aten::{name}", self.now, 10_000, **args)
        self.now += 11_000

    def linear(self, inputs: int, outputs: int) -> None:
        self.op("linear", [1, 1, inputs], [outputs, inputs], [])

    def norm(self) -> None:
        for name in NORM:
            self.op(name, [1, 1, HIDDEN], [])

    def attention(self, plain: bool) -> None:
        if not plain:
            return self.op("scaled_dot_product_attention", [1, 8, 1, 32], [1, 8, 21, 32])
        self.op("matmul", [1, 8, 1, 32], [1, 8, 32, 21])
        self.op("softmax", [1, 8, 1, 21])
        self.op("matmul", [1, 8, 1, 21], [1, 8, 21, 32])
        self.op("view", [1, 8, 1, 32])
        return None

    def analyse(self, folder: Path) -> Finding:
        analysis = analyse(load_many(self.build.write(folder / "t.json"), "here"))
        return next(f for f in find(analysis) if f.rule == "split-products")


def _model(folder: Path, plain: bool = False, merged: bool = False, queries: int = HIDDEN, shapes: bool = True) -> Finding:
    model = Model(shapes)
    for step in range(4):
        start = model.now
        for _ in range(5):
            model.norm()
            if merged:
                model.linear(HIDDEN, 512)
            else:
                for outputs in (queries, 128, 128):  # norms of queries and keys stand between
                    model.linear(HIDDEN, outputs)
                    model.norm()
            model.attention(plain)
            model.linear(queries, HIDDEN)
            model.norm()
            if merged:
                model.linear(HIDDEN, 2 * INNER)
            else:
                model.linear(HIDDEN, INNER)
                model.op("silu", [1, 1, INNER])
                model.linear(HIDDEN, INNER)
            model.op("mul", [1, 1, INNER], [1, 1, INNER])
            model.linear(INNER, HIDDEN)
        model.linear(HIDDEN, 2048)
        model.build.mark(f"step_{step}_decode", start, model.now - start)
        model.now += 20_000
    return model.analyse(folder)


@pytest.mark.parametrize("queries", [HIDDEN, 512])
@pytest.mark.parametrize("plain", [False, True])
def test_q_k_v_and_gate_up_are_found_whatever_stands_between_them(tmp_path, plain, queries):
    found = _model(tmp_path, plain, queries=queries)
    assert found.status is Status.FOUND
    what = [row["what"] for row in found.evidence]
    assert f"3 products of one input a layer (256 to {queries} + 128 + 128)" in what
    assert "2 products of one input a layer (256 to 768 + 768)" in what
    assert len(what) == 3, "plain attention's own products and the output projection are no such pair"


def test_merged_products_leave_nothing_to_find(tmp_path):
    assert _model(tmp_path, merged=True).status is Status.NOT_FOUND


def test_without_shapes_products_with_norms_between_could_not_be_looked_at(tmp_path):
    found = _model(tmp_path, shapes=False)
    assert found.status is Status.COULD_NOT_LOOK
    assert "shapes" in found.missing[0]
