"""Work out once per step what every layer works out again.

Two patterns, both by data flow. Inside functions that get the step's metadata object (a dataclass of tensors):
assignments whose value depends on that object alone. And rotary tables: rows looked up by position at the start
of a module's forward. Both move into a `shared` dict of the metadata object, filled by the first layer that asks.
"""

from __future__ import annotations

import re

import codemod_tools as t
import libcst as cst

PURE = {"torch", "F", "math", "int", "float", "max", "min", "len", "range", "bool", "list", "tuple", "sum"}
LAYER_NAMES = {"layer", "layer_idx", "layer_id", "layer_index", "index", "i", "idx"}


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    trees = t.parse_all(sources, "torch")
    classes = t.classes(trees)
    functions = t.functions(trees)
    steps = {
        name: c
        for name, c in classes.items()
        if c.is_dataclass and sum("Tensor" in a for a in c.fields.values()) >= 2 and any(name in f.params.values() for f in functions)
    }
    if not steps:
        return {"declined": "no dataclass of tensors is handed to the layers"}
    for name, step in steps.items():
        if "shared" in step.fields:
            return {"declined": f"{name} already shares what layers have in common"}
        edits: dict[str, dict[cst.CSTNode, object]] = {}
        done = [
            *(f"{f.cls}.{f.name}" for f in functions if _memoise(f, name, edits.setdefault(f.file, {}))),
            *_rotary(name, classes, functions, edits),
        ]
        if not done:
            continue
        _add_field(step, edits.setdefault(step.file, {}))
        changed = {file: t.replace(trees[file], new).code for file, new in edits.items() if new}
        changed[step.file] = t.add_import(cst.parse_module(changed[step.file]), "from dataclasses import field").code
        return {
            "sources": changed,
            "mechanism": "static-decode-metadata",
            "title": f"Work out once per step what each layer repeats ({', '.join(done)})",
            "predicted_us": finding.get("bound_us"),
            "invariants": [f"{name} is made anew for every step", "all layers use the same rotary tables"],
            "params": {},
            "activation": {
                "appear": [],
                "vanish": [{"row": "aten::arange", "phase": "decode", "ranks": "all", "fewer": True}],
            },
        }
    return {"declined": "no layer works out anything from the step's metadata alone"}


def _param(function: t.Function, annotation: str) -> str | None:
    return next((p for p, a in function.params.items() if a == annotation), None)


def _add_field(step: t.Class, edits: dict[cst.CSTNode, object]) -> None:
    line = "shared: dict = field(default_factory=dict)  # what the first layer works out for all of them\n"
    fields = [s for s in step.node.body.body if isinstance(s, cst.SimpleStatementLine) and isinstance(s.body[0], cst.AnnAssign)]
    last = fields[-1]
    edits[last] = lambda updated: [updated, *t.statements(line)]


# -- assignments that depend on the metadata object alone ------------------------------------------------------


def _memoise(function: t.Function, annotation: str, edits: dict[cst.CSTNode, object]) -> bool:
    """Move the invariant assignments of each block of the function; True when there were any."""
    meta = _param(function, annotation)
    if meta is None or function.cls == annotation:
        return False
    blocks = [n for n in t.walk(function.node) if isinstance(n, cst.IndentedBlock)]
    return sum(_memoise_block(block, function, meta, edits) for block in blocks) > 0  # all of them, not just the first


