"""Let every rank take the greedy token itself instead of waiting for rank 0 to broadcast it.

Looks for: a method in which rank 0 samples and all others receive; a sampler that returns the plain argmax when
all sequences are greedy; and the plan that rank 0 sends to every rank, built where the sequences are known. The
plan then says whether the step is greedy. Gathered logits are the same bits on every rank, so the tokens are too.
"""

from __future__ import annotations

from dataclasses import dataclass

import codemod_tools as t
import libcst as cst

MAX_FILES = 3


@dataclass(frozen=True)
class _Caller:
    """`tokens = self.<sample>(logits, sequences)` in a function that also gets the plan."""

    function: t.Function
    statement: cst.BaseStatement
    target: str
    call: cst.Call
    plan: str  # parameter
    plan_class: str


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    trees = t.parse_all(sources)
    functions, classes = t.functions(trees), t.classes(trees)
    shared = next((f for f in functions if _samples_on_rank_0(f)), None)
    if shared is None:
        return {"declined": "no method in which rank 0 samples and broadcasts"}
    if any(c.is_dataclass and c.fields.get("greedy") == "bool" for c in classes.values()):
        return {"declined": "the plan already says whether a step is greedy"}
    condition = _greedy_condition(shared, functions)
    if condition is None:
        return {"declined": "the sampler has no exit that returns the plain argmax for greedy sequences"}
    caller = _caller(shared, functions, classes)
    if caller is None:
        return {"declined": "the sampling method's caller does not get a plan that all ranks share"}
    site = _plan_site(caller.plan_class, functions)
    if site is None:
        return {"declined": f"no place that builds {caller.plan_class} beside its list of sequences"}
    imports = _imports(condition, shared, functions, trees)
    if imports is None:
        return {"declined": f"the sampler's condition ({condition}) uses names that cannot be imported"}
    edits: dict[str, dict[cst.CSTNode, object]] = {}
    _add_field(classes[caller.plan_class], edits.setdefault(classes[caller.plan_class].file, {}))
    _fill(*site, condition, edits.setdefault(site[0].file, {}))
    logits = t.code(caller.call.args[0].value)
    value = cst.parse_expression(f"{logits}.argmax(dim=-1).tolist() if {caller.plan}.greedy else {t.code(caller.call)}")
    edits.setdefault(caller.function.file, {})[caller.call] = value
    if len(edits) > MAX_FILES:
        return {"declined": f"plan, scheduler and runner are {len(edits)} files; more than one patch may touch"}
    changed = {file: t.replace(trees[file], new) for file, new in edits.items()}
    for line in imports:
        changed[site[0].file] = t.add_import(changed[site[0].file], line)
    return {
        "sources": {file: tree.code for file, tree in changed.items()},
        "mechanism": "device-side-sampling",
        "title": "Every rank takes the greedy token itself",
        "predicted_us": None if finding.get("bound_us") is None else 0.1 * finding["bound_us"],
        "invariants": ["gathered logits are the same bits on every rank", "steps with a sampled or length-bound request still ask rank 0"],
        "params": {},
        "activation": {
            "appear": [{"row": "aten::argmax", "phase": "decode", "ranks": "all"}],
            "vanish": [{"row": "*broadcast*", "phase": "decode", "ranks": "all"}],
        },
    }


def _samples_on_rank_0(function: t.Function) -> bool:
    """`if ...rank == 0: T = sample(...) else: T = torch.empty(...)`, then something broadcasts T."""
    for statement in function.statements():
        if not isinstance(statement, cst.If) or t.code(statement.test).replace(" ", "").rpartition(".")[2] != "rank==0":
            continue
        other = statement.orelse.body if isinstance(statement.orelse, cst.Else) else None
        if not isinstance(statement.body, cst.IndentedBlock) or not isinstance(other, cst.IndentedBlock):
            continue
        one = t.assigned(statement.body.body[-1])
        two = t.assigned(other.body[-1])
        if not one or not two or one[0] != two[0] or not isinstance(one[1], cst.Call) or not t.code(two[1]).startswith("torch."):
            continue
        for node in t.walk(function.node):
            if isinstance(node, cst.Call) and t.last_name(node.func) == "broadcast" and node.args and t.code(node.args[0].value) == one[0]:
                return True
    return False


def _sampler(shared: t.Function, functions: list[t.Function]) -> t.Function | None:
    for node in t.walk(shared.node):
        if isinstance(node, cst.If) and isinstance(node.body, cst.IndentedBlock):
            pair = t.assigned(node.body.body[-1])
            if pair and isinstance(pair[1], cst.Call):
                found = [f for f in functions if not f.cls and f.name == t.last_name(pair[1].func)]
                return found[0] if len(found) == 1 else None
    return None


def _greedy_condition(shared: t.Function, functions: list[t.Function]) -> str | None:
    """An expression of `s` that holds for a sequence whose token is the argmax of the raw logits."""
    sampler = _sampler(shared, functions)
    if sampler is None:
        return None
    logits = next(iter(sampler.params))
    values = {p[0]: p[1] for s in sampler.statements() if (p := t.assigned(s))}
    for statement in sampler.statements():
        condition = _all_of(statement)
        if condition is None:
            continue
        returned = t.code(statement.body.body[0].body[0].value)  # type: ignore[attr-defined]
        chosen = values.get(returned)
        if chosen is None or t.code(chosen) != f"{logits}.argmax(dim=-1)":
            return None
        before = values.get(logits)  # what was done to the logits before
        untouched = before is None or t.code(before) in (logits, f"{logits}.float()")
        exempt = None if untouched else _touched_when(before, functions)
        if not untouched and exempt is None:
            return None
        return condition if exempt is None else f"{condition} and not ({exempt})"
    return None


