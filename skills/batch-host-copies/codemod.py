"""Send the small integer lists of a step to the device as one tensor per type, and take it apart there.

Finds a statement that turns three or more lists into tensors by the same constructor with the same options, joins
the lists, builds one tensor, and splits it into views.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst

LEAST = 2  # per type; at least LEAST_IN_ALL together
LEAST_IN_ALL = 3
LOOPS = (cst.ListComp, cst.GeneratorExp, cst.DictComp, cst.SetComp, cst.Lambda)
CONSTRUCTORS = {"torch.tensor", "torch.as_tensor"}


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for the statement with the most such tensors; see the module docstring."""
    trees = t.parse_all(sources, "torch")
    functions = t.functions(trees)
    best: tuple[int, t.Function, cst.SimpleStatementLine, dict[str, list[cst.Call]]] | None = None
    for function in functions:
        makers = {f"self.{f.name}" for f in functions if f.cls == function.cls and _is_maker(f)}
        for statement in t.walk(function.node):
            if not isinstance(statement, cst.SimpleStatementLine):
                continue
            groups = {k: c for k, c in _groups(statement, makers, function).items() if len(c) >= LEAST}
            count = sum(len(c) for c in groups.values())
            if count >= LEAST_IN_ALL and (best is None or count > best[0]):
                best = (count, function, statement, groups)
    if best is None:
        return {"declined": "no statement turns three or more lists into tensors one by one"}
    _, function, statement, groups = best
    edits: dict[cst.CSTNode, object] = {}
    lines = ""
    taken = t.names_in(function.node) | set(function.params)
    for calls in groups.values():
        lines += _pack(calls, statement, taken, edits)
    edits.update(t.before(statement, lines))
    return {
        "sources": {function.file: t.replace(trees[function.file], edits).code},
        "mechanism": "batch-host-copies",
        "title": f"One tensor per type for the lists of a step ({sum(map(len, groups.values()))} lists)",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["the parts are views of one tensor: nobody resizes them"],
        "params": {},
        "activation": {"appear": [{"row": "aten::split*", "phase": "decode", "ranks": "all"}], "vanish": []},
    }


def _is_maker(function: t.Function) -> bool:
    """A method whose body is `return torch.tensor(first parameter, dtype=..., ...)`: one type for all it makes."""
    body = t.returned(function)
    params = list(function.params)
    if not isinstance(body, cst.Call) or t.code(body.func) not in CONSTRUCTORS or len(params) < 2:
        return False
    return bool(body.args) and t.code(body.args[0].value) == params[1] and _typed(body)


def _typed(call: cst.Call) -> bool:
    return any(a.keyword is not None and a.keyword.value == "dtype" for a in call.args)


def _groups(statement: cst.SimpleStatementLine, makers: set[str], function: t.Function) -> dict[str, list[cst.Call]]:
    """Calls in the statement that make a tensor of a flat list, by constructor and its other arguments."""
    found: dict[str, list[cst.Call]] = {}
    repeated = {id(n) for loop in t.walk(statement) if isinstance(loop, LOOPS) for n in t.walk(loop)}
    for node in t.walk(statement):
        if not isinstance(node, cst.Call) or not node.args or node.args[0].keyword is not None or id(node) in repeated:
            continue
        name = t.code(node.func)
        made_here = name in makers or (name in CONSTRUCTORS and _typed(node))
        if made_here and _is_list(node.args[0].value, function):
            options = ", ".join(f"{a.keyword.value}={t.code(a.value)}" if a.keyword else t.code(a.value) for a in node.args[1:])
            found.setdefault(f"{name}|{options}", []).append(node)
    return found


def _is_list(value: cst.BaseExpression, function: t.Function) -> bool:
    """A list display or comprehension of plain elements, a sum of such, or a name made as an empty list of int."""
    if isinstance(value, cst.ListComp):
        return not isinstance(value.elt, cst.List | cst.ListComp | cst.BinaryOperation) or not _nested(value.elt)
    if isinstance(value, cst.List):
        return bool(value.elements) and not any(_nested(e.value) for e in value.elements)
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
        return all(_is_list(side, function) or t.code(side).startswith("list(") for side in (value.left, value.right))
    if isinstance(value, cst.Name):
        made = [n for n in t.walk(function.node) if isinstance(n, cst.AnnAssign) and t.last_name(n.target) == value.value]
        if made:
            return t.code(made[0].annotation.annotation) == "list[int]"
        plain = [p[1] for n in t.walk(function.node) if (p := t.assigned(n)) and p[0] == value.value]
        return len(plain) == 1 and not isinstance(plain[0], cst.Name) and _is_list(plain[0], function)
    return False


def _nested(value: cst.BaseExpression) -> bool:
    return any(isinstance(n, cst.List | cst.ListComp) for n in t.walk(value))


def _pack(calls: list[cst.Call], statement: cst.CSTNode, taken: set[str], edits: dict[cst.CSTNode, object]) -> str:
    """Lines that build one tensor for these calls; the calls become names of its parts."""
    keywords = {id(n.value): n.keyword.value for n in t.walk(statement) if isinstance(n, cst.Arg) and n.keyword}
    lists, parts, lines = [], [], ""
    for n, call in enumerate(calls):
        value = call.args[0].value
        hint = keywords.get(id(call), f"values_{n}")
        name = t.code(value) if isinstance(value, cst.Name) else _fresh(hint, taken)
        if not isinstance(value, cst.Name):
            lines += f"{name} = {t.code(value)}\n"
        part = _fresh(f"{hint}_tensor", taken)
        lists.append(name)
        parts.append(part)
        edits[call] = cst.Name(part)
    every = _fresh("lists", taken)
    joined = calls[0].args[0].with_changes(value=cst.parse_expression(f"[value for part in {every} for value in part]"))
    made = t.code(calls[0].with_changes(args=[joined, *calls[0].args[1:]]))
    lines += f"{every} = ({', '.join(lists)})\n"
    return lines + f"{', '.join(parts)} = {made}.split([len(part) for part in {every}])\n"


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
