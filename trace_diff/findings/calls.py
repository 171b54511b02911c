"""From rows of work to the operator calls that caused them. Shared by rules that take work out of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trace_diff import classify
from trace_diff.findings.context import Context

# An operator of these classes does more than its one kernel: it is not gone when the kernel is.
_KEEP = frozenset({"communication", "autograd", "compiled", "graph", "attention"})


def operators(context: Context, rows: Iterable[int]) -> list[int]:
    """Positions (in the representative tree) of the calls that are (CPU) or launched (GPU) exactly these rows.

    On a GPU the launch is widened to the operator around it as long as that operator launches nothing else. A graph's launch
    stays as long as one of its kernels does.
    """
    if not context.on_gpu:
        return sorted(context.position[r] for r in rows if r in context.position)
    e = context.trace.events
    gone, all_of = (Counter(e.correlation[list(of)].tolist()) for of in (set(rows), context.model.rows))
    ids = {c for c, count in gone.items() if count >= all_of[c]}
    return sorted({_widest(context, context.launch_at[c], ids) for c in ids if c in context.launch_at})


def _widest(context: Context, at: int, ids: set[int]) -> int:
    best, up = at, int(context.tree.parent[at])
    while up >= 0:
        name = context.trace.name(int(context.tree.rows[up]))
        if classify.op_class(name) in _KEEP or not context.launches[up] <= ids:
            break
        best, up = up, int(context.tree.parent[up])
    return best
