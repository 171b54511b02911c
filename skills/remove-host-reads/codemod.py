"""Give layers host copies of numbers that the step's lists already held, instead of reading tensors back.

Data flow: a dataclass of tensors is built in one place from Python lists (`field=torch.tensor(list)`, or a method
that does just that), and read back elsewhere (`m.field.max().item()`, `m.field.tolist()`, the largest difference
of neighbours). Each read becomes a field of its own, filled from the list. Where no such dataclass is, a loop that reads a
tensor in every round only to collect the numbers reads them together, once. Other reads are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import codemod_tools as t
import libcst as cst

PURE_CALLS = {"range", "len", "zip", "sorted", "enumerate", "max", "min", "sum", "list", "int", "tuple"}
CONSTRUCTORS = {"torch.tensor", "torch.as_tensor", "torch.IntTensor", "torch.LongTensor"}


@dataclass(frozen=True)
class _Read:
    """One host read: which field, what is wanted of it, and the node that reads."""

    function: t.Function
    meta: str  # the parameter that holds the dataclass
    field: str
    kind: str  # max, min, sum, list, gap
    node: cst.BaseExpression

    @property
    def name(self) -> str:
        return {"list": f"{self.field}_list", "gap": f"max_{self.field}_gap"}.get(self.kind, f"{self.kind}_{self.field}")

    def value(self, host: str) -> str:
        if self.kind == "list":
            return host
        if self.kind == "gap":
            return f"max((b - a for a, b in zip({host}, {host}[1:], strict=False)), default=0)"
        return f"sum({host})" if self.kind == "sum" else f"{self.kind}({host}, default=0)"


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for one dataclass; see the module docstring."""
    trees = t.parse_all(sources)
    functions = t.functions(trees)
    why = "no host read of a tensor that was built from a list"
    for name, cls in t.classes(trees).items():
        if not cls.is_dataclass or not any("Tensor" in a for a in cls.fields.values()):
            continue
        reads = [r for f in functions for r in _reads(f, name, cls)]
        if not reads:
            continue
        sites = _sites(name, functions)
        if not sites:
            why = f"{name} is not built by keywords in any function"
            continue
        hosts = {r.field: [_host_list(r.field, call, function, trees, functions) for function, call in sites] for r in reads}
        usable = [r for r in reads if all(hosts[r.field])]
        if not usable:
            why = f"what {name} holds is not built from lists: a read once per step is the best to be had"
            continue
        return _patch(name, cls, usable, sites, hosts, trees, finding)
    for function in functions:
        if (edits := _once_after_the_loop(function)) is not None:
            read = {function.file: t.replace(trees[function.file], edits).code}
            return _answer(read, f"Read the tokens of {function.name} once, after its loop", "the loop's other statements do not look at what is read", finding)
    return {"declined": why}


def _patch(name: str, cls: t.Class, reads: list[_Read], sites: list, hosts: dict, trees: dict, finding: dict) -> dict:
    edits: dict[str, dict[cst.CSTNode, object]] = {}
    for read in reads:
        edits.setdefault(read.function.file, {})[read.node] = cst.parse_expression(f"{read.meta}.{read.name}")
    wanted = {r.name: r for r in reads}
    _add_fields(cls, list(wanted.values()), edits.setdefault(cls.file, {}))
    for n, (function, call) in enumerate(sites):
        lists = {field: found[n] for field, found in hosts.items()}
        _fill(function, call, list(wanted.values()), lists, edits.setdefault(function.file, {}))
    changed = {file: t.replace(trees[file], new).code for file, new in edits.items()}
    title = f"Keep host copies of what layers read back ({', '.join(sorted(wanted))})"
    return _answer(changed, title, f"{name} is built from the very lists that its tensors are built from", finding)


def _answer(changed: dict[str, str], title: str, invariant: str, finding: dict) -> dict:
    return {
        "sources": changed,
        "mechanism": "remove-host-reads",
        "title": title,
        "predicted_us": finding.get("bound_us"),
        "invariants": [invariant],
        "params": {},
        "activation": {
            "appear": [],
            "vanish": [{"row": "aten::item", "phase": "decode", "ranks": "all", "fewer": True}],
        },
    }


# -- one read after a loop instead of one in every round ------------------------------------------------------------


def _once_after_the_loop(function: t.Function) -> dict[cst.CSTNode, object] | None:
    """`for ...: v = x.item(); found.append(v)` with v used for nothing else: the tensors are kept and read together."""
    for loop in t.walk(function.node):
        if not isinstance(loop, cst.For) or not isinstance(loop.body, cst.IndentedBlock):
            continue
        for statement in loop.body.body:
            pair = t.assigned(statement)
            if pair is None or not t.code(pair[1]).endswith(".item()") or not isinstance(pair[1], cst.Call):
                continue
            name, read = pair[0], pair[1]
            appends = [s for s in loop.body.body if t.code(s).strip().endswith(f".append({name})")]
            target = t.code(appends[0]).strip().removesuffix(f".append({name})") if len(appends) == 1 else ""
            named = [n.value for n in t.walk(function.node) if isinstance(n, cst.Name)]
            in_loop = [n.value for n in t.walk(loop) if isinstance(n, cst.Name)]
            empty = any(p[0] == target and t.code(p[1]) == "[]" for n in t.walk(function.node) if (p := t.assigned(n)))
            if not empty or named.count(name) != 2 or in_loop.count(target) != 1 or any(isinstance(n, cst.Break | cst.Return) for n in t.walk(loop)):
                continue
            line = f"{target} = torch.cat([value.reshape(1) for value in {target}]).tolist() if {target} else []\n"
            return {read: read.func.value, loop: lambda updated, line=line: [updated, *t.statements(line)]}  # type: ignore[attr-defined]
    return None


