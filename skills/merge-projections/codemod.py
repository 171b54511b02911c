"""Multiply one input by several weights at once: query, key and value; gate and up.

Finds, in a module's forward, two or more calls of plain linear submodules with the same argument, and replaces
them by one product with their stacked weights, split again. The submodules stay (names, loading and checkpoints
are untouched); at first use their weights are stacked and become views of the stack, so memory does not grow.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import codemod_tools as t
import libcst as cst

HELPER = '''
def stack_weights(*parts: nn.Module) -> tuple[torch.Tensor, list[int]]:
    """Weights of several projections of one input as one, and its rows per part; the parts become views of it."""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.weight for part in parts])
        if whole.is_cpu:  # by columns: there a product of few rows reads a tall weight several times faster
            whole = whole.t().contiguous().t()
        rows = [part.weight.shape[0] for part in parts]
        for part, view in zip(parts, whole.split(rows), strict=True):
            part.weight.data = view
    return whole, rows
'''
BIASES = '''
def stack_biases(*parts: nn.Module) -> torch.Tensor | None:
    """Their biases as one, of which the parts become views; None where they have none."""
    if parts[0].bias is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.bias for part in parts])
        for part, view in zip(parts, whole.split([len(part.bias) for part in parts]), strict=True):
            part.bias.data = view
    return whole
'''


@dataclass
class _Group:
    """Calls of one forward that share their argument."""

    function: t.Function
    argument: str
    calls: list[tuple[str, cst.Call, cst.BaseStatement]]  # attribute, call, statement
    biased: bool  # the parts have a bias, or their settings decide


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for all groups; see the module docstring."""
    trees = t.parse_all(sources, "torch")
    functions = {f.name: f for f in t.functions(trees) if not f.cls}
    if any(f.name == "stack_weights" for f in t.functions(trees)):
        return {"declined": "projections are already merged"}
    classes = {file: t.classes({file: tree}) for file, tree in trees.items()}  # by file: engines hold variants of one class
    everywhere = t.classes(trees)
    groups = []
    for here in classes.values():
        known = {**everywhere, **here}
        modules = t.subclasses_of(known, {"Module"}) & here.keys()
        groups += [g for name in sorted(modules) if "__init__" in here[name].methods for g in _groups(here[name], known, functions)]
    if not groups:
        return {"declined": "no two plain linear submodules are called with the same argument"}
    edits: dict[str, dict[cst.CSTNode, object]] = {}
    for group in groups:
        _rewrite(group, classes[group.function.file][group.function.cls], edits.setdefault(group.function.file, {}))
    changed = {}
    for file, new in edits.items():
        first = next(g for g in groups if g.function.file == file)
        helpers = HELPER + (BIASES if any(g.biased and g.function.file == file for g in groups) else "")
        new.update(_helper(helpers, classes[file][first.function.cls]))
        tree = t.replace(trees[file], new)
        changed[file] = t.with_torch_names(tree).code
    merged = [f"{g.function.cls}: " + "+".join(a for a, _, _ in g.calls) for g in groups]
    return {
        "sources": changed,
        "mechanism": "merge-projections",
        "title": f"One product for projections of one input ({', '.join(merged)})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["weights are not replaced after the first step", "the parts keep their names and shapes"],
        "params": {},
        "activation": {"appear": [], "vanish": [{"row": "products", "phase": "decode", "ranks": "all", "fewer": True}]},
    }


def _groups(cls: t.Class, classes: dict[str, t.Class], functions: dict[str, t.Function]) -> list[_Group]:
    forward = cls.methods.get("forward")
    if forward is None:
        return []
    linear = {a: t.bias_of_linear(value, classes, functions) for a, value in t.attributes_set(cls).items()}
    alike: dict[tuple[str, str], list[tuple[str, cst.Call, cst.BaseStatement]]] = {}
    for statement in forward.statements():
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for node in t.walk(statement):
            found = _product(node) if isinstance(node, cst.Call) else None
            if found is not None and (bias := linear.get(found[0])) is not None:
                alike.setdefault((found[1], bias), []).append((found[0], node, statement))
    found = []
    for (argument, bias), calls in alike.items():
        for run in _runs(forward, argument, calls):
            names = [a for a, _, _ in run]
            if len(run) >= 2 and len(set(names)) == len(names):
                found.append(_Group(forward, argument, run, bias != "False"))
    return found


def _runs(forward: t.Function, argument: str, calls: list) -> list[list]:
    """The calls in stretches within which the argument stays what it is."""
    runs = [calls[:1]]
    for before, call in itertools.pairwise(calls):
        if _changes_between(forward, argument, [before, call]):
            runs.append([])
        runs[-1].append(call)
    return runs


def _product(call: cst.Call) -> tuple[str, str] | None:
    """(attribute, argument) of `self.a(x)`, or of `linear_by_columns(x, self.a.weight)`, which weight-layout leaves."""
    if len(call.args) == 1 and isinstance(call.args[0].value, cst.Name) and not call.args[0].star:
        name = t.last_name(call.func)
        return (name, call.args[0].value.value) if t.code(call.func) == f"self.{name}" else None
    if t.last_name(call.func) == "linear_by_columns" and len(call.args) == 2 and isinstance(call.args[0].value, cst.Name):
        weight = t.code(call.args[1].value).split(".")
        if len(weight) == 3 and weight[0] == "self" and weight[2] == "weight":
            return weight[1], call.args[0].value.value
    return None


def _changes_between(forward: t.Function, argument: str, calls: list) -> bool:
    """Whether the shared argument may be rebound or changed in place between its first and last use."""
    body = list(forward.statements())
    first, last = body.index(calls[0][2]), body.index(calls[-1][2])
    for statement in body[first:last]:
        for node in t.walk(statement):
            if isinstance(node, cst.AssignTarget | cst.AugAssign) and t.last_name(node.target) == argument:
                return True
            method = node.func if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) else None
            if method is not None and method.attr.value.endswith("_") and t.last_name(method.value) == argument:
                return True
    return False


def _rewrite(group: _Group, cls: t.Class, edits: dict[cst.CSTNode, object]) -> None:
    names = [a for a, _, _ in group.calls]
    stack = "_" + "_".join(n.removesuffix("_proj").removesuffix("_linear") for n in names)
    parts = ", ".join(f"self.{n}" for n in names)
    for name, call, _ in group.calls:
        edits[call] = cst.Name(f"{name}_out")
    kind, made, got, bias = "tuple[torch.Tensor, list[int]] | None", f"stack_weights({parts})", "stacked, sizes", ""
    if group.biased:
        kind, made = "tuple | None", f"(*{made}, stack_biases({parts}))"
        got, bias = f"{got}, bias", ", bias"
    lines = f"if self.{stack} is None:\n    self.{stack} = {made}\n"
    lines += f"{got} = self.{stack}\n"
    lines += f"{', '.join(f'{n}_out' for n in names)} = F.linear({group.argument}, stacked{bias}).split(sizes, dim=-1)\n"
    edits.update(t.before(group.calls[0][2], lines))
    init = cls.methods["__init__"].node.body
    assert isinstance(init, cst.IndentedBlock)
    last = init.body[-1]
    line = f"self.{stack}: {kind} = None  # stacked at first use, when the weights are there\n"
    old = edits.get(last)
    edits[last] = lambda updated: [*(old(updated) if callable(old) else [updated]), *t.statements(line)]


def _helper(helpers: str, cls: t.Class) -> dict[cst.CSTNode, object]:
    """The helper functions, before the first class of the file that needs them."""
    new = [s.with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2) for s in t.statements(helpers)]
    return {cls.node: lambda updated: [*new, updated]}
