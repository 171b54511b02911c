"""Skills on code that nobody here wrote, and on code that has nothing for them: the same results, or a reason."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def build(source: str, *names: str, **more: Any) -> dict[str, Any]:
    """Run the named classes and functions of a source text; decorators of other packages do nothing."""
    space = {"torch": torch, "nn": nn, "F": F, "use_kernel_forward_from_hub": lambda name: lambda cls: cls, **more}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
            exec(compile(ast.Module([node], []), "source", "exec", dont_inherit=True), space)
    return space


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_transformers_keeps_its_values(qwen3_file, act, dtype) -> None:
    after = act(qwen3_file, "library-norm")
    torch.manual_seed(0)
    x = torch.randn(5, 64, dtype=dtype) * 3
    results = []
    for sources in (qwen3_file, after):
        norm = build(sources["modeling_qwen3.py"], "Qwen3RMSNorm")["Qwen3RMSNorm"](64, eps=1e-6).to(dtype)
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, 64))
            results.append(norm(x))
    assert "rsqrt" not in ast.unparse(next(n for n in ast.parse(after["modeling_qwen3.py"]).body if getattr(n, "name", "") == "Qwen3RMSNorm"))
    torch.testing.assert_close(*results, **({"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}))


SHIFTED = """class RMSNorm(nn.Module):
    def __init__(self, size, shift):
        super().__init__()
        self.eps = 1e-6
        self.scale = nn.Parameter(torch.linspace(0.5, 2, size))
        self.shift = nn.Parameter(torch.ones(size)) if shift else None

    def forward(self, x, wide=True):
        dtype = x.dtype
        if wide:
            x = x.to(torch.float32)
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        normed = x * torch.rsqrt(variance + self.eps)
        normed = normed * self.scale
        if self.shift is not None:
            normed = normed + self.shift
        return normed.to(dtype)
"""


@pytest.mark.parametrize("shift", [True, False])
def test_a_norm_among_other_statements_keeps_its_values(shift, act) -> None:
    after = act({"m.py": SHIFTED}, "library-norm")["m.py"]
    assert "normed = F.rms_norm(x, self.scale.shape, self.scale, self.eps)" in after and "rsqrt" not in after
    x = torch.randn(5, 64)
    one, two = (build(text, "RMSNorm")["RMSNorm"](64, shift) for text in (SHIFTED, after))
    torch.testing.assert_close(two(x), one(x))


def test_a_norm_whose_parts_are_wanted_elsewhere_is_left_alone(answer) -> None:
    assert isinstance(answer("library-norm", {"m.py": "from torch import nn\nimport torch\n\n\n" + SHIFTED.replace("return normed.to(dtype)", "return normed.to(dtype), variance")}), str)


def test_the_mlp_of_transformers_keeps_values_names_and_memory(qwen3_file, act) -> None:
    after = act(qwen3_file, "merge-projections")

    class Config:
        hidden_size, intermediate_size, hidden_act = 16, 48, "silu"

    made = []
    for sources in (qwen3_file, after):
        torch.manual_seed(1)
        made.append(build(sources["modeling_qwen3.py"], "Qwen3MLP", "stack_weights", ACT2FN={"silu": F.silu})["Qwen3MLP"](Config()))
    one, two = made
    two.load_state_dict(one.state_dict())
    x = torch.randn(3, 16)
    for _ in range(2):  # the first call stacks, the second uses the stack
        torch.testing.assert_close(two(x), one(x))
    assert list(two.state_dict()) == list(one.state_dict())
    assert two.gate_proj.weight.untyped_storage().data_ptr() == two.up_proj.weight.untyped_storage().data_ptr()


RUNNER = """import torch


class Runner:
    def step(self, ids):
        hidden = self.model(ids)
        return self.pick(hidden)

    def pick(self, hidden):
        return hidden.argmax(-1)
