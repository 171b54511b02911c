"""Keep tall weights by columns on a CPU: the library's product of a few rows then streams them.

Finds, in forwards of modules, calls of linear layers that are built without a bias and `F.linear(x, self.weight)`, and
sends them through one function that lays a weight out at first use. Shapes, names and values of the weights stay.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst

NAME = "linear_by_columns"
HELPER = '''
def linear_by_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T for weight [out, in]. On a CPU one with more rows than columns is kept by columns from now on."""
    tall = weight.shape[0] > weight.shape[1] and weight.dtype is torch.float32
    if weight.is_cpu and tall and weight.stride(0) != 1:
        with torch.inference_mode(False), torch.no_grad():
            weight.data = weight.data.t().contiguous().t()
    return torch.matmul(x, weight.t())
'''
MAX_FILES = 3


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for all of them; see the module docstring."""
    trees = t.parse_all(sources, "torch")
    if any(f.name == NAME for f in t.functions(trees)):
        return {"declined": "tall weights are kept by columns already"}
    makers = {f.name: f for f in t.functions(trees) if not f.cls}
    everywhere = t.classes(trees)
    changed: dict[str, str] = {}
    done: list[str] = []
    for file, tree in trees.items():
        here = t.classes({file: tree})
        known = {**everywhere, **here}
        modules = sorted(t.subclasses_of(known, {"Module", "PreTrainedModel"}) & here.keys())
        edits: dict[cst.CSTNode, object] = {}
        for name in modules:
            found = _products(here[name], known, makers, t.imports(tree))
            edits.update(found)
            done += [name] if found else []
        if edits:
            changed[file] = _with_helper(tree, edits)
    if not changed:
        return {"declined": "no module multiplies by a weight of its own or of a linear layer without bias"}
    if len(changed) > MAX_FILES:
        return {"declined": f"linear layers are called in {len(changed)} files; more than one patch may touch"}
    return {
        "sources": changed,
        "mechanism": "weight-layout",
        "title": f"Keep tall weights by columns ({', '.join(done)})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["weights keep names, shapes and values", "what is added up is the same, in another order"],
        "params": {},
        "activation": {"appear": [], "vanish": [{"row": "aten::linear", "phase": "decode", "ranks": "all", "fewer": True}]},
    }


def _products(
    cls: t.Class, known: dict[str, t.Class], makers: dict[str, t.Function], names: dict[str, str]
) -> dict[cst.CSTNode, object]:
    """Replacements for the products of one module's forward."""
    forward = cls.methods.get("forward")
    if forward is None:
        return {}
    # A linear layer written here is changed inside its own forward; one of torch's where it is called.
    torchs = {a for a, value in t.attributes_set(cls).items() if t.last_name(value) not in {*known, *makers} and t.bias_of_linear(value, known, makers) == "False"}
    found: dict[cst.CSTNode, object] = {}
    for node in t.walk(forward.node.body):
        if not isinstance(node, cst.Call) or any(a.keyword or a.star for a in node.args):
            continue
        name = t.last_name(node.func)
        if len(node.args) == 1 and name in torchs and t.code(node.func) == f"self.{name}":
            found[node] = _call(f"self.{name}.weight")
        elif len(node.args) == 2 and t.qualified(node.func, names) == "torch.nn.functional.linear":
            weight = node.args[1].value
            if isinstance(weight, cst.Attribute) and t.code(weight.value) == "self":
                found[node] = _call(t.code(weight))
    return found


def _call(weight: str):
    """A function that puts the call of the helper in the place of one with the same first argument."""

    def put(updated: cst.Call) -> cst.Call:
        first = updated.args[0].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")), whitespace_after_arg=cst.SimpleWhitespace(""))
        return updated.with_changes(func=cst.Name(NAME), args=[first, cst.Arg(cst.parse_expression(weight))])

    return put


def _with_helper(tree: cst.Module, edits: dict[cst.CSTNode, object]) -> str:
    first = next(s for s in tree.body if isinstance(s, cst.ClassDef | cst.FunctionDef))
    new = t.statements(HELPER)[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2)
    return t.with_torch_names(t.replace(tree, {**edits, first: lambda updated: [new, updated]}), ("torch",)).code
