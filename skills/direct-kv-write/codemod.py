"""Write keys and values to their slots with one index_copy_ each instead of a general indexed assignment.

Finds `cache.view(...)[slots] = values` in a method whose `slots` argument is a tensor of slot numbers, and uses
index_copy_, which neither expands its index nor checks for masks and reads nothing back.
"""

from __future__ import annotations

import codemod_tools as t
import libcst as cst


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch for every such assignment; see the module docstring."""
    trees = t.parse_all(sources, "slot")
    changed: dict[str, str] = {}
    done: list[str] = []
    why = "no indexed assignment of keys or values to slots"
    for file, tree in trees.items():
        edits: dict[cst.CSTNode, object] = {}
        for function in t.functions({file: tree}):
            for statement in t.walk(function.node):
                call = _index_copy(statement, function)
                if call is None:
                    continue
                if any("slot" in line and ("int32" in line or "-1" in line.replace("(-1", "")) for line in sources[file].splitlines()):
                    why = f"{file}: slots may be int32 or padded with -1, which index_copy_ does not take"
                    continue
                edits[statement.body[0]] = cst.Expr(call)  # type: ignore[attr-defined]
                done.append(f"{function.cls}.{function.name}".lstrip("."))
        if edits:
            changed[file] = t.replace(tree, edits).code
    if not done:
        return {"declined": why}
    return {
        "sources": changed,
        "mechanism": "direct-kv-write",
        "title": f"Copy keys and values straight to their slots ({', '.join(dict.fromkeys(done))})",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["slots are int64, in range, and none is there twice"],
        "params": {},
        "activation": {
            "appear": [{"row": "aten::index_copy_", "phase": "decode", "ranks": "all"}],
            "vanish": [{"row": "aten::_index_put_impl_", "phase": "decode", "ranks": "all", "fewer": True}],
        },
    }


def _index_copy(statement: cst.CSTNode, function: t.Function) -> cst.BaseExpression | None:
    """`base.index_copy_(0, slots, values)` for `base[slots] = values`, else None."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return None
    target = small.targets[0].target
    if not isinstance(target, cst.Subscript) or len(target.slice) != 1 or not isinstance(target.slice[0].slice, cst.Index):
        return None
    index = target.slice[0].slice.value
    if not isinstance(index, cst.Name) or "slot" not in index.value or function.params.get(index.value) != "Tensor":
        return None
    if not isinstance(target.value, cst.Call) or t.last_name(target.value.func) not in ("view", "flatten"):
        return None  # only a cache seen as a flat list of slots
    return cst.parse_expression(f"{t.code(target.value)}.index_copy_(0, {index.value}, {t.code(small.value)})")
