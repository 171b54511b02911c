"""Compute logits of the last position only, where nobody looks at the others.

Two forms. A model whose forward ends in an output head, every caller of which takes `[:, -1]` of what it returns: the
head gets the last position alone. A caller of a transformers model that only uses `.logits[:, -1]`: it asks for one.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst

MODEL_NAMES = {"model", "_model", "net", "llm", "transformer", "language_model"}
LAST = {"[:,-1]", "[:,-1,:]"}
OTHER_RESULTS = {"past_key_values", "cache"}


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    trees = t.parse_all(sources)
    why = "no output head behind which only the last position is used"
    for form in (_asked_for, _in_the_head):
        edits = form(trees)
        if isinstance(edits, str):
            why = edits
        elif edits:
            return _patch(trees, edits, finding)
    return {"declined": why}


def _patch(trees: dict[str, cst.Module], edits: dict[str, dict[cst.CSTNode, object]], finding: dict) -> dict:
    return {
        "sources": {file: t.replace(trees[file], new).code for file, new in edits.items()},
        "mechanism": "prefill-path",
        "title": "Logits of the last position of a prompt only",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["nobody outside these sources looks at logits of other positions"],
        "params": {},
        # The head's product has one row a request: its shape changes in a trace of a prefill step, no name does.
        "activation": {"appear": [{"row": "aten::slice", "phase": "prefill", "ranks": "all"}], "vanish": []},
    }


def _calls(function: t.Function) -> list[cst.Call]:
    return [n for n in t.walk(function.node) if isinstance(n, cst.Call) and t.last_name(n.func) in MODEL_NAMES]


# -- a caller of a transformers model ------------------------------------------------------------------------------


def _asked_for(trees: dict[str, cst.Module]) -> dict[str, dict[cst.CSTNode, object]]:
    """`out = self.model(input_ids=...)` of which only `.logits[:, -1]` and the cache are used: one logit is asked for."""
    found: dict[str, dict[cst.CSTNode, object]] = {}
    for file, tree in trees.items():
        if not any(name.startswith("transformers.") for name in t.imports(tree).values()):
            continue
        for function in t.functions({file: tree}):
            for call in _calls(function):
                keywords = {a.keyword.value for a in call.args if a.keyword}
                if "input_ids" in keywords and not keywords & {"logits_to_keep", "labels"} and _only_last_logits(function, call):
                    found.setdefault(file, {})[call] = _asking
    return found


def _only_last_logits(function: t.Function, call: cst.Call) -> bool:
    """Every use of the name that the call's result gets, up to its next assignment, is of the last logits or the cache."""
    made = [n for n in t.walk(function.node) if (p := t.assigned(n)) and p[1] is call]
    if len(made) != 1:
        return False
    name = t.assigned(made[0])[0]  # type: ignore[index]
    if sum(1 for n in t.walk(function.node) if (p := t.assigned(n)) and p[0] == name) != 1:
        return False
    fine: set[int] = set()
    logits = 0
    for node in t.walk(function.node):
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == name and node.attr.value in OTHER_RESULTS:
            fine.add(id(node.value))
        elif isinstance(node, cst.Subscript) and t.code(node.value) == f"{name}.logits" and _brackets(node) in LAST:
            fine.add(id(node.value.value))  # type: ignore[attr-defined]
            logits += 1
    uses = [n for n in t.walk(function.node) if isinstance(n, cst.Name) and n.value == name and id(n) not in {id(x) for x in t.walk(made[0])}]
    return logits > 0 and all(id(n) in fine for n in uses)


def _brackets(node: cst.Subscript) -> str:
    return t.code(node)[len(t.code(node.value)) :].replace(" ", "")


def _asking(updated: cst.Call) -> cst.Call:
    """The call with `logits_to_keep=1`, laid out as its other arguments are."""
    last = updated.args[-1]
    one = last.with_changes(keyword=cst.Name("logits_to_keep"), value=cst.Integer("1"), star="", equal=last.equal if last.keyword else cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")))
    between = updated.args[0].comma if len(updated.args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return updated.with_changes(args=[*updated.args[:-1], last.with_changes(comma=between), one])


# -- a head of one's own -------------------------------------------------------------------------------------------


def _in_the_head(trees: dict[str, cst.Module]) -> dict[str, dict[cst.CSTNode, object]] | str:
    """The one head whose logits every caller cuts to the last position; a reason where a caller wants more."""
    known = t.classes(trees)
    makers = {f.name: f for f in t.functions(trees) if not f.cls}
    modules = t.subclasses_of(known, {"Module"})
    heads = [(known[n], head) for n in sorted(modules) if (head := _head(known[n], known, makers)) is not None]
    heads = [(cls, head) for cls, head in heads if not any(_builds(known[n], cls.node.name.value) for n in modules)]
    if len(heads) != 1:
        return {}
    callers = [(f, c) for f in t.functions(trees) if f.cls not in modules for c in _calls(f)]
    if not callers:
        return "nothing here calls the model, so nobody knows which logits are wanted"
    for function, call in callers:
        if not any(isinstance(n, cst.Subscript) and n.value is call and _brackets(n) in LAST for n in t.walk(function.node)):
            return f"{function.file}: {function.name} takes logits of all positions"
    cls, head = heads[0]
    given = head.args[0]
    if _brackets_of(given.value).endswith("[:,-1:]"):
        return "the head gets the last position alone already"
    return {cls.file: {given: given.with_changes(value=cst.parse_expression(f"{_wrapped(given.value)}[:, -1:]"))}}


def _head(cls: t.Class, known: dict[str, t.Class], makers: dict[str, t.Function]) -> cst.Call | None:
    """The call of a linear layer that forward returns, directly or by a name; None without an embedding in the class."""
    forward = cls.methods.get("forward")
    built = t.attributes_set(cls)
    if forward is None or not any(t.last_name(v) == "Embedding" for v in built.values()):
        return None
    body = list(forward.statements())
    last = body[-1] if body else None
    small = last.body[0] if isinstance(last, cst.SimpleStatementLine) else None
    value = small.value if isinstance(small, cst.Return) else None
    if isinstance(value, cst.Name):
        pair = t.assigned(body[-2]) if len(body) > 1 else None
        value = pair[1] if pair is not None and pair[0] == value.value else None
    if not isinstance(value, cst.Call) or not value.args or value.args[0].keyword or value.args[0].star:
        return None
    own = t.code(value.func).removeprefix("self.")
    if t.last_name(value.func) == "linear_by_columns" and len(value.args) == 2:  # as weight-layout leaves it
        own = t.code(value.args[1].value).removeprefix("self.").removesuffix(".weight")
    return value if own in built and t.bias_of_linear(built[own], known, makers) is not None else None


def _builds(cls: t.Class, name: str) -> bool:
    return any(isinstance(n, cst.Call) and t.last_name(n.func) == name for n in t.walk(cls.node))


def _brackets_of(value: cst.BaseExpression) -> str:
    return t.code(value).replace(" ", "")


def _wrapped(value: cst.BaseExpression) -> str:
    return t.code(value) if isinstance(value, cst.Name | cst.Call | cst.Attribute | cst.Subscript) else f"({t.code(value)})"
