"""Keep the memory of short-lived decode tensors from step to step instead of asking for it anew.

Two patterns, each with an escape check: pages of a cache gathered by a table (`pages[table]`) that only attention
reads, and lists of empty tensors that a collective fills and a concatenation copies out of. What could still be
referenced when the memory is used again is left alone.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst

PARAMS = {"keep_rows": [64]}
READERS = {"scaled_dot_product_attention", "flash_attn_func", "flash_attn_with_kvcache", "flash_attn_varlen_func"}
VIEWS = {"view", "transpose", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "expand", "reshape"}
COLLECTIVES = {"all_gather"}
COPIERS = {"cat", "stack"}

PAGES = '''
def gather_pages(pages: torch.Tensor, table: torch.Tensor, name: str) -> torch.Tensor:
    """pages[table] for page numbers [G, B], in memory that is kept: it lasts until the next call with `name`."""
    key = (name, pages.shape[1:], pages.dtype, pages.device)
    rows = table.numel()
    kept = _kept.get(key)
    if kept is None or len(kept) < rows:
        kept = _kept[key] = pages.new_empty((2 * rows, *pages.shape[1:]))
    torch.index_select(pages, 0, table.flatten(), out=kept[:rows])
    return kept[:rows].view(*table.shape, *pages.shape[1:])
'''
PARTS = '''
def kept_like(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` tensors like `x` with any contents; for few rows in memory that is kept until the next such call."""
    if len(x) > @ROWS@:  # a long prompt: not worth keeping
        return [torch.empty_like(x) for _ in range(count)]
    key = (x.shape, x.dtype, x.device, count)
    if key not in _kept:
        _kept[key] = [torch.empty_like(x) for _ in range(count)]
    return _kept[key]
