"""Run the model under torch.inference_mode: no autograd graph, no version counters.

Finds the functions outside the model's own modules that call the model, and decorates those that no guard
covers yet, directly or through a caller of that name. Declines where gradients are needed or already off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import codemod_tools as t
import libcst as cst

MODEL_NAMES = {"model", "_model", "net", "llm", "transformer", "language_model"}
ENTRY_POINTS = {"forward", "compute_logits", "forward_decode", "forward_prefill", "decode", "prefill"}
GUARDS = {f"torch.{name}" for name in ("no_grad", "inference_mode", "autograd.no_grad", "autograd.inference_mode", "set_grad_enabled")}
MAX_FILES = 3


@dataclass
class _Function:
    """What matters about one function definition."""

    file: str
    name: str
    node: cst.FunctionDef
    in_module_class: bool
    calls: set[str] = field(default_factory=set)  # last names of everything it calls
    runs_model: bool = False
    guarded: bool = False
    generator: bool = False


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    functions: list[_Function] = []
    trees = t.parse_all(sources, "torch")
    modules = t.subclasses_of(t.classes(trees), {"Module", "PreTrainedModel"})
    trainers: list[str] = []
    for file, tree in trees.items():
        known = t.imports(tree)
        nodes = list(t.walk(tree))
        if any(isinstance(n, cst.Expr) and isinstance(n.value, cst.Call) and _is_guard(n.value, known) for n in nodes):
            return {"declined": f"{file} switches autograd off for the whole process"}
        if any(_asks_for_gradients(n) for n in nodes):
            trainers.append(file)
        else:
            functions += [_survey(f, modules, known) for f in t.functions({file: tree})]
    covered = _covered(functions)
    callers = [f for f in functions if f.runs_model and not f.in_module_class]
    if not callers:
        return {"declined": f"{trainers[0]} uses gradients" if trainers else "nothing here calls the model from outside it"}
    bare = [f for f in callers if f.name not in covered and not f.generator and f.node.asynchronous is None]
    if not bare:
        return {"declined": "every caller of the model is already under no_grad or inference_mode, or is a generator"}
    for trainer in trainers:
        if used := _imported(trees[trainer], {f.file for f in bare}):
            return {"declined": f"{trainer} uses gradients and imports {used}"}
    changed: dict[str, str] = {}
    for file in sorted({f.file for f in bare}):
        nodes = {f.node for f in bare if f.file == file}
        changed[file] = _with_torch(t.replace(trees[file], dict.fromkeys(nodes, _decorated))).code
    if len(changed) > MAX_FILES:
        return {"declined": f"the model is called in {len(changed)} files; more than one patch may touch"}
    return {
        "sources": changed,
        "mechanism": "inference-mode",
        "title": "Run the model without recording for autograd",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["nothing here needs a gradient", "tensors made under the guard are not changed in place outside it"],
        "params": {},
        "activation": {
            "appear": [],
            "vanish": [{"row": "detach", "phase": "decode", "ranks": "all"}],  # the autograd node's own row
        },
    }


def _imported(tree: cst.Module, files: set[str]) -> str:
    """The first of these files whose module the tree imports; "" for none."""
    modules = set(t.imports(tree).values())
    for file in sorted(files):
        name = file.removesuffix(".py").replace("/", ".")
        if any(m == name or m.startswith(name + ".") or m.rpartition(".")[2] == name.rpartition(".")[2] for m in modules):
            return name
    return ""


def _covered(functions: list[_Function]) -> set[str]:
    """Names of functions under a guard: their own, or that of all functions which call them."""
    called_by: dict[str, list[_Function]] = {}
    for function in functions:
        for name in function.calls:
            called_by.setdefault(name, []).append(function)
    covered = {f.name for f in functions if f.guarded}
    while True:
        more = {
            f.name
            for f in functions
            if f.name not in covered and called_by.get(f.name) and all(c.name in covered for c in called_by[f.name])
        }
        if not more:
            return covered
        covered |= more


def _survey(function: t.Function, modules: set[str], known: dict[str, str]) -> _Function:
    """What the function calls and how; a function inside another counts with it."""
    made = _Function(function.file, function.name, function.node, function.cls in modules)
    made.guarded = any(_is_guard(d.decorator, known) for d in function.node.decorators)
    for node in t.walk(function.node.body):
        if isinstance(node, cst.Yield):
            made.generator = True
        elif isinstance(node, cst.With):
            made.guarded = made.guarded or any(_is_guard(item.item, known) for item in node.items)
        elif isinstance(node, cst.Call):
            name = t.last_name(node.func)
            made.calls.add(name)
            on_model = isinstance(node.func, cst.Attribute) and t.last_name(node.func.value) in MODEL_NAMES
            if name in MODEL_NAMES or (on_model and name in ENTRY_POINTS):
                made.runs_model = True
    return made


def _asks_for_gradients(node: cst.CSTNode) -> bool:
    """`x.backward()`, or a step of something called an optimizer."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return False
    name = node.func.attr.value
    return name == "backward" or (name == "step" and "optim" in t.last_name(node.func.value))


def _is_guard(node: cst.BaseExpression, known: dict[str, str]) -> bool:
    return t.qualified(node.func if isinstance(node, cst.Call) else node, known) in GUARDS


def _decorated(function: cst.FunctionDef) -> cst.FunctionDef:
    guard = cst.Decorator(cst.parse_expression("torch.inference_mode()"))
    return function.with_changes(decorators=[*function.decorators, guard])


def _with_torch(tree: cst.Module) -> cst.Module:
    """The module, importing torch under its own name if it did not."""
    for statement in tree.body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Import) and any(t.code(a.name) == "torch" and a.asname is None for a in small.names):
                return tree
    return t.add_import(tree, "import torch")