"""


def test_inference_mode_covers_the_caller_and_changes_no_value(act) -> None:
    after = act({"run.py": RUNNER}, "inference-mode")["run.py"]
    assert after.count("@torch.inference_mode()") == 1
    runner = build(after, "Runner")["Runner"]()
    runner.model = nn.Linear(4, 3)
    seen: list[bool] = []
    runner.pick = lambda hidden: seen.append(hidden.requires_grad) or hidden
    assert runner.step(torch.ones(2, 4)).shape == (2, 3) and seen == [False]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import torch\n\n\ndef train(model, x):\n    model(x).sum().backward()\n", "uses gradients"),
        ("import torch\ntorch.set_grad_enabled(False)\n\n\ndef run(model, x):\n    return model(x)\n", "whole process"),
        ("import torch\n\n\n@torch.no_grad()\ndef run(model, x):\n    return model(x)\n", "already under"),
        ("import torch\n\n\n@torch.no_grad()\ndef outer(m, x):\n    return inner(m, x)\n\n\ndef inner(model, x):\n    return model(x)\n", "already under"),
        ("import torch\n\n\ndef run(model, x):\n    yield model(x)\n", "generator"),
        ("import torch\nx = 1\n", "nothing here calls the model"),
    ],
)
def test_inference_mode_declines(source, why, answer) -> None:
    said = answer("inference-mode", {"m.py": source})
    assert isinstance(said, str) and why in said


def test_a_training_script_beside_the_engine_is_no_obstacle_unless_it_uses_it(answer) -> None:
    engine = {"engine/run.py": RUNNER}
    apart = {**engine, "engine/tiny/train.py": "import torch\n\n\ndef train(model, opt, x):\n    model(x).sum().backward()\n    opt.step()\n"}
    done = answer("inference-mode", apart)
    assert not isinstance(done, str) and "inference_mode" in done[0].after["engine/run.py"]
    assert done[0].after["engine/tiny/train.py"] == apart["engine/tiny/train.py"]
    joined = {**engine, "train.py": "import torch\nfrom engine.run import Runner\n\n\ndef train(x):\n    Runner().step(x).sum().backward()\n"}
    said = answer("inference-mode", joined)
    assert isinstance(said, str) and "uses gradients and imports engine.run" in said


@pytest.mark.parametrize(
    "call",
    ["dist.all_reduce(x, op=dist.ReduceOp.MAX)", "dist.all_reduce(x, async_op=True)", "dist.all_reduce(*args)", "self.dist.all_reduce(x)", "all_reduce(x)"],
)
def test_only_plain_sums_of_torch_distributed_are_redirected(call, answer) -> None:
    said = answer("custom-all-reduce", {"tp.py": f"import torch\nimport torch.distributed as dist\n\n\ndef f(self, x, *args):\n    {call}\n"})
    assert isinstance(said, str) and "no synchronous" in said


@pytest.mark.parametrize("line", ["import torch.distributed as dist", "from torch import distributed as dist", "import torch.distributed"])
def test_a_collective_is_found_however_it_was_imported(line, answer) -> None:
    name = "torch.distributed" if line == "import torch.distributed" else "dist"
    done = answer("custom-all-reduce", {"tp.py": f"import torch\n{line}\n\n\ndef f(x, group):\n    {name}.all_reduce(x, group=group)\n"})
    assert not isinstance(done, str)
    assert "shm_collectives.all_reduce(x, group=group)" in done[0].after["tp.py"]
    assert "import shm_collectives" in done[0].after["tp.py"]


MERGE = """import torch
import torch.nn.functional as F
from torch import nn


class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3, bias=BIAS)
        self.b = nn.Linear(4, 5, bias=BIAS)

    def forward(self, x):
        one = self.a(x)
        MIDDLE
        return one.sum() + self.b(x).sum()