'''


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    trees = t.parse_all(sources, "torch")
    if any(f.name in ("gather_pages", "kept_like") for f in t.functions(trees)):
        return {"declined": "buffers are already kept"}
    rows = finding.get("params", {}).get("keep_rows", PARAMS["keep_rows"][0])
    changed: dict[str, str] = {}
    done: list[str] = []
    for file, tree in trees.items():
        edits: dict[cst.CSTNode, object] = {}
        helpers = ""
        for function in t.functions({file: tree}):
            if _pages(function, edits):
                helpers = helpers if "gather_pages" in helpers else helpers + PAGES + "\n"
                done.append(f"{function.cls}.{function.name}".lstrip("."))
            if _parts(function, edits):
                helpers = helpers if "kept_like" in helpers else helpers + PARTS.replace("@ROWS@", str(rows)) + "\n"
                done.append(f"{function.cls}.{function.name}".lstrip("."))
        if edits:
            changed[file] = _with_helpers(tree, edits, helpers)
    if not changed:
        return {"declined": "no gathered pages or filled lists whose memory could safely be kept"}
    if len(changed) > 3:
        return {"declined": f"buffers in {len(changed)} files; more than one patch may touch"}
    return {
        "sources": changed,
        "mechanism": "preallocate-decode-buffers",
        "title": f"Keep decode buffers from step to step ({', '.join(done)})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["nothing refers to a kept buffer when it is filled again", "kept memory grows with the largest decode batch only"],
        "params": {"keep_rows": rows},
        "activation": {
            "appear": [],
            "vanish": [{"row": "aten::empty*", "phase": "decode", "ranks": "all", "fewer": True}],
        },
    }


# -- pages[table] ----------------------------------------------------------------------------------------------


def _pages(function: t.Function, edits: dict[cst.CSTNode, object]) -> bool:
    """Replace `name = x.pages[meta.table]...` whose value only attention reads; True when there was one."""
    hits = 0
    for statement in t.walk(function.node):
        pair = t.assigned(statement)
        if pair is None:
            continue
        lookup = _page_lookup(pair[1], function)
        if lookup is None or not _only_read_by(function, pair[0], statement, READERS):
            continue
        pages, table = t.code(lookup.value), t.code(lookup.slice[0].slice)
        edits[lookup] = cst.parse_expression(f'gather_pages({pages}, {table}, "{pair[0]}")')
        hits += 1
    return hits > 0


def _page_lookup(value: cst.BaseExpression, function: t.Function) -> cst.Subscript | None:
    """The `a.pages[b.table]` at the root of a chain of views, where a and b are parameters and the table's name says so."""
    node: cst.BaseExpression = value
    while True:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in VIEWS:
            node = node.func.value
        elif isinstance(node, cst.Subscript) and _is_lookup(node, function):
            return node
        elif isinstance(node, cst.Subscript):
            node = node.value
        else:
            return None


def _is_lookup(node: cst.Subscript, function: t.Function) -> bool:
    if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return False
    pages, table = node.value, node.slice[0].slice.value
    parts = [x for x in (pages, table) if isinstance(x, cst.Attribute) and t.last_name(x.value) in function.params]
    return len(parts) == 2 and "block_table" in t.last_name(table)


# -- lists that a collective fills -----------------------------------------------------------------------------


def _parts(function: t.Function, edits: dict[cst.CSTNode, object]) -> bool:
    """Replace `parts = [torch.empty_like(x) for _ in range(n)]` that is filled and then copied out of."""
    hits = 0
    for statement in t.walk(function.node):
        pair = t.assigned(statement)
        if pair is None or not isinstance(pair[1], cst.ListComp):
            continue
        made, loop = pair[1].elt, pair[1].for_in
        plain = isinstance(made, cst.Call) and t.code(made.func) == "torch.empty_like" and len(made.args) == 1
        counted = isinstance(loop.iter, cst.Call) and t.code(loop.iter.func) == "range" and len(loop.iter.args) == 1 and not loop.ifs
        if plain and counted and _only_read_by(function, pair[0], statement, COLLECTIVES | COPIERS):
            edits[pair[1]] = cst.parse_expression(f"kept_like({t.code(made.args[0].value)}, {t.code(loop.iter.args[0].value)})")
            hits += 1
    return hits > 0


# -- both ------------------------------------------------------------------------------------------------------


def _only_read_by(function: t.Function, name: str, made: cst.CSTNode, readers: set[str]) -> bool:
    """Every use of the local `name` after it was made is inside the arguments of one of `readers`."""
    allowed: set[int] = set()
    for node in t.walk(function.node):
        if isinstance(node, cst.Call) and t.last_name(node.func) in readers:
            allowed.update(id(x) for arg in node.args for x in t.walk(arg.value))
    target = {id(x) for x in t.walk(made)}
    uses = [n for n in t.walk(function.node) if isinstance(n, cst.Name) and n.value == name and id(n) not in target]
    keywords = {id(n.keyword) for n in t.walk(function.node) if isinstance(n, cst.Arg) and n.keyword is not None}
    parameters = {id(n.name) for n in t.walk(function.node) if isinstance(n, cst.Param)}
    attributes = {id(n.attr) for n in t.walk(function.node) if isinstance(n, cst.Attribute)}
    uses = [n for n in uses if id(n) not in keywords | parameters | attributes]
    return bool(uses) and all(id(n) in allowed for n in uses)


def _with_helpers(tree: cst.Module, edits: dict[cst.CSTNode, object], helpers: str) -> str:
    """The file with its edits, and the helpers before its first class or function."""
    first = next(s for s in tree.body if isinstance(s, cst.ClassDef | cst.FunctionDef))
    text = "_kept: dict = {}  # memory that outlives a step, by what it is for\n" + "\n" + helpers
    new = t.statements(text.rstrip("\n") + "\n")
    blank = [cst.EmptyLine(indent=False)] * 2
    new = [new[0].with_changes(leading_lines=blank[:1]), *(s.with_changes(leading_lines=blank) for s in new[1:])]
    old = edits.get(first)

    def put(updated: cst.CSTNode) -> list[cst.CSTNode]:
        return [*new, *(old(updated) if callable(old) else [updated])]

    return t.replace(tree, {**edits, first: put}).code
