"""Multiply one input by several weights at once: query, key and value; gate and up.

Finds, in a module's forward, two or more calls of plain linear submodules with the same argument, and replaces
them by one product with their stacked weights, split again. The submodules stay (names, loading and checkpoints
are untouched); at first use their weights are stacked and become views of the stack, so memory does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import codemod_tools as t
import libcst as cst

HELPER = '''
def stack_weights(*parts: nn.Module) -> tuple[torch.Tensor, list[int]]:
    """Weights of several projections of one input as one, and its rows per part; the parts become views of it."""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.weight for part in parts])
        rows = [part.weight.shape[0] for part in parts]
        for part, view in zip(parts, whole.split(rows), strict=True):
            part.weight.data = view
    return whole, rows
'''


@dataclass
class _Group:
    """Calls of one forward that share their argument."""

    function: t.Function
    argument: str
    calls: list[tuple[str, cst.Call, cst.BaseStatement]]  # attribute, call, statement


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for all groups; see the module docstring."""
    trees = t.parse_all(sources, "torch")
    classes = t.classes(trees)
    functions = {f.name: f for f in t.functions(trees) if not f.cls}
    modules = t.subclasses_of(classes, {"Module"})
    if any(f.name == "stack_weights" for f in t.functions(trees)):
        return {"declined": "projections are already merged"}
    groups = [g for name in sorted(modules) for g in _groups(classes[name], classes, functions)]
    if not groups:
        return {"declined": "no two plain linear submodules are called with the same argument"}
    edits: dict[str, dict[cst.CSTNode, object]] = {}
    for group in groups:
        _rewrite(group, classes[group.function.cls], edits.setdefault(group.function.file, {}))
    changed = {}
    for file, new in edits.items():
        first = next(g for g in groups if g.function.file == file)
        new.update(_helper(trees[file], classes[first.function.cls]))
        tree = t.replace(trees[file], new)
        for line in ("import torch", "from torch import nn", "import torch.nn.functional as F"):
            tree = tree if _imports(tree, line) else t.add_import(tree, line)
        changed[file] = tree.code
    merged = [f"{g.function.cls}: " + "+".join(a for a, _, _ in g.calls) for g in groups]
    return {
        "sources": changed,
        "mechanism": "merge-projections",
        "title": f"One product for projections of one input ({', '.join(merged)})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["weights are not replaced after the first step", "the parts keep their names and shapes"],
        "params": {},
        "activation": {"appear": [], "vanish": [{"row": "aten::mm", "phase": "decode", "ranks": "all", "fewer": True}]},
    }


def _imports(tree: cst.Module, line: str) -> bool:
    return any(isinstance(s, cst.SimpleStatementLine) and t.code(s).strip() == line for s in tree.body)


def _groups(cls: t.Class, classes: dict[str, t.Class], functions: dict[str, t.Function]) -> list[_Group]:
    forward = cls.methods.get("forward")
    if forward is None:
        return []
    built = t.attributes_set(cls)
    linear = {a for a, value in built.items() if _is_plain_linear(value, classes, functions)}
    by_argument: dict[str, list[tuple[str, cst.Call, cst.BaseStatement]]] = {}
    for statement in forward.statements():
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for node in t.walk(statement):
            if isinstance(node, cst.Call) and t.code(node.func).startswith("self.") and len(node.args) == 1:
                name, argument = t.last_name(node.func), node.args[0].value
                if t.code(node.func) == f"self.{name}" and name in linear and isinstance(argument, cst.Name):
                    by_argument.setdefault(argument.value, []).append((name, node, statement))
    found = []
    for argument, calls in by_argument.items():
        names = [a for a, _, _ in calls]
        if len(calls) >= 2 and len(set(names)) == len(names) and not _changes_between(forward, argument, calls):
            found.append(_Group(forward, argument, calls))
    return found


def _is_plain_linear(value: cst.BaseExpression, classes: dict[str, t.Class], functions: dict[str, t.Function]) -> bool:
    """Built as a bias-free linear: nn.Linear(..., bias=False), a class whose forward is F.linear(x, self.weight),
    or a function that returns one."""
    if not isinstance(value, cst.Call):
        return False
    name = t.last_name(value)
    if name == "Linear" and name not in classes:
        arguments = t.arguments(value) or {}
        bias = arguments.get("bias", arguments.get(2))
        return bias is not None and t.code(bias) == "False"
    if name in functions:
        inner = t.returned(functions[name])
        return inner is not None and t.last_name(inner) != name and _is_plain_linear(inner, classes, functions)
    if name in classes and "forward" in classes[name].methods and "Module" in classes[name].bases:
        body = t.returned(classes[name].methods["forward"])
        params = list(classes[name].methods["forward"].params)
        return body is not None and len(params) == 2 and t.code(body) in (f"F.linear({params[1]}, self.weight)", f"functional.linear({params[1]}, self.weight)")
    return False


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
    lines = f"if self.{stack} is None:\n    self.{stack} = stack_weights({parts})\n"
    lines += f"stacked, sizes = self.{stack}\n"
    lines += f"{', '.join(f'{n}_out' for n in names)} = F.linear({group.argument}, stacked).split(sizes, dim=-1)\n"
    edits.update(t.before(group.calls[0][2], lines))
    init = cls.methods["__init__"].node.body
    assert isinstance(init, cst.IndentedBlock)
    last = init.body[-1]
    line = f"self.{stack}: tuple[torch.Tensor, list[int]] | None = None  # stacked at first use, when the weights are there\n"
    old = edits.get(last)
    edits[last] = lambda updated: [*(old(updated) if callable(old) else [updated]), *t.statements(line)]


def _helper(tree: cst.Module, cls: t.Class) -> dict[cst.CSTNode, object]:
    """The helper function, before the first class of the file that needs it."""
    new = t.statements(HELPER)[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2)
    return {cls.node: lambda updated: [new, updated]}
