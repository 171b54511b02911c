"""Copies and casts that move data only to have it elsewhere or in another form.

Signature: device-to-device copies, cast and copy kernels, `clone`, `contiguous`, `cat`, `repeat`. With references,
only what they do not need either counts. Saving per step <= wall minus wall of the step replayed without the
(excess) copies and the operators that made them. Copies that a product needs (a transposed operand) may come
back elsewhere: the bound does not know.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trace_diff import classify, fusion
from trace_diff.analysis import Analysis
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.types import Kind
from trace_diff.whatif import Edit

RULE = "redundant-copies"
SKILLS = ("direct-kv-write", "preallocate-decode-buffers", "fused-kernels")
FORMULA = "wall - wall of the step replayed without the copies that no reference makes"
DEVICE_CLASSES = frozenset({"copy", "d2d"})
# Operators that return a view when there is nothing to do: they count only where they really copied.
_MAYBE_FREE = frozenset({"aten::to", "aten::contiguous", "aten::reshape", "aten::float", "aten::type_as"})
LEAST = 2


def _is_redundant(name: str, cls: str) -> bool:
    """A copy that is not a cache write: those are work, whatever kernel does them."""
    return cls in DEVICE_CLASSES and fusion.token(name, cls) != "index_put"


def look(context: Context) -> Draft | NotFound:
    return _on_gpu(context) if context.on_gpu else _on_cpu(context)


def _on_gpu(context: Context) -> Draft | NotFound:
    seq = context.analysis.sequence
    assert seq is not None
    mine = [i for i, c in enumerate(seq.classes) if _is_redundant(seq.names[i], c)]
    allowed = min((_copies_of(r) for r in context.references), default=0)
    excess = sorted(mine, key=lambda i: -seq.dur_ns[i])[: max(0, len(mine) - allowed)]
    if len(excess) < LEAST:
        return NotFound(f"{len(mine)} copies a step, {allowed} of them in a reference too")
    e = context.trace.events
    in_step = {r: 0.0 for r in context.model.rows if _is_copy(context, r)}
    keep = len(in_step) - len(excess)
    for r in sorted(in_step, key=lambda r: int(e.dur_ns[r]))[: max(0, keep)]:
        in_step.pop(r)
    ids = {int(e.correlation[r]) for r in in_step}
    host = [i for i in _outermost_copies(context) if ids & context.launches[i]]
    names = Counter(seq.names[i] for i in excess)
    return Draft(
        title=f"{len(excess)} copies and casts a step" + (" that no reference makes" if context.references else ""),
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(host_cuts=context.subtree_cuts(host), device=in_step),
        evidence=(
            *({"what": n[:120], "count": c, "us": _us(context, n)} for n, c in names.most_common(8)),
            {"what": "copying operators", "count": len(host), "names": _operator_names(context, host)},
            {"what": "copies of the cheapest reference", "count": allowed},
        ),
        skills=SKILLS,
        inferred=not context.references,
    )


def _on_cpu(context: Context) -> Draft | NotFound:
    at = _outermost_copies(context)
    if len(at) < LEAST:
        return NotFound("hardly any copying operator in the step")
    rows = [int(context.tree.rows[i]) for i in at]
    names = Counter(context.trace.name(r) for r in rows)
    e = context.trace.events
    return Draft(
        title=f"{len(at)} copying operators a step",
        formula="wall - wall of the step replayed without the copying operators",
        basis=Basis.HOST,
        edit=Edit(host_cuts=context.subtree_cuts(at)),
        evidence=tuple(
            {
                "what": n,
                "count": c,
                "us": round(sum(float(e.dur_ns[r]) for r in rows if context.trace.name(r) == n) / 1000, 3),
            }
            for n, c in names.most_common(8)
        ),
        skills=SKILLS,
        inferred=True,
    )


def _is_copy(context: Context, row: int) -> bool:
    name = context.trace.name(row)
    return _is_redundant(name, classify.kernel_class(name))


def _copies_of(reference: Analysis) -> int:
    seq = reference.sequence
    return sum(map(_is_redundant, seq.names, seq.classes)) if seq else 0


def _outermost_copies(context: Context) -> list[int]:
    """Positions of copying operators that are not inside another operator's work (a product's own copies)."""
    tree, trace = context.tree, context.trace
    children = tree.children()
    codes = trace.events.name[tree.rows]
    is_op = trace.events.kind[tree.rows] == Kind.CPU_OP
    copying = np.isin(codes, [c for c in np.unique(codes[is_op]).tolist() if _copies(trace.names[c])]) & is_op
    inside = [False] * len(tree)
    out: list[int] = []
    for i, (up, copies) in enumerate(zip(tree.parent.tolist(), copying.tolist(), strict=True)):
        above = up >= 0 and inside[up]
        inside[i] = above or copies
        if copies and not above and (children[i] or trace.name(int(tree.rows[i])) not in _MAYBE_FREE):
            out.append(i)
    return out


def _copies(name: str) -> bool:
    return classify.op_class(name) == "copy" and not name.startswith("aten::index_copy")


def _us(context: Context, name: str) -> float:
    seq = context.analysis.sequence
    assert seq is not None
    return round(float(sum(d for n, d in zip(seq.names, seq.dur_ns, strict=True) if n == name)) / 1000, 3)


def _operator_names(context: Context, at: list[int]) -> dict[str, int]:
    return dict(Counter(context.trace.name(int(context.tree.rows[i])) for i in at).most_common(8))
