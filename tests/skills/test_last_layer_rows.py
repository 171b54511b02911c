"""Behind the last layer's attention only wanted rows: acts where the rows are known beforehand, else says why not."""

from __future__ import annotations

import pytest
import torch

SMALL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.mlp = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x, places):
        x = x + self.mix(x).cumsum(0) * places
        return x + torch.relu(self.mlp(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, places):
        for layer in self.layers:
            x = layer(x, places)
        return x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x, places):
        return self.model(x, places)

    def compute_logits(self, hidden):
        return self.head(hidden)


class Runner:
    def __init__(self):
        torch.manual_seed(1)
        self.model = Outer()

    def step(self, x, places, last):
        hidden = self.model(x, places)
        return self.model.compute_logits(hidden[last])
"""


def _step(source: str) -> torch.Tensor:
    space: dict = {}
    exec(compile(source, "small", "exec", dont_inherit=True), space)
    torch.manual_seed(2)
    return space["Runner"]().step(torch.randn(6, 8), torch.rand(6, 1), torch.tensor([2, 5]))


def test_logits_stay_and_the_last_mlp_gets_the_wanted_rows_alone(act) -> None:
    after = act({"m.py": SMALL}, "last-layer-rows")["m.py"]
    assert torch.equal(_step(SMALL), _step(after))
    seen = after.replace("torch.relu(self.mlp(x))", "torch.relu(self.mlp(SEEN.append(len(x)) or x))").replace("import torch\n", "import torch\nSEEN = []\n", 1)
    space: dict = {}
    exec(compile(seen, "small", "exec", dont_inherit=True), space)
    space["Runner"]().step(torch.randn(6, 8), torch.rand(6, 1), torch.tensor([2, 5]))
    assert space["SEEN"] == [6, 6, 2]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("compute_logits(hidden[last])", "compute_logits(hidden)", "nobody cuts"),
        ("compute_logits(hidden[last])", "compute_logits(hidden[last]), hidden", "otherwise"),
        ("compute_logits(hidden[last])", "compute_logits(hidden[hidden.argmax()])", "otherwise"),
        ("self.model(x, places)\n        return self.model.c", "self.model(x, places=places)\n        return self.model.c", "keywords"),
        ("hidden = self.model(x", "hidden = self.draft(x", "different models"),
        ("torch.relu(self.mlp(x))", "torch.relu(self.mlp(x)) * places", "attention is not one statement"),
        ("        for layer in self.layers:\n            x = layer(x, places)", "        for layer in self.layers:\n            x = layer(x, places)\n            x = x * 2", "in a loop"),
        ("        return self.model(x, places)\n", "        return self.model(x, places) * 2\n", "nothing else"),
        ("nn.ModuleList(Block() for _ in range(3))", "tuple(Block() for _ in range(3))", "not recognised"),
    ],
)  # fmt: skip
def test_where_rows_are_not_known_or_not_independent_it_declines(old, new, why, answer) -> None:
    assert old in SMALL
    said = answer("last-layer-rows", {"m.py": SMALL.replace(old, new)})
    assert isinstance(said, str) and why in said


def test_it_also_cuts_the_sum_that_a_fused_norm_has_still_to_do(engine_sources, act) -> None:
    after = act(engine_sources, "fused-kernels", "last-layer-rows", device="cuda")["engine/model.py"]
    assert "delta, hidden = delta[rows], hidden[rows]" in after