"""


def test_projections_are_not_merged_across_a_change_of_their_input(answer) -> None:
    plain = MERGE.replace("BIAS", "False").replace("MIDDLE", "two = one")
    assert not isinstance(answer("merge-projections", {"m.py": plain}), str)
    for middle in ("x = x + 1", "x.add_(1)"):
        assert isinstance(answer("merge-projections", {"m.py": MERGE.replace("BIAS", "False").replace("MIDDLE", middle)}), str)
    mixed = MERGE.replace("BIAS", "False", 1).replace("BIAS", "True").replace("MIDDLE", "pass")
    assert isinstance(answer("merge-projections", {"m.py": mixed}), str)


@pytest.mark.parametrize("bias", [True, False])
def test_projections_whose_settings_decide_on_a_bias_keep_their_values_with_and_without(bias, act) -> None:
    source = MERGE.replace("bias=BIAS", "bias=config.bias").replace("MIDDLE", "pass").replace("__init__(self)", "__init__(self, config)", 1)
    after = act({"m.py": source}, "merge-projections")["m.py"]
    config = type("Config", (), {"bias": bias})
    one = build(source, "A")["A"](config)
    two = build(after, "A", "stack_weights", "stack_biases")["A"](config)
    two.load_state_dict(one.state_dict())
    x = torch.randn(3, 4)
    for _ in range(2):
        torch.testing.assert_close(two(x), one(x))
    assert list(two.state_dict()) == list(one.state_dict())


def test_three_projections_of_two_inputs_of_one_name_are_two_groups(act) -> None:
    source = MERGE.replace("BIAS", "False").replace("MIDDLE", "two = self.b(x); x = one").replace("self.b(x).sum()", "self.a(x).sum()")
    source = source.replace("two = self.b(x); x = one", "two = self.b(x)\n        x = two")
    after = act({"m.py": source}, "merge-projections")["m.py"]
    assert after.count("F.linear(x, stacked)") == 1 and "return one.sum() + self.a(x).sum()" in after


def test_tall_weights_are_kept_by_columns_and_values_names_and_ties_stay(qwen3_file, act) -> None:
    after = act(qwen3_file, "weight-layout")

    class Config:
        hidden_size, intermediate_size, hidden_act = 16, 48, "silu"

    made = []
    for sources in (qwen3_file, after):
        torch.manual_seed(1)
        made.append(build(sources["modeling_qwen3.py"], "Qwen3MLP", "linear_by_columns", ACT2FN={"silu": F.silu})["Qwen3MLP"](Config()))
    one, two = made
    two.load_state_dict(one.state_dict())
    table = nn.Embedding(48, 16)
    table.weight = two.gate_proj.weight  # as an output head shares it with the embedding
    x = torch.randn(3, 16)
    before = table(torch.arange(5)).clone()
    for _ in range(2):
        torch.testing.assert_close(two(x), one(x))
    assert two.gate_proj.weight.stride() == (1, 48) and two.down_proj.weight.stride() == (48, 1)
    assert {n: v.tolist() for n, v in two.state_dict().items()} == {n: v.tolist() for n, v in one.state_dict().items()}
    assert torch.equal(table(torch.arange(5)), before)
    two.gate_proj.weight.data = torch.ones(48, 16)  # replaced later: laid out again, not remembered
    one.gate_proj.weight.data = torch.ones(48, 16)
    torch.testing.assert_close(two(x), one(x))


@pytest.mark.parametrize("order", [("weight-layout", "merge-projections"), ("merge-projections", "weight-layout")])
def test_layout_and_merging_compose_in_either_order(order, qwen3_file, act) -> None:
    after = act(qwen3_file, *order)["modeling_qwen3.py"]
    assert "gate_proj_out, up_proj_out = F.linear(x, stacked)" in after and "linear_by_columns(hidden_states, self.lm_head.weight)" in after


ODD = {
    "empty": "",
    "no torch": "def f(*a, **k):\n    return {**k, 'x': [*a]}\n",
    "async": "import torch\n\n\nasync def step(self, model, x):\n    return await model(x)\n",
    "nested": "import torch\n\n\ndef a():\n    def b(model, x):\n        class C:\n            def d(self):\n                return model(x).item()\n        return C\n    return b\n",
    "match": "import torch\n\n\ndef f(x):\n    match x:\n        case [1, *rest] if (n := len(rest)):\n            return torch.tensor(rest)[n - 1].item()\n",
    "one line": "import torch; x = torch.ones(1); y = x.item(); print(f'{y!r:>{10}}')\n",
    "slots": "import torch\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass M:\n    a: torch.Tensor\n    b: torch.Tensor\n\n\ndef f(m: M):\n    return m.a.max().item() + m.b.max().item()\n",
    "broken": "def (:\n",
}


@pytest.mark.parametrize("what", ODD)
def test_odd_code_is_left_alone_with_a_reason_or_stays_code(what, skills, answer) -> None:
    for name, skill in skills.items():
        if skill.codemod is None:
            continue
        said = answer(name, {"odd.py": ODD[what]})
        if isinstance(said, str):
            assert len(said) > 10 and (what == "broken" or "failed" not in said), f"{name}: {said}"
        else:
            for text in said[-1].after.values():
                compile(text, "odd.py", "exec", dont_inherit=True)


def test_every_skill_says_what_it_is_for_and_answers_a_known_rule(skills, repo) -> None:
    rules = {
        line.split('"')[1]
        for file in (repo / "trace_diff/findings").glob("*.py")
        for line in file.read_text().splitlines()
        if line.startswith("RULE = ")
    }
    for name, skill in skills.items():
        assert skill.answers and {a.partition(':')[0] for a in skill.answers} <= rules, name
        assert set(skill.devices) <= {"cpu", "cuda"}
        for heading in ("Trace signature", "Preconditions", "Steps", "Pitfalls", "Audit", "Evidence"):
            assert f"## {heading}" in skill.text, f"{name} has no {heading}"
        assert (skill.codemod is not None) == str(skill.metadata["mechanical"]).startswith(("yes", "cpu")), name


LOOP = """import torch


def decode(model, groups):
    tokens = []
    for group in groups:
        scores = model(group)
        token = torch.argmax(scores, dim=-1).item()
        tokens.append(token)
        group.append(len(groups))
    return tokens
"""


def test_reads_of_a_loop_are_taken_together_after_it(act) -> None:
    after = act({"m.py": LOOP}, "remove-host-reads")["m.py"]
    assert ".item()" not in after

    def model(group: list[int]) -> torch.Tensor:
        return torch.arange(9.0).roll(group[0])[None]

    for groups in ([], [[1], [4], [7]]):
        got = [build(text, "decode")["decode"](model, [list(g) for g in groups]) for text in (LOOP, after)]
        assert got[0] == got[1] and all(type(token) is int for token in got[1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("group.append(len(groups))", "group.append(token)"),  # wanted in the round itself
        ("group.append(len(groups))", "group.append(len(tokens))"),
        ("group.append(len(groups))", "if group: break"),
        ("    return tokens", "    return tokens, token"),
    ],
)
def test_a_read_that_the_round_needs_stays(old, new, answer) -> None:
    assert isinstance(answer("remove-host-reads", {"m.py": LOOP.replace(old, new)}), str)