def _imports(condition: str, shared: t.Function, functions: list[t.Function], trees: dict[str, cst.Module]) -> list[str] | None:
    """Import lines for the sampler's module constants that the condition uses; None when a name is something else."""
    sampler = _sampler(shared, functions)
    assert sampler is not None
    constants = {p[0] for s in trees[sampler.file].body if (p := t.assigned(s))}
    free = t.names_in(cst.parse_expression(condition)) - {"s", "len", "min", "max", "any", "all", "bool", "int", "float"}
    module = sampler.file.removesuffix(".py").replace("/", ".")
    return [f"from {module} import {name}" for name in sorted(free)] if free <= constants else None


def _all_of(statement: cst.CSTNode) -> str | None:
    """The element condition of `if all(condition for s in sequences): return name`, spelt with `s`."""
    if not isinstance(statement, cst.If) or not isinstance(statement.test, cst.Call) or t.code(statement.test.func) != "all":
        return None
    body = statement.body.body[0] if isinstance(statement.body, cst.IndentedBlock) else None
    returns = isinstance(body, cst.SimpleStatementLine) and isinstance(body.body[0], cst.Return)
    return _element(statement.test.args[0].value) if returns else None


def _element(node: cst.BaseExpression) -> str | None:
    """The element of a comprehension over one loop without conditions, its variable renamed `s`."""
    if not isinstance(node, cst.GeneratorExp | cst.ListComp) or node.for_in.ifs or node.for_in.inner_for_in is not None:
        return None
    variable = t.code(node.for_in.target)
    elt = node.elt.visit(_Rename(variable))
    return t.code(elt) if isinstance(elt, cst.BaseExpression) else None


class _Rename(cst.CSTTransformer):
    def __init__(self, old: str) -> None:
        super().__init__()
        self.old = old

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return updated_node.with_changes(value="s") if original_node.value == self.old else updated_node

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        return None


def _touched_when(value: cst.BaseExpression, functions: list[t.Function]) -> str | None:
    """For logits = f(logits, sequences, ...): the element condition under which f changes anything, or None.

    f must begin with `flags = [condition for s in sequences]` and `if not any(flags)...: return logits`.
    """
    if not isinstance(value, cst.Call):
        return None
    found = [f for f in functions if not f.cls and f.name == t.last_name(value.func)]
    if len(found) != 1 or len(found[0].statements()) < 2:
        return None
    first, second = found[0].statements()[:2]
    pair = t.assigned(first)
    if pair is None or not isinstance(second, cst.If) or not t.code(second.test).startswith(f"not any({pair[0]})"):
        return None
    if " and " in t.code(second.test):  # then it could change logits although no flag is set
        return None
    body = second.body.body[0] if isinstance(second.body, cst.IndentedBlock) else None
    if not isinstance(body, cst.SimpleStatementLine) or t.code(body).strip() != f"return {next(iter(found[0].params))}":
        return None
    return _element(pair[1])


def _caller(shared: t.Function, functions: list[t.Function], classes: dict[str, t.Class]) -> _Caller | None:
    found = []
    for function in functions:
        if function.cls != shared.cls:
            continue
        plans = [(p, a) for p, a in function.params.items() if a in classes and classes[a].is_dataclass]
        for statement in function.statements():
            pair = t.assigned(statement)
            if pair and isinstance(pair[1], cst.Call) and t.code(pair[1].func) == f"self.{shared.name}" and len(plans) == 1:
                found.append(_Caller(function, statement, pair[0], pair[1], *plans[0]))
    return found[0] if len(found) == 1 else None


def _plan_site(plan_class: str, functions: list[t.Function]) -> tuple[t.Function, cst.Call, str] | None:
    """(function, call, expression of all sequences) where the plan is built by keywords and returned with them."""
    for function in functions:
        values = {p[0]: p[1] for s in function.statements() if (p := t.assigned(s))}
        for name, value in values.items():
            if not isinstance(value, cst.Call) or t.last_name(value.func) != plan_class:
                continue
            if any(a.keyword is None for a in value.args):
                continue
            last = function.statements()[-1]
            small = last.body[0] if isinstance(last, cst.SimpleStatementLine) else None
            if not isinstance(small, cst.Return) or not isinstance(small.value, cst.Tuple) or len(small.value.elements) != 2:
                continue
            one, two = (t.code(e.value) for e in small.value.elements)
            if one == name and two in values and all(isinstance(n, cst.Name | cst.BinaryOperation | cst.Add | cst.SimpleWhitespace) for n in t.walk(values[two])):
                return function, value, t.code(values[two])
    return None


def _add_field(cls: t.Class, edits: dict[cst.CSTNode, object]) -> None:
    fields = [s for s in cls.node.body.body if isinstance(s, cst.SimpleStatementLine) and isinstance(s.body[0], cst.AnnAssign)]
    line = "greedy: bool = False  # every token is the argmax of its logits: no rank needs to ask another\n"
    edits[fields[-1]] = lambda updated: [updated, *t.statements(line)]


def _fill(function: t.Function, call: cst.Call, every: str, condition: str, edits: dict[cst.CSTNode, object]) -> None:
    value = f"all({condition} for s in {every})"
    last = call.args[-1]
    new = last.with_changes(keyword=cst.Name("greedy"), value=cst.parse_expression(value))
    comma = call.args[0].comma if len(call.args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    args = [*call.args[:-1], last.with_changes(comma=comma, whitespace_after_arg=call.args[0].whitespace_after_arg), new]
    edits[call] = call.with_changes(args=args)