def _memoise_block(block: cst.IndentedBlock, function: t.Function, meta: str, edits: dict[cst.CSTNode, object]) -> bool:
    known: set[str] = set()
    chosen: list[tuple[cst.BaseStatement, str, cst.BaseExpression]] = []
    for statement in block.body:
        pair = t.assigned(statement)
        if pair is None or not _stable(pair[0], function) or not _depends_on(pair[1], {meta} | known, function):
            continue
        known.add(pair[0])
        if any(isinstance(n, cst.Call) for n in t.walk(pair[1])):
            chosen.append((statement, *pair))
        elif chosen:  # an alias after a moved value would be used before it is made
            known.discard(pair[0])
    if not chosen:
        return False
    names = ", ".join(name for _, name, _ in chosen)
    key = f'"{function.name.lstrip("_")}"'
    if len(chosen) == 1:
        lines = [f"{names} = {meta}.shared.get({key})", f"if {names} is None:"]
        lines += [f"    {names} = {meta}.shared[{key}] = {t.code(chosen[0][2])}"]
    else:
        lines = [f"shared = {meta}.shared.get({key})", "if shared is None:"]
        lines += [f"    {name} = {t.code(value)}" for _, name, value in chosen]
        lines += [f"    shared = {meta}.shared[{key}] = ({names})", f"{names} = shared"]
    edits[chosen[0][0]] = t.statements("\n".join(lines) + "\n")
    edits.update({statement: cst.RemoveFromParent() for statement, _, _ in chosen[1:]})
    return True


def _stable(name: str, function: t.Function) -> bool:
    """Assigned once in the function, and never changed in place."""
    times = 0
    for node in t.walk(function.node):
        if isinstance(node, cst.AssignTarget | cst.AugAssign | cst.AnnAssign):
            target = node.target
            if t.last_name(target) == name and not isinstance(target, cst.Attribute):
                times += 1 if isinstance(target, cst.Name) and not isinstance(node, cst.AugAssign) else 2
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and t.last_name(node.func.value) == name:
            method = node.func.attr.value
            times += 2 if method.endswith("_") and not method.endswith("__") else 0
    return times == 1


def _depends_on(value: cst.BaseExpression, allowed: set[str], function: t.Function) -> bool:
    """Only on `allowed` names, pure functions, and the device or dtype of the function's other arguments."""
    neutral = {
        id(node.value)
        for node in t.walk(value)
        if isinstance(node, cst.Attribute) and node.attr.value in ("device", "dtype") and t.last_name(node.value) in function.params
    }
    used = {n.value for n in _free(value) if id(n) not in neutral}
    return bool(used & allowed) and used <= allowed | PURE


def _free(node: cst.CSTNode) -> list[cst.Name]:
    if isinstance(node, cst.Name):
        return [node]
    if isinstance(node, cst.Attribute | cst.Arg):
        return _free(node.value)
    return [name for child in t.children(node) for name in _free(child)]


# -- rotary tables ---------------------------------------------------------------------------------------------


def _rotary(annotation: str, classes: dict[str, t.Class], functions: list[t.Function], edits: dict) -> list[str]:
    """Look rows of tables up once per step; the names of the modules that it was done for."""
    done = []
    for name in sorted(t.subclasses_of(classes, {"Module"})):
        forward = classes[name].methods.get("forward")
        lookups = _lookups(forward) if forward else None
        if forward is None or lookups is None:
            continue
        sites = _sites(name, classes, functions, annotation)
        if sites:
            _rewrite_module(forward, lookups, edits.setdefault(forward.file, {}))
            for function, statement, attribute, positions in sites:
                _rewrite_site(function, statement, attribute, positions, annotation, edits.setdefault(function.file, {}))
            done.append(name)
    return done


def _lookups(forward: t.Function) -> list[tuple[cst.BaseStatement, str, cst.BaseExpression, str]] | None:
    """Leading `name = self.table[positions]...` statements: (statement, name, rows, tail), or None.

    `rows` is the largest part of the value free of the first argument; `tail` what follows it.
    """
    params = list(forward.params)
    if len(params) != 3:
        return None
    x, positions = params[1], params[2]
    found = []
    for statement in forward.statements():
        pair = t.assigned(statement)
        if pair is None or positions not in t.names_in(pair[1]):
            break
        rows = pair[1]
        while x in t.names_in(rows) and isinstance(rows, cst.Call) and isinstance(rows.func, cst.Attribute):
            rows = rows.func.value
        whole, part = t.code(pair[1]), t.code(rows)
        if x in t.names_in(rows) or t.names_in(rows) - {"self", positions} or not whole.startswith(part):
            return None
        if not any(isinstance(n, cst.Subscript) and t.last_name(n.value) not in (x, positions) for n in t.walk(rows)):
            return None
        found.append((statement, pair[0], rows, whole[len(part) :]))
    rest = [s for s in forward.statements() if s not in [f[0] for f in found]]
    if not found or any(positions in t.names_in(s) for s in rest):
        return None
    return found


