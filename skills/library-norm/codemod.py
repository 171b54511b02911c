"""Replace a hand-written RMSNorm by torch's own: one operator where there were eight.

Recognises the arithmetic, not the spelling: a method's straight-line body is inlined into one expression, casts
are set aside, and what is left must be weight * x * rsqrt(mean(x^2) + eps).
"""

from __future__ import annotations

import ast

import codemod_tools as t
import libcst as cst

CASTS = {"float", "to", "type_as", "type", "contiguous"}


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for every such method; see the module docstring."""
    trees = t.parse_all(sources, "rsqrt")
    done: list[str] = []
    changed: dict[str, str] = {}
    why = "no RMSNorm written out in a module"
    for file, tree in trees.items():
        edits: dict[cst.CSTNode, object] = {}
        modules = t.subclasses_of(t.classes({file: tree}), {"Module"})
        for function in t.functions({file: tree}):
            if function.cls not in modules:
                continue
            if any(t.last_name(d.decorator) == "compile" for d in function.node.decorators) and "rsqrt" in t.code(function.node):
                why = f"{function.cls}.{function.name} is compiled; its compiler fuses it already"
                continue
            match = _match(function)
            if match is not None and not function.node.decorators:
                _rewrite(function, *match, edits)
            elif not _stretch(function, edits):
                continue
            done.append(f"{function.cls}.{function.name}")
        if edits:
            new = t.replace(tree, edits)
            line = "import torch.nn.functional as F"
            imported = any(t.code(s).strip() in (line, "from torch.nn import functional as F") for s in tree.body)
            changed[file] = (new if imported else t.add_import(new, line)).code
    if not done:
        return {"declined": why}
    return {
        "sources": changed,
        "mechanism": "library-norm",
        "title": f"Let torch compute the norm in one operator ({', '.join(done)})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["the mean square stays in float32", "below float32 the last bit of weight * x may round differently"],
        "params": {},
        "activation": {
            "appear": [{"row": "aten::rms_norm", "phase": "decode", "ranks": "all"}],
            "vanish": [{"row": "aten::pow", "phase": "decode", "ranks": "all", "fewer": True}],  # on a CPU it stays: torch computes it in parts there
        },
    }


def _match(function: t.Function) -> tuple[str, str] | None:
    """(argument, eps expression) when the method computes an RMSNorm of its argument with self.weight."""
    params = list(function.params)
    if len(params) != 2:
        return None
    tree = ast.parse(cst.Module([function.node.with_changes(decorators=[], leading_lines=[])]).code).body[0]
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    value = _inlined(tree.body)
    if value is None:
        return None
    for weight, normed in _sides(_bare(value), ast.Mult):
        if ast.unparse(_bare(weight)) != "self.weight":
            continue
        eps = _normed(_bare(normed), params[1])
        if eps is not None:
            return params[1], eps
    return None


def _stretch(function: t.Function, edits: dict[cst.CSTNode, object]) -> bool:
    """Replace plain assignments in a row, anywhere in the body, that make weight * x * rsqrt(mean(x^2) + eps) and cast nothing."""
    body = list(function.statements())
    for end in range(len(body) - 1, -1, -1):
        for start in range(end):
            run = body[start : end + 1]
            pairs = [t.assigned(s) for s in run]
            if any(p is None for p in pairs) or any(f".{cast}(" in t.code(s) for s in run for cast in CASTS):
                continue
            found = _of_run(run)
            names = {p[0] for p in pairs if p} - {pairs[-1][0]}  # type: ignore[index]
            after = {n.value for s in body[end + 1 :] for n in t.walk(s) if isinstance(n, cst.Name)}
            if found is None or names & after:
                continue
            x, weight, eps = found
            line = f"{pairs[-1][0]} = F.rms_norm({x}, {weight}.shape, {weight}, {eps})\n"  # type: ignore[index]
            edits[run[0]] = lambda updated, line=line: [t.statements(line)[0].with_changes(leading_lines=updated.leading_lines)]
            edits.update({s: cst.RemoveFromParent() for s in run[1:]})
            return True
    return False


def _of_run(run: list[cst.BaseStatement]) -> tuple[str, str, str] | None:
    """(x, weight, eps) of assignments in a row."""
    lines = ast.parse("\n".join(t.code(s).strip() for s in run)).body
    last = lines[-1]
    assert isinstance(last, ast.Assign)
    value = _inlined([*lines[:-1], ast.Return(last.value)])
    for weight, normed in _sides(value, ast.Mult) if value is not None else ():
        if not (isinstance(weight, ast.Attribute) and ast.unparse(weight.value) == "self"):
            continue
        for name in sorted(set().union(*(t.names_in(s) for s in run))):
            if (eps := _normed(normed, name)) is not None:
                return name, ast.unparse(weight), eps
    return None


def _inlined(body: list[ast.stmt]) -> ast.expr | None:
    """The returned expression with every local name replaced by what was assigned to it; None when not straight."""
    values: dict[str, ast.expr] = {}

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return values.get(node.id, node)

    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
            values[statement.targets[0].id] = Fill().visit(statement.value)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            return Fill().visit(statement.value)
        else:
            return None
    return None


def _bare(node: ast.expr) -> ast.expr:
    """The expression without casts around it."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        node = node.func.value
    return node


def _sides(node: ast.expr, operator: type) -> list[tuple[ast.expr, ast.expr]]:
    """Both orders of the operands of a binary operation; empty for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        return [(node.left, node.right), (node.right, node.left)]
    return []


def _normed(node: ast.expr, x: str) -> str | None:
    """eps, if the expression is x * rsqrt(mean(x^2, -1, keepdim) + eps)."""
    for value, scale in _sides(node, ast.Mult):
        scale = _bare(scale)
        if _is(value, x) and isinstance(scale, ast.Call) and ast.unparse(scale.func) == "torch.rsqrt" and len(scale.args) == 1:
            for mean, eps in _sides(_bare(scale.args[0]), ast.Add):
                if _is_mean_square(_bare(mean), x):
                    return ast.unparse(eps)
    return None


def _is(node: ast.expr, x: str) -> bool:
    node = _bare(node)
    return isinstance(node, ast.Name) and node.id == x


def _is_mean_square(node: ast.expr, x: str) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "mean"):
        return False
    options = {k.arg: ast.unparse(k.value) for k in node.keywords}
    axis = options.pop("dim", ast.unparse(node.args[-1]) if node.args else "")
    inner = node.args[0] if ast.unparse(node.func.value) == "torch" else node.func.value
    if axis not in ("-1", "(-1,)", "[-1]") or options != {"keepdim": "True"}:
        return False
    inner = _bare(inner)
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
        squared = inner.func.attr == "square" or (inner.func.attr == "pow" and [ast.unparse(a) for a in inner.args] == ["2"])
        return squared and _is(inner.func.value, x)
    if isinstance(inner, ast.BinOp):
        by_power = isinstance(inner.op, ast.Pow) and ast.unparse(inner.right) == "2"
        by_product = isinstance(inner.op, ast.Mult) and _is(inner.right, x)
        return (by_power or by_product) and _is(inner.left, x)
    return False


def _rewrite(function: t.Function, x: str, eps: str, edits: dict[cst.CSTNode, object]) -> None:
    old = function.statements()
    edits[old[0]] = t.statements(f"return F.rms_norm({x}, self.weight.shape, self.weight, {eps})\n")
    edits.update({s: cst.RemoveFromParent() for s in old[1:]})
