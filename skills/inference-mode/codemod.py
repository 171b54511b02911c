"""Run the model under torch.inference_mode: no autograd graph, no version counters.

Finds the functions outside the model's own modules that call the model, and decorates those that no guard
covers yet, directly or through a caller of that name. Declines where gradients are needed or already off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import codemod_tools as t
import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider

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
    trees: dict[str, cst.Module] = {}
    modules = t.subclasses_of(t.classes(t.parse_all(sources)), {"Module", "PreTrainedModel"})
    for file in sorted(f for f in sources if f.endswith(".py")):
        if "torch" not in sources[file]:
            continue
        wrapper = MetadataWrapper(cst.parse_module(sources[file]))
        survey = _Survey(file, modules)
        wrapper.visit(survey)
        if survey.gradients:
            return {"declined": f"{file} uses gradients ({survey.gradients})"}
        if survey.off:
            return {"declined": f"{file} switches autograd off for the whole process"}
        functions += survey.functions
        trees[file] = wrapper.module
    covered = _covered(functions)
    callers = [f for f in functions if f.runs_model and not f.in_module_class]
    if not callers:
        return {"declined": "nothing here calls the model from outside it"}
    bare = [f for f in callers if f.name not in covered and not f.generator and f.node.asynchronous is None]
    if not bare:
        return {"declined": "every caller of the model is already under no_grad or inference_mode, or is a generator"}
    changed: dict[str, str] = {}
    for file in sorted({f.file for f in bare}):
        nodes = {f.node for f in bare if f.file == file}
        changed[file] = _with_torch(trees[file].visit(_Decorate(nodes))).code
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


class _Survey(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, file: str, modules: set[str]) -> None:
        super().__init__()
        self.file, self.modules = file, modules
        self.functions: list[_Function] = []
        self.stack: list[_Function] = []
        self.classes: list[str] = []
        self.gradients = ""
        self.off = False

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.classes.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self.classes.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        inside = bool(self.classes) and self.classes[-1] in self.modules
        function = _Function(self.file, node.name.value, node, inside)
        function.guarded = any(self._is_guard(d.decorator) for d in node.decorators)
        self.functions.append(function)
        self.stack.append(function)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self.stack.pop()

    def visit_Yield(self, node: cst.Yield) -> None:
        if self.stack:
            self.stack[-1].generator = True

    def visit_With(self, node: cst.With) -> None:
        if self.stack and any(self._is_guard(item.item) for item in node.items):
            self.stack[-1].guarded = True

    def visit_Expr(self, node: cst.Expr) -> None:
        if isinstance(node.value, cst.Call) and self._is_guard(node.value):  # set_grad_enabled(False) as a statement
            self.off = True

    def visit_Call(self, node: cst.Call) -> None:
        name = t.last_name(node.func)
        if name == "backward" or (name == "step" and isinstance(node.func, cst.Attribute) and "optim" in t.last_name(node.func.value)):
            self.gradients = self.gradients or name
        if not self.stack:
            return
        self.stack[-1].calls.add(name)
        of_model = isinstance(node.func, cst.Attribute) and t.last_name(node.func.value) in MODEL_NAMES and name in ENTRY_POINTS
        if name in MODEL_NAMES or of_model:
            self.stack[-1].runs_model = True

    def _is_guard(self, node: cst.BaseExpression) -> bool:
        target = node.func if isinstance(node, cst.Call) else node
        names = {q.name for q in self.get_metadata(QualifiedNameProvider, target, set())}
        return bool(names & GUARDS)


class _Decorate(cst.CSTTransformer):
    def __init__(self, nodes: set[cst.FunctionDef]) -> None:
        super().__init__()
        self.nodes = nodes

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if original_node not in self.nodes:
            return updated_node
        guard = cst.Decorator(cst.parse_expression("torch.inference_mode()"))
        return updated_node.with_changes(decorators=[*updated_node.decorators, guard])


def _with_torch(tree: cst.Module) -> cst.Module:
    """The module, importing torch under its own name if it did not."""
    for statement in tree.body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Import) and any(t.code(a.name) == "torch" and a.asname is None for a in small.names):
                return tree
    return t.add_import(tree, "import torch")
