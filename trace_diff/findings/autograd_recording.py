"""Autograd recording is on while decoding: every operator builds graph nodes that no one will use.

Signature: operators that were dispatched through the autograd keys carry a sequence number; where recording
really happens the number advances by one per graph node. Python autograd functions (custom operators with a
registered backward) appear as operators of their own and are timed as such.

Saving per step <= (recorded nodes x 1.78 us + dispatches through autograd keys x 1.67 us) x host speed
+ self time of Python autograd functions.
The unit costs were measured without a profiler: ablation of one engine on an H200 host (unmodified, no_grad,
inference_mode: 297, 241, 192 ms for 12 steps with 1,090 nodes, 2,445 dispatches and 73 Python functions each).
Host speed is this trace's median self time of `aten::as_strided` over the 0.475 us that it took there. Fixed by
running the forward under `torch.inference_mode()`; `no_grad` alone leaves the dispatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.hosttree import HostTree
from trace_diff.types import Kind
from trace_diff.whatif import Edit

RULE = "autograd-recording"
SKILLS = ("inference-mode",)
NODE_NS = 1780.0
DISPATCH_NS = 1670.0
UNIT_NS = 475.0
FORMULA = (
    "(graph nodes x 1.78 us + autograd dispatches x 1.67 us) x host speed + self time of Python autograd functions"
)
LEAST_SHARE = 0.05  # of the step's operators: a few outside the forward are harmless


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Positions in a tree of the operators that went through autograd keys, and nodes that were recorded."""

    at: list[int]
    nodes: int
    operators: int


def look(context: Context) -> Draft | NotFound:
    found = _recorded(context, context.tree)
    if found.operators == 0:
        return NotFound("no operators on the step's thread")
    if context.named(lambda n: n.startswith("autograd::engine::") or "AccumulateGrad" in n):
        return NotFound("gradients are computed in these steps: this is training, recording is needed")
    share = len(found.at) / found.operators
    if share < LEAST_SHARE:
        return NotFound(
            "inference or no-grad mode is on: operators carry no sequence number",
            ({"what": "operators with a sequence number per step", "count": len(found.at)},),
        )
    python = [i for i in found.at if _is_python_function(_name(context, context.tree, i))]
    python_ns = float(context.tree.self_ns[python].sum()) if python else 0.0
    speed = min(3.0, max(0.3, (context.host_unit_ns or UNIT_NS) / UNIT_NS))
    counted = (found.nodes * NODE_NS + len(found.at) * DISPATCH_NS) * speed
    seen = sum(_on(context, tree) for tree in context.trees)
    what = f"{found.nodes} graph nodes a step" if found.nodes else "grad mode on, though nothing needs a gradient"
    return Draft(
        title=f"Autograd recording is on: {what}, {len(found.at)} of {found.operators} operators take the autograd path",
        formula=FORMULA,
        basis=Basis.COUNTS,
        edit=Edit(host_cuts=_spread(context, found.at, python, counted, python_ns)),
        evidence=(
            {"what": "graph nodes recorded", "count": found.nodes, "us": round(found.nodes * NODE_NS * speed / 1000, 1)},
            {
                "what": "operators dispatched through autograd keys",
                "count": len(found.at),
                "us": round(len(found.at) * DISPATCH_NS * speed / 1000, 1),
            },
            {"what": "Python autograd functions, self time", "count": len(python), "us": round(python_ns / 1000, 1)},
            {"what": "host speed against the reference host", "factor": round(speed, 2)},
        ),
        skills=SKILLS,
        seen_in=(seen, len(context.trees)),
        inferred=context.host_unit_ns is None,
    )


def _recorded(context: Context, tree: HostTree) -> _Recorded:
    trace = context.trace
    at: list[int] = []
    numbers: list[int] = []
    ops = np.flatnonzero(trace.events.kind[tree.rows] == Kind.CPU_OP).tolist()
    for i in ops:
        number = trace.args(int(tree.rows[i])).get("Sequence number")
        if isinstance(number, int) and number >= 0:
            at.append(i)
            numbers.append(number)
    nodes = max(numbers) - min(numbers) if numbers else 0
    return _Recorded(at, nodes, len(ops))


def _on(context: Context, tree: HostTree) -> bool:
    if tree is context.tree:
        return True
    trace = context.trace
    ops = tree.rows[trace.events.kind[tree.rows] == Kind.CPU_OP]
    some = ops[:: max(1, len(ops) // 100)].tolist()
    with_number = sum("Sequence number" in trace.args(r) for r in some)
    return with_number >= LEAST_SHARE * len(some)


def _name(context: Context, tree: HostTree, at: int) -> str:
    return context.trace.name(int(tree.rows[at]))


def _is_python_function(name: str) -> bool:
    return "::" not in name and name != "detach_"


def _spread(context: Context, at: list[int], python: list[int], counted: float, python_ns: float) -> dict[int, float]:
    """Spread the counted cost over the operators that carry it, by their own time.

    Part of it is really paid where tensors die; a replay needs it somewhere on the thread.
    """
    tree = context.tree
    functions = set(python)
    plain = [i for i in at if i not in functions]
    own = float(tree.self_ns[plain].sum())
    fraction = min(0.9, counted / own) if own else 0.0
    cuts = {int(tree.rows[i]): fraction * float(tree.self_ns[i]) for i in plain}
    if python_ns:
        cuts |= {int(tree.rows[i]): float(tree.self_ns[i]) for i in python}
    return cuts
