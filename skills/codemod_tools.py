"""What codemods share: reading source texts by pattern and data flow, and changing them with LibCST.

Pure functions on texts and syntax trees; the one module besides libcst that a codemod may import. Names are
matched as the code spells them, types by annotation: where that is not enough, a codemod declines. Not for:
choosing skills, or anything about traces.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst

Sources = Mapping[str, str]
NEVER = object()
_FIELDS: dict[type, tuple[str, ...]] = {}
_PUNCTUATION = {"leading_lines", "lines_after_decorators", "header", "footer", "lpar", "rpar", "lbracket", "rbracket", "comma", "semicolon", "dot"}


def parse_all(sources: Sources, containing: str = "") -> dict[str, cst.Module]:
    """Trees of the Python files whose text holds `containing`, by path, in path order."""
    return {f: _parsed(sources[f]) for f in sorted(sources) if f.endswith(".py") and containing in sources[f]}


@functools.lru_cache(maxsize=128)
def _parsed(text: str) -> cst.Module:
    return cst.parse_module(text)  # trees are immutable: every codemod may have the same one


def code(node: cst.CSTNode) -> str:
    """The node as source text."""
    return cst.Module([]).code_for_node(node)


def last_name(node: cst.CSTNode | None) -> str:
    """The last name of a (dotted) name, call or subscript; empty for anything else."""
    if isinstance(node, cst.Call):
        return last_name(node.func)
    if isinstance(node, cst.Subscript):
        return last_name(node.value)
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and everything below it that is code (no whitespace, no punctuation), in source order."""
    stack = [node]
    while stack:
        item = stack.pop()
        yield item
        stack.extend(reversed(children(item)))


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """What stands directly below a node, without whitespace. Several times as fast as `node.children`."""
    kind = type(node)
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = tuple(
            f.name for f in dataclasses.fields(kind) if "whitespace" not in f.name and f.name not in _PUNCTUATION
        )
    found: list[cst.CSTNode] = []
    for name in names:
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(x for x in value if isinstance(x, cst.CSTNode))
    return found


def imports(tree: cst.Module) -> dict[str, str]:
    """Local name -> what it stands for, of every import in the file: {"dist": "torch.distributed", ...}."""
    found: dict[str, str] = {}
    for node in walk(tree):
        if isinstance(node, cst.Import):
            for alias in node.names:
                name = code(alias.name)
                root = name.partition(".")[0]
                found.update({last_name(alias.asname.name): name} if alias.asname else {root: root})
        elif isinstance(node, cst.ImportFrom) and node.module is not None and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                local = last_name(alias.asname.name) if alias.asname else last_name(alias.name)
                found[local] = f"{code(node.module)}.{last_name(alias.name)}"
    return found


def qualified(node: cst.CSTNode, known: Mapping[str, str]) -> str:
    """A dotted name with its first part resolved by `imports`; empty for anything that is not a dotted name."""
    if isinstance(node, cst.Name):
        return known.get(node.value, node.value)
    if isinstance(node, cst.Attribute):
        root = qualified(node.value, known)
        return f"{root}.{node.attr.value}" if root else ""
    return ""


def names_in(node: cst.CSTNode) -> set[str]:
    """Plain names used in an expression; attribute and keyword names do not count."""
    found: set[str] = set()

    def visit(item: cst.CSTNode) -> None:
        if isinstance(item, cst.Name):
            found.add(item.value)
        elif isinstance(item, (cst.Attribute, cst.Arg)):
            visit(item.value)
        else:
            for child in children(item):
                visit(child)

    visit(node)
    return found


@dataclass(frozen=True)
class Function:
    """A function definition and where it stands."""

    file: str
    cls: str  # "" at module level
    node: cst.FunctionDef

    @property
    def name(self) -> str:
        return self.node.name.value

    @property
    def params(self) -> dict[str, str]:
        """Parameter name -> annotation's last name ("" without one), self included."""
        p = self.node.params
        every = [*p.posonly_params, *p.params, *p.kwonly_params]
        return {x.name.value: last_name(x.annotation.annotation) if x.annotation else "" for x in every}

    def statements(self) -> Sequence[cst.BaseStatement]:
        """Top-level statements of the body, the docstring left out."""
        body = self.node.body
        if not isinstance(body, cst.IndentedBlock):
            return []
        return body.body[1:] if self.node.get_docstring() is not None else body.body


@dataclass
class Class:
    """A class definition: bases by last name, annotated fields, methods."""

    file: str
    node: cst.ClassDef
    bases: set[str]
    fields: dict[str, str] = field(default_factory=dict)  # name -> annotation
    methods: dict[str, Function] = field(default_factory=dict)
    is_dataclass: bool = False


