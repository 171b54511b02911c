"""Compile small pure tensor functions (norms, rotary positions) with torch.compile, on GPUs only.

A module's forward qualifies when it calls nothing but known pointwise and reduction operators: no submodule, no
collective, no cache, no host read; such a region has no graph break and does not care about batch size.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst

PURE = {
    "float", "to", "type_as", "pow", "square", "mean", "sum", "rsqrt", "sqrt", "chunk", "split", "cat", "unsqueeze", "squeeze", "neg",
    "mul", "add", "mul_", "add_", "view", "reshape", "transpose", "flatten", "unflatten", "silu", "gelu", "sigmoid", "exp", "where",
    "stack", "unbind", "contiguous",
}  # fmt: skip
HELPER = '''
def compiled(function):
    """torch.compile for shapes that change, where there is a GPU; on a CPU the function as it is."""
    return torch.compile(function, dynamic=True, fullgraph=True) if torch.cuda.is_available() else function
'''


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for the file with the most such functions; see the module docstring."""
    trees = t.parse_all(sources, "torch")
    known = t.classes(trees)
    modules = t.subclasses_of(known, {"Module"})
    if any(t.qualified(n, t.imports(tree)) == "torch.compile" for tree in trees.values() for n in t.walk(tree) if isinstance(n, cst.Attribute)):
        return {"declined": "torch.compile is already used here"}
    best: tuple[str, list[t.Function]] | None = None
    for file, tree in trees.items():
        pure = [f for f in t.functions({file: tree}) if f.cls in modules and f.name == "forward" and not f.node.decorators and _is_pure(f)]
        if pure and (best is None or len(pure) > len(best[1])):
            best = (file, pure)
    if best is None:
        return {"declined": "no module whose forward is made of pure tensor operators alone"}
    file, pure = best
    tree = trees[file]
    edits: dict[cst.CSTNode, object] = {f.node: _decorated for f in pure}
    first = next(n for n in tree.body if isinstance(n, cst.ClassDef | cst.FunctionDef))
    helper = t.statements(HELPER)[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2)
    edits[first] = lambda updated: [helper, updated]
    new = t.replace(tree, edits)
    new = new if t.imports(tree).get("torch") == "torch" else t.add_import(new, "import torch")
    return {
        "sources": {file: new.code},
        "mechanism": "compile-regions",
        "title": f"Compile pure regions on GPUs ({', '.join(f.cls for f in pure)})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["regions have no side effect and no graph break", "a CPU runs them as before"],
        "params": {},
        "activation": {"appear": [{"row": "triton_*", "phase": "decode", "ranks": "all"}], "vanish": [{"row": "aten::rsqrt", "phase": "decode", "ranks": "all", "fewer": True}]},
    }


def _is_pure(function: t.Function) -> bool:
    """At least three operators, all of them pure; subscripts with tensors (gathers) are left to eager code."""
    calls = [n for n in t.walk(function.node.body) if isinstance(n, cst.Call)]
    operators = sum(isinstance(n, cst.BinaryOperation | cst.UnaryOperation) for n in t.walk(function.node.body))
    straight = all(isinstance(s, cst.SimpleStatementLine) for s in function.statements())
    return straight and len(calls) + operators >= 3 and all(t.last_name(c.func) in PURE for c in calls) and not _gathers(function)


def _gathers(function: t.Function) -> bool:
    return any(isinstance(n, cst.Subscript) and not isinstance(n.value, cst.Attribute | cst.Name) for n in t.walk(function.node.body)) or any(
        isinstance(n, cst.Subscript) and any(isinstance(e.slice, cst.Index) and t.names_in(e.slice) for e in n.slice) for n in t.walk(function.node.body)
    )


def _decorated(function: cst.FunctionDef) -> cst.FunctionDef:
    return function.with_changes(decorators=[cst.Decorator(cst.Name("compiled")), *function.decorators])