def _sites(module: str, classes: dict[str, t.Class], functions: list[t.Function], annotation: str) -> list:
    """(function, first statement that calls the module, attribute, positions argument) for each caller, or []."""
    attributes: dict[str, str] = {}
    for owner, cls in classes.items():
        handed_in = cls.methods["__init__"].params if "__init__" in cls.methods else {}
        for attribute, value in t.attributes_set(cls).items():
            if isinstance(value, cst.Call) and t.last_name(value) == module:
                if any(t.names_in(a.value) & LAYER_NAMES for a in value.args):
                    return []  # built differently per layer
                attributes[owner] = attribute
            elif isinstance(value, cst.Name) and handed_in.get(value.value) == module:
                attributes[owner] = attribute
    sites = []
    for function in functions:
        attribute = attributes.get(function.cls)
        calls = [
            n
            for n in t.walk(function.node)
            if attribute and isinstance(n, cst.Call) and isinstance(n.func, cst.Attribute) and t.code(n.func) == f"self.{attribute}"
        ]
        if not calls:
            continue
        arguments = {t.code(c.args[1].value) for c in calls if len(c.args) == 2}
        if _param(function, annotation) is None or len(arguments) != 1 or any(len(c.args) != 2 for c in calls):
            return []
        positions = arguments.pop()
        if positions not in function.params:
            return []
        first = next(s for s in function.statements() if any(n is calls[0] for n in t.walk(s)))
        sites.append((function, first, attribute, positions))
    return sites


def _rewrite_module(forward: t.Function, lookups: list, edits: dict[cst.CSTNode, object]) -> None:
    positions = list(forward.params)[2]
    names = ", ".join(name for _, name, _, _ in lookups)
    rows = ", ".join(t.code(rows) for _, _, rows, _ in lookups)
    head = [f"{names} = rows"] if len(lookups) > 1 else [f"({names},) = rows"]
    head += [f"{name} = {name}{tail}" for _, name, _, tail in lookups if tail]
    edits[lookups[0][0]] = t.statements("\n".join(head) + "\n")
    edits.update({s: cst.RemoveFromParent() for s, *_ in lookups[1:]})
    doc = forward.node.body.body[0] if forward.node.get_docstring() else None
    if isinstance(doc, cst.SimpleStatementLine):
        text = re.sub(rf"\b{positions}\b( \[T\])?", "rows from `lookup`", t.code(doc).strip())
        edits[doc] = t.statements(text)
    method = cst.parse_statement(
        f"def lookup(self, {positions}: torch.Tensor) -> tuple[torch.Tensor, ...]:\n"
        f'    """Rows of the tables for {positions} [T]; the same for all heads and layers of a step."""\n'
        f"    return {rows}{',' if len(lookups) == 1 else ''}\n"
    )
    parameter = forward.node.params.params[2]
    edits[parameter] = parameter.with_changes(
        name=cst.Name("rows"), annotation=cst.Annotation(cst.parse_expression("tuple[torch.Tensor, ...]"))
    )

    def put(updated: cst.FunctionDef) -> list[cst.CSTNode]:
        new = cst.ensure_type(method, cst.FunctionDef).with_changes(leading_lines=updated.leading_lines)
        return [new, updated.with_changes(leading_lines=[cst.EmptyLine(indent=False)])]

    edits[forward.node] = put


def _rewrite_site(function: t.Function, first: cst.CSTNode, attribute: str, positions: str, annotation: str, edits: dict) -> None:
    meta = _param(function, annotation)
    for node in t.walk(function.node):
        if isinstance(node, cst.Call) and t.code(node.func) == f"self.{attribute}":
            argument = node.args[1]
            edits[argument] = argument.with_changes(value=cst.Name("rows"))
    edits.update(
        t.before(
            first,
            f'rows = {meta}.shared.get("{attribute}")\nif rows is None:\n'
            f'    rows = {meta}.shared["{attribute}"] = self.{attribute}.lookup({positions})\n',
        )
    )
