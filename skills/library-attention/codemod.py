"""Replace attention that is written out (scores, mask, softmax, weighted sum) by torch's one operator.

Recognises the arithmetic by data flow in a function's straight-line statements: softmax of scaled and masked
`q @ k^T`, times `v`. Key and value heads that are repeated for grouped queries only for this are no longer repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import codemod_tools as t
import libcst as cst

TRANSPOSED = {"transpose(2,3)", "transpose(3,2)", "transpose(-2,-1)", "transpose(-1,-2)"}
INFINITE = {"-torch.inf", "float('-inf')", 'float("-inf")', "-math.inf", "-float('inf')", '-float("inf")'}


@dataclass
class _Found:
    """One attention: what goes in, the node that it replaces, the statements that are no longer needed."""

    query: str = ""
    key: str = ""
    value: str = ""
    mask: str | None = None
    scale: str = "1.0"
    grouped: bool = False
    gone: list[cst.CSTNode] = field(default_factory=list)


class _Unlike(Exception):
    """The expression is not what this skill knows."""


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for all of them; see the module docstring."""
    trees = t.parse_all(sources, "softmax")
    changed: dict[str, str] = {}
    done: list[str] = []
    for file, tree in trees.items():
        edits: dict[cst.CSTNode, object] = {}
        for function in t.functions({file: tree}):
            for node, found in _attentions(function):
                edits[node] = _call(found)
                edits.update(dict.fromkeys(found.gone, cst.RemoveFromParent()))
                done.append(f"{function.cls}.{function.name}".lstrip("."))
        if edits:
            changed[file] = t.with_torch_names(t.replace(tree, edits), ("F",)).code
    if not changed:
        return {"declined": "no softmax of scaled, masked q k^T times v that only this product uses"}
    if len(changed) > 3:
        return {"declined": f"attention is written out in {len(changed)} files; more than one patch may touch"}
    return {
        "sources": changed,
        "mechanism": "library-attention",
        "title": f"Let torch compute attention in one operator ({', '.join(done)})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["the mask hides the same positions", "no row of it hides all", "sums run in another order"],
        "params": {},
        "activation": {
            "appear": [{"row": "aten::scaled_dot_product_attention", "phase": "decode", "ranks": "all"}],
            "vanish": [{"row": "aten::softmax", "phase": "decode", "ranks": "all", "fewer": True}],
        },
    }


def _attentions(function: t.Function) -> list[tuple[cst.CSTNode, _Found]]:
    body = list(function.statements())
    found = []
    for at, statement in enumerate(body):
        for node in t.walk(statement) if isinstance(statement, cst.SimpleStatementLine) else ():
            sides = _product(node)
            if sides is None:
                continue
            try:
                found.append((node, _attention(body, at, sides)))
            except _Unlike:
                continue
    return found


def _product(node: cst.CSTNode) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Operands of `a @ b` or `torch.matmul(a, b)`."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
        return node.left, node.right
    if isinstance(node, cst.Call) and t.code(node.func) == "torch.matmul" and len(node.args) == 2 and not any(a.keyword or a.star for a in node.args):
        return node.args[0].value, node.args[1].value
    return None


def _attention(body: list[cst.BaseStatement], at: int, sides: tuple[cst.BaseExpression, cst.BaseExpression]) -> _Found:
    """What `weights @ v` in body[at] computes. Raises _Unlike."""
    found = _Found(value=_name(sides[1]))
    chain = _Chain(body, at, found)
    scores = _softmax_of(chain.resolve(sides[0]))
    scales: list[str] = []
    while True:
        scores = chain.resolve(scores)
        if (product := _product(scores)) is not None:
            break
        scores = _peeled(scores, found, scales)
    if len(scales) > 1:
        raise _Unlike
    found.scale = scales[0] if scales else "1.0"
    found.query, found.key = _name(product[0]), _transposed(product[1])
    repeats = [chain.repeat_of(name) for name in (found.key, found.value)]
    if all(repeats) and len({r[1] for r in repeats if r}) == 1:
        found.grouped = True
        found.gone += [r[0] for r in repeats if r]
    chain.check({found.query, found.key, found.value, *([found.mask] if found.mask else [])})
    return found


