"""The sum between ranks, the residual add and the RMS norm behind it in one kernel, for tensor-parallel decode on GPUs.

Goes on from two other rewrites: norms that add the residual (`fused_norm.add_rms_norm`, fused-kernels) and an all-reduce over
symmetric memory (custom-all-reduce). The branches of a layer hand over what this rank has; the norm that adds it sums it.
"""

from __future__ import annotations

import re

import codemod_tools as t
import libcst as cst

PICKED = re.compile(r"^\s*if [^\n]+\n\s+(\w+), (\w+) = \1\[(\w+)\], \2\[\3\]\s*$")  # rows of a sum are sums of rows

FUSED = '''

MOST_ROWS = 64  # more of them are sums that the library moves with fewer bytes
_rooms: list[Any] = []  # one, made at the first call: inboxes of its own, as programs take whole rows here


def all_reduce_add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, n], delta [T, n] of this rank alone -> (x + the ranks' sum of delta, its RMS norm times weight)."""
    if delta is None or not dist.is_initialized():
        return add_rms_norm(x, delta, weight, eps)
    rows, size = delta.shape
    fits = rows <= MOST_ROWS and rows * size * 2 <= symm_collectives.MAX_BYTES and size % 8 == 0 and delta.dtype == torch.bfloat16
    if triton is None or not fits or not (delta.is_cuda and delta.is_contiguous() and x.is_contiguous()):
        symm_collectives.all_reduce(delta)
        return add_rms_norm(x, delta, weight, eps)
    if not _rooms:
        _rooms.append(symm_collectives._Room(None, delta.device))
    room, added, out, block = _rooms[0], torch.empty_like(x), torch.empty_like(x), triton.next_power_of_2(size // 2)
    words = [tensor.detach().view(torch.int32) for tensor in (delta, x, weight, added, out)]
    one_shot_all_reduce_norm[(rows,)](
        *words, room.inbox, room.inboxes, room.turns, eps, N=size // 2, BLOCK=block, RANK=room.rank, RANKS=room.size,
        MOST=symm_collectives.MAX_BYTES // 4, AHEAD=room.ahead, launch_pdl=room.ahead, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return added, out


if triton is not None:

    @triton.jit
    def one_shot_all_reduce_norm(words, x, weight, added, out, inbox, inboxes, turns, eps, N: tl.constexpr, BLOCK: tl.constexpr,
                                 RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
        row, i = tl.program_id(0), tl.arange(0, BLOCK)
        inside, at = i < N, row * N + i
        factor = tl.load(weight + i, mask=inside, other=0)
        if AHEAD:  # the next kernel may be set up; what this one reads must be there
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        turn = tl.load(turns + row) + 1
        mine, before = tl.load(words + at, mask=inside, other=0), tl.load(x + at, mask=inside, other=0)
        low, high = symm_collectives.exchanged(mine, inbox, inboxes, turn, at, inside, RANK, RANKS, MOST)
        low, high = symm_collectives.first(before) + _rounded(low), symm_collectives.second(before) + _rounded(high)
        tl.store(added + at, symm_collectives.packed(low, high), mask=inside)
        low, high = _rounded(low), _rounded(high)
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * N) + eps)
        low, high = _rounded(low * scale) * symm_collectives.first(factor), _rounded(high * scale) * symm_collectives.second(factor)
        tl.store(out + at, symm_collectives.packed(low, high), mask=inside)
        tl.store(turns + row, turn)

    @triton.jit
    def _rounded(values):
        return values.to(tl.bfloat16).to(tl.float32)
'''


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    norm = next((file for file in sources if file.rsplit("/", 1)[-1] == "fused_norm.py"), None)
    sums = norm is not None and f"{norm.rpartition('fused_norm.py')[0]}symm_collectives.py" in sources
    if norm is None or not sums:
        return {"declined": "no norm that adds the residual beside an all-reduce over symmetric memory"}
    if "def all_reduce_add_rms_norm(" in sources[norm]:
        return {"declined": "norms sum over the ranks already"}
    top = "\nimport torch\n\ntry:\n    import triton\n"
    if sources[norm].count(top) != 1:
        return {"declined": f"{norm} begins in another way"}
    for file, tree in t.parse_all(sources, "fused_norm.add_rms_norm(").items():
        new = _handed_over(tree)
        if isinstance(new, str):
            return {"declined": new}
        calls = [n for n in t.walk(tree) if isinstance(n, cst.Call) and t.code(n.func) == "fused_norm.add_rms_norm"]
        new |= {call.func: cst.parse_expression("fused_norm.all_reduce_add_rms_norm") for call in calls}
        imports = f"\nfrom typing import Any\n\nimport torch\nimport torch.distributed as dist\n\n{t.sibling_import(norm, sources, 'symm_collectives')}\n"
        changed = {file: t.replace(tree, new).code, norm: sources[norm].replace(top, imports + top.removeprefix("\nimport torch\n")) + FUSED}
        return {
            "sources": changed,
            "mechanism": "all-reduce-rms-fusion",
            "title": "Sum between GPUs, add and norm in one kernel",
            "predicted_us": finding.get("bound_us"),
            "invariants": ["every rank gets the same bits", "rounds where the kernels before round", "other shapes and devices take those"],
            "params": {},
            "activation": {"appear": [{"row": "*one_shot_all_reduce_norm*", "phase": "decode", "ranks": "all"}], "vanish": []},
        }
    return {"declined": "fused_norm.add_rms_norm is called nowhere"}


