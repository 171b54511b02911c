"""What follows the last layer's attention, for the rows alone whose logits are read.

Looked for: a caller that gives the model's hidden states, cut to some rows, to the head; a model that runs its layers in
a loop; and a layer whose attention is the only part that looks at other rows. The rows then go in with the call: the
last layer cuts its stream behind its attention, by which time keys and values are written.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst

ROWS = "rows"  # the new parameter


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    trees = t.parse_all(sources)
    edits: dict[str, dict[cst.CSTNode, object]] = {}
    for part in (_caller, _models, _layer):
        found = part(trees)
        if isinstance(found, str):
            return {"declined": found}
        for file, new in found:
            edits.setdefault(file, {}).update(new)
    return {
        "sources": {file: t.replace(trees[file], new).code for file, new in edits.items()},
        "mechanism": "last-layer-rows",
        "title": "Behind the last layer's attention, only the rows whose logits are read",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["keys and values of every position are written", "nothing behind attention looks at other rows"],
        "params": {},
        # Fewer rows in the same kernels: no name changes, the cut itself is what a trace must show.
        "activation": {"appear": [{"row": "aten::index", "phase": "prefill", "ranks": "all"}], "vanish": []},
    }


Found = list[tuple[str, dict[cst.CSTNode, object]]] | str


def _caller(trees: dict[str, cst.Module]) -> Found:
    """`x = model(...)` then `model.compute_logits(x[rows])`, of which one has a cut that does not depend on x."""
    why = "nobody cuts the model's hidden states to the rows whose logits are wanted"
    for function in t.functions(trees):
        for node in t.walk(function.node):
            given = node.args[0].value if isinstance(node, cst.Call) and t.last_name(node.func) == "compute_logits" and len(node.args) == 1 else None
            if not isinstance(given, cst.Subscript) or not isinstance(given.value, cst.Name) or len(given.slice) != 1:
                continue
            name, cut = given.value.value, given.slice[0].slice
            made = [(s, p[1]) for s in t.walk(function.node) if (p := t.assigned(s)) and p[0] == name]
            uses = sum(isinstance(n, cst.Name) and n.value == name for n in t.walk(function.node))
            call = made[0][1] if len(made) == 1 else None
            if not isinstance(call, cst.Call) or uses != 2 or not isinstance(cut, cst.Index) or not isinstance(cut.value, cst.Attribute | cst.Name):
                why = f"{function.file}: {function.name} uses the hidden states otherwise too"
            elif t.last_name(node.func.value) != t.last_name(call.func):  # type: ignore[attr-defined]
                why = f"{function.file}: hidden states and logits in {function.name} come from different models"
            elif any(a.keyword for a in call.args):
                why = f"{function.file}: {function.name} calls the model by keywords"
            else:
                return [(function.file, {call: _with(cut.value), given: given.value})]
    return why


def _with(value: cst.BaseExpression):
    """A call with one more argument, laid out as those before it."""

    def put(call: cst.Call) -> cst.Call:
        comma = call.args[0].comma if len(call.args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        last = call.args[-1]
        return call.with_changes(args=[*call.args[:-1], last.with_changes(comma=comma), last.with_changes(value=value)])

    return put


def _parameter(function: t.Function) -> dict[cst.CSTNode, object]:
    """`rows: torch.Tensor | None = None` behind the last parameter, laid out as that one."""
    params = function.node.params.params
    comma = params[-2].comma if len(params) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    new = cst.Param(cst.Name(ROWS), cst.Annotation(cst.parse_expression("torch.Tensor | None")), equal=cst.AssignEqual(), default=cst.Name("None"))
    behind = cst.SimpleWhitespace("")

    def put(last: cst.Param) -> cst.FlattenSentinel:
        own = new.with_changes(comma=last.comma, whitespace_after_param=last.whitespace_after_param)
        return cst.FlattenSentinel([last.with_changes(comma=comma, whitespace_after_param=behind), own])

    return {params[-1]: put}


def _loop(function: t.Function) -> tuple[cst.For, cst.Call] | None:
    """`for layer, ... in ...self.layers...:` with one statement, which calls the layer; and that call."""
    for node in function.statements():
        if isinstance(node, cst.For) and "self.layers" in t.code(node.iter) and isinstance(node.body, cst.IndentedBlock) and len(node.body.body) == 1:
            names = t.names_in(node.target)
            calls = [n for n in t.walk(node.body) if isinstance(n, cst.Call) and isinstance(n.func, cst.Name) and n.func.value in names]
            if len(calls) == 1 and not any(a.keyword or a.star for a in calls[0].args):
                return node, calls[0]
    return None


def _models(trees: dict[str, cst.Module]) -> Found:
    """Every forward from the caller's model down to the one that loops over the layers takes `rows` and hands it on."""
    classes = t.classes(trees)
    inner = [c for c in classes.values() if (f := c.methods.get("forward")) and _loop(f)]
    if len(inner) != 1:
        return "no single model that runs its layers in a loop"
    forward = inner[0].methods["forward"]
    if ROWS in forward.params:
        return "the model knows the wanted rows already"
    loop, call = _loop(forward)  # type: ignore[misc]
    layer = t.code(call.func)
    choice = cst.parse_expression(f"{ROWS} if {layer} is last else None")
    edits = {**_parameter(forward), call: _with(choice), **t.before(loop, "last = self.layers[-1]\n")}
    found = [(inner[0].file, edits)]
    for cls in classes.values():
        outer = cls.methods.get("forward")
        value = t.returned(outer) if outer is not None else None
        names = [a for a, v in t.attributes_set(cls).items() if t.last_name(v) == inner[0].node.name.value]
        if outer is not None and isinstance(value, cst.Call) and names and t.code(value.func) == f"self.{names[0]}":
            found.append((cls.file, {**_parameter(outer), value: _with(cst.Name(ROWS))}))
    return found if len(found) == 2 else "no model whose forward is that loop's and nothing else"