# -- finding reads ---------------------------------------------------------------------------------------------


def _reads(function: t.Function, name: str, cls: t.Class) -> list[_Read]:
    meta = next((p for p, a in function.params.items() if a == name), None)
    if meta is None or function.cls == name:
        return []
    alias = {meta + "." + f: f for f in cls.fields}
    for node in t.walk(function.node):
        pair = t.assigned(node)
        if pair and t.code(pair[1]) in alias and t.last_name(pair[1]) in cls.fields:
            alias[pair[0]] = t.last_name(pair[1])
    found: list[_Read] = []
    inside: set[int] = set()
    for node in t.walk(function.node):
        if id(node) in inside or not isinstance(node, cst.Call):
            continue
        match = _match(node, alias)
        if match is not None:
            found.append(_Read(function, meta, match[0], match[1], node))
            inside.update(id(x) for x in t.walk(node))
    return found


def _match(node: cst.Call, alias: dict[str, str]) -> tuple[str, str] | None:
    """(field, kind) of a read such as int(x.max().item()), x.max().item(), x.tolist()."""
    text = t.code(node).replace(" ", "")
    if text.startswith("int(") and text.endswith(")"):
        text = text[4:-1]
        text = text.removesuffix(".item()") + ".item()"  # int() of a tensor reads it as well
    for spelling, field in alias.items():
        x = spelling.replace(" ", "")
        if text == f"{x}.tolist()":
            return field, "list"
        if text == f"({x}[1:]-{x}[:-1]).max().item()":
            return field, "gap"
        for kind in ("max", "min", "sum"):
            if text == f"{x}.{kind}().item()":
                return field, kind
    return None


# -- the place that builds the object --------------------------------------------------------------------------


def _sites(name: str, functions: list[t.Function]) -> list[tuple[t.Function, cst.Call]]:
    """Every call of the dataclass; [] when one of them uses positions or unpacking."""
    found = []
    for function in functions:
        for node in t.walk(function.node):
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Name | cst.Attribute) and t.last_name(node.func) == name:
                arguments = t.arguments(node)
                if arguments is None or any(isinstance(k, int) for k in arguments):
                    return []
                found.append((function, node))
    return found


def _host_list(field: str, call: cst.Call, function: t.Function, trees: dict, functions: list[t.Function]) -> cst.BaseExpression | None:
    """The list that the field's tensor is built from at this call, when reading it again is harmless."""
    value = (t.arguments(call) or {}).get(field)
    if isinstance(value, cst.Name):
        made = [p for n in t.walk(function.node) if (p := t.assigned(n)) and p[0] == value.value]
        value = made[0][1] if len(made) == 1 else None
    if not isinstance(value, cst.Call) or not value.args or value.args[0].keyword or value.args[0].star:
        return None
    target = t.code(value.func)
    if target not in CONSTRUCTORS:
        maker = next((f for f in functions if f.cls == function.cls and target == f"self.{f.name}"), None)
        body = t.returned(maker) if maker else None
        first = list(maker.params)[1] if maker and len(maker.params) > 1 else None
        if not isinstance(body, cst.Call) or t.code(body.func) not in CONSTRUCTORS or t.code(body.args[0].value) != first:
            return None
    host = value.args[0].value
    calls = {t.code(n.func) for n in t.walk(host) if isinstance(n, cst.Call)}
    return host if calls <= PURE_CALLS else None


def _add_fields(cls: t.Class, reads: list[_Read], edits: dict[cst.CSTNode, object]) -> None:
    for statement in cls.node.body.body:
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if not isinstance(small, cst.AnnAssign):
            continue
        lines = "".join(
            f"{r.name}: {'list[int]' if r.kind == 'list' else 'int'}  # host copy: reading the tensor would wait for the device\n"
            for r in reads
            if r.field == t.last_name(small.target)
        )
        if lines:
            edits[statement] = lambda updated, lines=lines: [updated, *t.statements(lines)]


def _fill(function: t.Function, call: cst.Call, reads: list[_Read], lists: dict, edits: dict[cst.CSTNode, object]) -> None:
    """Name the lists before the statement that builds the object, and hand their numbers over."""
    statement = t.holder(function, call)
    assert statement is not None
    names: dict[str, str] = {}
    lines = ""
    for field in dict.fromkeys(r.field for r in reads):
        host = lists[field]
        if isinstance(host, cst.Name):
            names[field] = host.value
        else:
            names[field] = field
            lines += f"{field} = {t.code(host)}\n"
            edits[host] = cst.Name(field)
    if lines:
        edits.update(t.before(statement, lines))
    template = call.args[-1]
    extra = [
        template.with_changes(
            keyword=cst.Name(r.name),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
            value=cst.parse_expression(r.value(names[r.field])),
        )
        for r in reads
    ]
    edits[call] = lambda updated: updated.with_changes(args=_appended(updated.args, extra))


def _appended(args: tuple | list, extra: list[cst.Arg]) -> list[cst.Arg]:
    """The arguments and more of them, laid out as the first ones are."""
    args = list(args)
    comma = args[0].comma if len(args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = args[-1]
    args[-1] = last.with_changes(comma=comma, whitespace_after_arg=args[0].whitespace_after_arg)
    middle = [a.with_changes(comma=comma, whitespace_after_arg=args[0].whitespace_after_arg) for a in extra[:-1]]
    end = extra[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return [*args, *middle, end]