def _handed_over(tree: cst.Module) -> dict[cst.CSTNode, object] | str:
    """Edits by which both branches of each layer return their part unsummed; or why they cannot.

    A layer is `x, n = self.norm1.add(x, delta)`, `delta = self.a(n, ...)`, `x, n = self.norm2.add(x, delta)`, `return x, self.b(n)`,
    with rows of both picked in between at most; the classes of a and b end in `return self.<group>.all_reduce(...)`, and nobody else makes them.
    """
    classes = t.classes({"": tree})
    for cls in classes.values():
        names = _branches(cls)
        built = {a: t.last_name(v) for a, v in t.attributes_set(cls).items()}
        if names is None:
            continue
        new: dict[cst.CSTNode, object] = {}
        for name in names:
            branch = classes.get(built.get(name, ""))
            made = sum(isinstance(n, cst.Call) and t.code(n.func) == built.get(name) for n in t.walk(tree))
            end = list(branch.methods["forward"].statements())[-1] if branch and "forward" in branch.methods else None
            returned = end.body[0] if isinstance(end, cst.SimpleStatementLine) else None
            call = returned.value if isinstance(returned, cst.Return) else None
            if made != 1 or not isinstance(call, cst.Call) or t.last_name(call.func) != "all_reduce" or len(call.args) != 1:
                return f"{cls.node.name.value}.{name} does not end in a sum over the ranks of its own"
            new[end] = t.statements(f"return {t.code(call.args[0].value)}  # this rank's part: the norm that adds it sums it\n")[0]
        return new
    return "no layer whose two branches are added by its norms"


def _branches(cls: t.Class) -> tuple[str, str] | None:
    """Names of the two branches of a layer, see `_handed_over`."""
    forward = cls.methods.get("forward")
    body = [s for s in (forward.statements() if forward else ()) if not PICKED.search(t.code(s))]
    if len(body) != 4 or (first := t.assigned(body[1])) is None:
        return None
    adds = [".add(" in t.code(body[n]) and t.code(body[n]).rstrip().endswith(f", {first[0]})") for n in (0, 2)]
    last = body[3].body[0] if isinstance(body[3], cst.SimpleStatementLine) else None
    pair = last.value if isinstance(last, cst.Return) else None
    second = pair.elements[1].value if isinstance(pair, cst.Tuple) and len(pair.elements) == 2 else None
    calls = first[1], second
    if not all(adds) or not all(isinstance(c, cst.Call) and t.code(c.func).startswith("self.") for c in calls):
        return None
    return t.last_name(calls[0].func), t.last_name(calls[1].func)  # type: ignore[union-attr]