def functions(trees: Mapping[str, cst.Module]) -> list[Function]:
    """Every module-level function and method (not nested ones), in path and source order."""
    found: list[Function] = []
    for file, tree in trees.items():
        for item in tree.body:
            if isinstance(item, cst.FunctionDef):
                found.append(Function(file, "", item))
            elif isinstance(item, cst.ClassDef):
                found += [Function(file, item.name.value, m) for m in item.body.body if isinstance(m, cst.FunctionDef)]
    return found


def classes(trees: Mapping[str, cst.Module]) -> dict[str, Class]:
    """Module-level classes by name; a name that is there twice is left out."""
    found: dict[str, Class] = {}
    twice: set[str] = set()
    for file, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, cst.ClassDef):
                continue
            name = node.name.value
            (twice.add(name) if name in found else None)
            found[name] = _class(file, node)
    return {n: c for n, c in found.items() if n not in twice}


def _class(file: str, node: cst.ClassDef) -> Class:
    made = Class(file, node, {last_name(b.value) for b in node.bases})
    made.is_dataclass = any(last_name(d.decorator) == "dataclass" for d in node.decorators)
    for item in node.body.body:
        if isinstance(item, cst.FunctionDef):
            made.methods[item.name.value] = Function(file, node.name.value, item)
        elif isinstance(item, cst.SimpleStatementLine):
            for small in item.body:
                if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                    made.fields[small.target.value] = code(small.annotation.annotation)
    return made


def subclasses_of(known: Mapping[str, Class], roots: set[str]) -> set[str]:
    """Names of classes that derive from one of `roots`, directly or through `known` ones."""
    found: set[str] = set()
    while True:
        more = {n for n, c in known.items() if c.bases & (roots | found)} - found
        if not more:
            return found
        found |= more


def assigned(statement: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """(name, value) of `name = value` or `name: T = value` on a line of its own, else None."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    if isinstance(small, cst.Assign) and len(small.targets) == 1 and isinstance(small.targets[0].target, cst.Name):
        return small.targets[0].target.value, small.value
    if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name) and small.value is not None:
        return small.target.value, small.value
    return None


def returned(function: Function) -> cst.BaseExpression | None:
    """The expression of a function whose body is a single `return`, else None."""
    body = function.statements()
    if len(body) != 1 or not isinstance(body[0], cst.SimpleStatementLine):
        return None
    small = body[0].body[0]
    return small.value if isinstance(small, cst.Return) else None


def attributes_set(cls: Class) -> dict[str, cst.BaseExpression]:
    """`self.x = value` of __init__'s top level: name -> value."""
    init = cls.methods.get("__init__")
    found: dict[str, cst.BaseExpression] = {}
    for statement in init.statements() if init else ():
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Assign):
                target, value = small.targets[0].target, small.value
            elif isinstance(small, cst.AnnAssign) and small.value is not None:
                target, value = small.target, small.value
            else:
                continue
            if isinstance(target, cst.Attribute) and last_name(target.value) == "self":
                found[target.attr.value] = value
    return found


def bias_of_linear(value: cst.BaseExpression, known: Mapping[str, Class], makers: Mapping[str, Function]) -> str | None:
    """How a plain linear layer is built: the text of its `bias` ("False", "config.bias"); None for anything else.

    Plain is nn.Linear itself with a stated bias, a class whose forward is F.linear(x, self.weight), or a call of a
    function of `makers` that returns one.
    """
    if not isinstance(value, cst.Call):
        return None
    name = last_name(value)
    if name == "Linear" and name not in known:
        given = arguments(value) or {}
        bias = given.get("bias", given.get(2))
        return code(bias) if isinstance(bias, cst.Name | cst.Attribute) else None
    if name in makers:
        inner = returned(makers[name])
        return bias_of_linear(inner, known, makers) if inner is not None and last_name(inner) != name else None
    if name in known and "forward" in known[name].methods and "Module" in known[name].bases:
        body = returned(known[name].methods["forward"])
        params = list(known[name].methods["forward"].params)
        spellings = {f"{f}({params[-1]}, self.weight)" for f in ("F.linear", "functional.linear", "nn.functional.linear", "linear_by_columns")}
        return "False" if body is not None and len(params) == 2 and code(body) in spellings else None
    return None


def arguments(call: cst.Call) -> dict[str | int, cst.BaseExpression] | None:
    """Arguments by position and keyword; None when something is unpacked."""
    found: dict[str | int, cst.BaseExpression] = {}
    for n, arg in enumerate(call.args):
        if arg.star:
            return None
        found[arg.keyword.value if arg.keyword else n] = arg.value
    return found


