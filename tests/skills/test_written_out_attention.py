"""Attention written out by hand: the operator gives the same values, and what is not the same is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

SOURCE = """import torch


def attend(q, k, v, mask, groups):
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3)
    scores = scores.masked_fill(mask, -torch.inf)
    weights = torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1)
    out = (weights @ v).transpose(1, 2)
    return out
"""


def run(text: str, *inputs):
    space: dict = {"torch": torch, "F": F}
    exec(compile(text, "source", "exec", dont_inherit=True), space)
    return space["attend"](*inputs)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("change", ["", "scale first", "no groups", "matmul"])
def test_the_operator_gives_the_same_values(rows, change, act) -> None:
    source = SOURCE
    if change == "scale first":
        source = source.replace("q @ k.transpose(2, 3)", "q @ k.transpose(-1, -2) * 0.2").replace("scores / q.shape[-1] ** 0.5", "scores")
    if change == "no groups":
        source = "".join(line for line in source.splitlines(True) if "repeat" not in line)
    if change == "matmul":
        source = source.replace("q @ k.transpose(2, 3)", "torch.matmul(q, k.mT)")
    after = act({"m.py": source}, "library-attention")["m.py"]
    assert "softmax" not in after and "repeat_interleave" not in after
    torch.manual_seed(0)
    groups = 1 if change == "no groups" else 2
    q, k, v = torch.randn(2, 4, rows, 8), *torch.randn(2, 2, 4 // groups, 9, 8)
    mask = torch.ones(rows, 9, dtype=torch.bool).triu(10 - rows)[None, None]
    torch.testing.assert_close(run(after, q, k, v, mask, groups), run(source, q, k, v, mask, groups))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return out", "    return out, weights"),  # somebody looks at the weights
        ("    return out", "    return out, k"),  # or at the repeated heads
        ("torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1)", "torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1, dtype=torch.float64)"),
        ("dim=-1)\n    out", "dim=-2)\n    out"),
        ("-torch.inf", "-1e4"),  # hides less than everything
        ("scores / q.shape[-1] ** 0.5", "scores.tanh()"),
        ("    weights =", "    q = q + 1\n    weights ="),  # the inputs change in between
        ("k.repeat_interleave(groups, dim=1)", "k.repeat_interleave(groups, dim=2)"),
        ("    scores = scores.masked_fill", "    if groups:\n        scores = scores + 1\n    scores = scores.masked_fill"),
    ],
)
def test_what_is_not_the_same_is_left_alone(old, new, answer) -> None:
    assert SOURCE.count(old) == 1
    said = answer("library-attention", {"m.py": SOURCE.replace(old, new)})
    if isinstance(said, str):
        assert "failed" not in said
    else:  # heads repeated along another dimension may stay repeated
        assert old.startswith("k.repeat") and "repeat_interleave(groups, dim=2)" in said[0].after["m.py"]