class _Chain:
    """The statements that lead to body[at], looked at backwards."""

    def __init__(self, body: list[cst.BaseStatement], at: int, found: _Found) -> None:
        self.body, self.at, self.found = body, at, found

    def resolve(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """What a local name was last set to, that assignment to be removed; other expressions as they are."""
        while isinstance(value, cst.Name):
            place = self._set(value.value, min([self.at, *(self.body.index(g) for g in self.found.gone)]))  # type: ignore[arg-type]
            if place is None:
                raise _Unlike
            self.found.gone.append(self.body[place])
            value = t.assigned(self.body[place])[1]  # type: ignore[index]
        return value

    def _set(self, name: str, before: int) -> int | None:
        """The index of the plain assignment that `name` has there; None where something else may have set it."""
        for n in range(before - 1, -1, -1):
            if (pair := t.assigned(self.body[n])) is not None and pair[0] == name:
                return n
            if any(isinstance(x, cst.Name) and x.value == name for x in t.walk(self.body[n])):
                return None
        return None

    def repeat_of(self, name: str) -> tuple[cst.BaseStatement, str] | None:
        """(statement, count) of `name = name.repeat_interleave(count, dim=1)` that nothing else follows."""
        for n in range(self.at - 1, -1, -1):
            if self.body[n] in self.found.gone:
                continue
            pair = t.assigned(self.body[n])
            if pair is not None and pair[0] == name:
                call = pair[1]
                given = t.arguments(call) if isinstance(call, cst.Call) else None
                if not given or t.code(call.func) != f"{name}.repeat_interleave":  # type: ignore[attr-defined]
                    return None
                count, axis = given.get(0, given.get("repeats")), given.get("dim", given.get(1))
                return (self.body[n], t.code(count)) if count is not None and axis is not None and t.code(axis) in ("1", "-3") else None
            if any(isinstance(x, cst.Name) and x.value == name for x in t.walk(self.body[n])):
                return None
        return None

    def check(self, inputs: set[str]) -> None:
        """What is removed is used nowhere else, and the inputs keep their values up to the end. Raises _Unlike."""
        first = min(self.body.index(g) for g in self.found.gone)  # type: ignore[arg-type]
        made = {t.assigned(g)[0] for g in self.found.gone} - inputs  # type: ignore[index]
        for n, statement in enumerate(self.body[first:], first):
            if statement in self.found.gone:
                continue
            names = [x.value for x in t.walk(statement) if isinstance(x, cst.Name)]
            uses = sum(names.count(name) for name in made)
            if (n == self.at and uses > 1) or (n != self.at and uses):
                raise _Unlike
            if n < self.at and (pair := t.assigned(statement)) is not None and pair[0] in inputs:
                raise _Unlike
            if n >= self.at and self.found.grouped and any(names.count(x) > (n == self.at and x == self.found.value) for x in (self.found.key, self.found.value)):
                raise _Unlike  # the repeated heads are wanted elsewhere


def _name(node: cst.BaseExpression) -> str:
    if not isinstance(node, cst.Name):
        raise _Unlike
    return node.value


def _softmax_of(node: cst.BaseExpression) -> cst.BaseExpression:
    """The argument of a softmax over the last dimension in the type that it has."""
    given = t.arguments(node) if isinstance(node, cst.Call) else None
    if not given or not isinstance(node, cst.Call) or t.last_name(node.func) != "softmax" or set(given) - {0, 1, "dim"}:
        raise _Unlike
    free = t.code(node.func) in ("torch.softmax", "F.softmax", "nn.functional.softmax", "torch.nn.functional.softmax")
    axis = given.get("dim", given.get(1 if free else 0))
    if axis is None or t.code(axis) != "-1" or not isinstance(node.func, cst.Attribute):
        raise _Unlike
    return given[0] if free else node.func.value


def _peeled(node: cst.BaseExpression, found: _Found, scales: list[str]) -> cst.BaseExpression:
    """The expression below one scaling or one mask, which is noted. Raises _Unlike."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide | cst.Multiply):
        factor = t.code(node.right)
        scales.append(f"1.0 / {factor}" if isinstance(node.operator, cst.Divide) else factor)
        if any(isinstance(x, cst.Call) for x in t.walk(node.right)):
            raise _Unlike
        return node.left
    given = t.arguments(node) if isinstance(node, cst.Call) else None
    fills = given and isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "masked_fill"
    if fills and found.mask is None and set(given) == {0, 1} and t.code(given[1]) in INFINITE:
        found.mask = _name(given[0])
        return node.func.value
    raise _Unlike


def _transposed(node: cst.BaseExpression) -> str:
    """k of `k.transpose(2, 3)` and its other spellings."""
    if isinstance(node, cst.Attribute) and node.attr.value == "mT":
        return _name(node.value)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and t.code(node).replace(" ", "").endswith(tuple(f".{x}" for x in TRANSPOSED)):
        return _name(node.func.value)
    raise _Unlike


def _call(found: _Found) -> cst.BaseExpression:
    parts = [found.query, found.key, found.value]
    parts += [f"attn_mask=~{found.mask}"] if found.mask else []
    parts += [f"scale={found.scale}", *(["enable_gqa=True"] if found.grouped else [])]
    return cst.parse_expression(f"F.scaled_dot_product_attention({', '.join(parts)})")