class Replace(cst.CSTTransformer):
    """Put new nodes in the place of given ones (by identity); a list stands for several statements."""

    def __init__(self, new: Mapping[cst.CSTNode, object]) -> None:
        super().__init__()
        self.new = dict(new)

    def on_leave(self, original_node, updated_node):
        updated = super().on_leave(original_node, updated_node)
        value = self.new.get(original_node, NEVER)
        if value is NEVER:
            return updated
        if callable(value):  # a function of the node as it is after changes below it
            value = value(updated)
        if isinstance(value, list):
            return cst.FlattenSentinel(value)
        return value


def replace(tree: cst.Module, new: Mapping[cst.CSTNode, object]) -> cst.Module:
    """The tree with nodes replaced, see Replace. Nodes must come from this very tree."""
    changed = tree.visit(Replace(new))
    assert isinstance(changed, cst.Module)
    return changed


def statements(text: str) -> list[cst.BaseStatement]:
    """Parse lines of code into statements, comments kept."""
    return list(cst.parse_module(text).body)


def before(statement: cst.CSTNode, text: str) -> dict[cst.CSTNode, object]:
    """A replacement that puts the lines of `text` before a statement, which keeps its own changes and blank lines."""

    def put(updated: cst.CSTNode) -> list[cst.CSTNode]:
        new: list = statements(text)
        new[0] = new[0].with_changes(leading_lines=updated.leading_lines)  # type: ignore[attr-defined]
        return [*new, updated.with_changes(leading_lines=[])]

    return {statement: put}


def holder(function: Function, node: cst.CSTNode) -> cst.BaseStatement | None:
    """The innermost statement line of `function` that holds `node`, by identity."""
    found: cst.BaseStatement | None = None
    for item in walk(function.node):
        if isinstance(item, cst.SimpleStatementLine) and any(x is node for x in walk(item)):
            found = item
    return found


def add_import(tree: cst.Module, line: str) -> cst.Module:
    """The module with one more top-level import, beside those of the same package, sorted in."""
    wanted = cst.ensure_type(cst.parse_statement(line), cst.SimpleStatementLine)
    body = list(tree.body)
    places = [n for n, s in enumerate(body) if isinstance(s, cst.SimpleStatementLine) and isinstance(s.body[0], cst.Import | cst.ImportFrom)]
    if any(code(body[n]).strip() == line for n in places):
        return tree
    package = line.split()[1].partition(".")[0]
    kin = [n for n in places if code(body[n]).split()[:2] and code(body[n]).strip().split()[1].partition(".")[0] == package]
    if package and kin:
        same = next((n for n in kin if line.startswith("from ") and code(body[n]).strip().startswith(line.partition(" import ")[0] + " import ")), None)
        if same is not None and "(" not in code(body[same]):
            names = sorted({*code(body[same]).strip().partition(" import ")[2].split(", "), line.partition(" import ")[2]})
            merged = cst.ensure_type(cst.parse_statement(line.partition(" import ")[0] + " import " + ", ".join(names)), cst.SimpleStatementLine)
            body[same] = merged.with_changes(leading_lines=cst.ensure_type(body[same], cst.SimpleStatementLine).leading_lines)
            return tree.with_changes(body=body)
        at = next((n for n in kin if code(body[n]).strip().split()[1] > line.split()[1]), kin[-1] + 1)
        if at in kin:  # take over the blank lines above it
            old = cst.ensure_type(body[at], cst.SimpleStatementLine)
            wanted, body[at] = wanted.with_changes(leading_lines=old.leading_lines), old.with_changes(leading_lines=[])
        return tree.with_changes(body=[*body[:at], wanted, *body[at:]])
    at = places[-1] + 1 if places else (1 if tree.get_docstring() else 0)
    if line.startswith("from "):
        wanted = wanted.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return tree.with_changes(body=[*body[:at], wanted, *body[at:]])


def with_torch_names(tree: cst.Module, names: Sequence[str] = ("torch", "nn", "F")) -> cst.Module:
    """The module with these usual names imported, where they do not mean that already."""
    lines = {"torch": "import torch", "nn": "from torch import nn", "F": "import torch.nn.functional as F"}
    means = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional"}
    known = imports(tree)
    for name in names:
        if known.get(name) != means[name]:
            tree = add_import(tree, lines[name])
    return tree


def sibling_import(file: str, sources: Sources, module: str) -> str:
    """How `file` imports a module beside it: the way it imports others, else by what its folder is."""
    folder = file.rpartition("/")[0]
    if "\nfrom ." in sources[file]:
        return f"from . import {module}"
    if folder and f"{folder}/__init__.py" in sources:
        return f"from {folder.replace('/', '.')} import {module}"
    return f"import {module}"
