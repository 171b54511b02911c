"""The output head for the last position only: the same token, and never where somebody looks at the others."""

from __future__ import annotations

import pytest
import torch

OWN = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        logits = self.head(x.float())
        return logits


def generate(model, ids):
    out = model(ids)[:, -1]
    return out.argmax(-1)
"""
HUGGING_FACE = """import torch
from transformers import AutoModelForCausalLM


class Runner:
    def step(self, ids):
        outputs = self.model(input_ids=ids, use_cache=True)
        logits = outputs.logits[:, -1, :]
        self.past = outputs.past_key_values
        return logits
"""


def test_a_head_of_ones_own_gets_one_position(act) -> None:
    after = act({"m.py": OWN}, "prefill-path")["m.py"]
    rows: list[int] = []
    results = []
    for text in (OWN, after):
        space: dict = {}
        exec(compile(text, "m.py", "exec", dont_inherit=True), space)
        torch.manual_seed(0)
        model = space["Model"]()
        model.head.register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
        results.append(space["generate"](model, torch.tensor([[1, 2, 3], [4, 5, 6]])))
    assert torch.equal(*results) and rows == [3, 1]


def test_a_transformers_model_is_asked_for_one_position(act) -> None:
    after = act({"m.py": HUGGING_FACE}, "prefill-path")["m.py"]
    assert "self.model(input_ids=ids, use_cache=True, logits_to_keep=1)" in after


@pytest.mark.parametrize("order", [("weight-layout", "prefill-path"), ("prefill-path", "weight-layout")])
def test_it_composes_with_the_layout_of_the_head(order, act) -> None:
    after = act({"m.py": OWN}, *order)["m.py"]
    assert "linear_by_columns(x.float()[:, -1:], self.head.weight)" in after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    out = model(ids)[:, -1]\n", "    out = model(ids)[:, -2:]\n"),
        ("    return out.argmax(-1)\n", "    return out.argmax(-1), model(ids)\n"),
        ("logits = outputs.logits[:, -1, :]", "logits = outputs.logits"),
        ("        return logits\n\n\ndef", "        return logits * 2\n\n\ndef"),
        ("self.past = outputs.past_key_values", "self.past = outputs"),
        ("ids, use_cache=True", "ids, labels=ids"),
    ],
)
def test_it_declines_where_more_is_wanted(old, new, answer) -> None:
    source = OWN if old in OWN else HUGGING_FACE
    assert source.count(old) == 1
    said = answer("prefill-path", {"m.py": source.replace(old, new)})
    assert isinstance(said, str) and "failed" not in said, said


def test_rows_of_a_model_that_is_called_by_nobody_are_left_alone(answer) -> None:
    assert isinstance(answer("prefill-path", {"m.py": OWN.split("def generate")[0]}), str)