def _layer(trees: dict[str, cst.Module]) -> Found:
    """The layer's forward: one statement with its attention, behind which nothing is looked at but its own stream."""
    classes = t.classes(trees)
    inner = next(c for c in classes.values() if (f := c.methods.get("forward")) and _loop(f))
    built = t.attributes_set(inner).get("layers")
    listed = isinstance(built, cst.Call) and t.last_name(built.func) == "ModuleList"
    layers = [c for n, c in classes.items() if listed and any(isinstance(x, cst.Call) and t.last_name(x.func) == n for x in t.walk(built))]
    if len(layers) != 1 or "forward" not in layers[0].methods:
        return "the class of the layers was not recognised"
    forward = layers[0].methods["forward"]
    loop, call = _loop(inner.methods["forward"])  # type: ignore[misc]
    carried = {n.value for x in t.walk(loop.body) if isinstance(x, cst.AssignTarget) for n in t.walk(x.target) if isinstance(n, cst.Name)}
    params = [name for name in forward.params if name != "self"]
    own = {name for name, arg in zip(params, call.args, strict=False) if t.code(arg.value) in carried}
    others = set(params) - own
    body = list(forward.statements())
    uses = [n for n, s in enumerate(body) if t.names_in(s) & others]
    if len(uses) != 1 or uses[0] == len(body) - 1:
        return f"{layers[0].node.name.value}: attention is not one statement with something behind it"
    stream = _read_first(body[uses[0] + 1 :]) - {"self", "torch", "F", "nn"}
    made = {n.value for s in body[: uses[0] + 1] for x in t.walk(s) if isinstance(x, cst.AssignTarget) for n in t.walk(x.target) if isinstance(n, cst.Name)}
    if not stream or not stream <= made | own:
        return f"{layers[0].node.name.value}: what goes on behind attention is not its stream alone"
    names = sorted(stream)
    lines = f"if {ROWS} is not None:  # the last layer: nobody reads the other rows\n    "
    lines += f"{', '.join(names)} = {', '.join(f'{n}[{ROWS}]' for n in names)}\n"
    return [(layers[0].file, {**_parameter(forward), **t.before(body[uses[0] + 1], lines)})]


def _read_first(body: list[cst.BaseStatement]) -> set[str]:
    """Names that these statements read before they assign them; called names do not count."""
    read: set[str] = set()
    known: set[str] = set()
    for statement in body:
        targets = {n.value for x in t.walk(statement) if isinstance(x, cst.AssignTarget) for n in t.walk(x.target) if isinstance(n, cst.Name)}
        values = [x.value for x in t.walk(statement) if isinstance(x, cst.Assign | cst.Return | cst.Expr) and x.value is not None]
        read |= set().union(*(t.names_in(v) for v in values)) - known if values else set()
        known |= targets
    return read
