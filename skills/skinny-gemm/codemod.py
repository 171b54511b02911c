"""Products of a single row by a Triton kernel near the memory bandwidth; all others stay with F.linear.

Replaces `F.linear(x, weight)` without bias in modules by a function that chooses by the number of rows.
"""

from __future__ import annotations

import codemod_tools as t
import gpu_tools as gpu
import libcst as cst

SKINNY = '''"""Products of one row with a weight, near the memory bandwidth: each program reads whole rows of the weight once.

More rows, other devices and odd sizes go to F.linear, which is also the reference. Not for: prefill.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs: F.linear is all that is used
    triton = None


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, k], weight [n, k] -> x weight^T [T, n]."""
    one_row = triton is not None and x.is_cuda and x.shape[0] == 1 and x.dim() == 2
    if not one_row or weight.shape[1] % 512 or not weight.is_contiguous():
        return F.linear(x, weight)
    return launch(x, weight)


def launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    out = x.new_empty((1, outputs))
    rows = 4 if outputs > 65536 else 1  # a program's rows of the weight; figures: see the skill
    step = next(s for s in (2048, 1024, 512) if inputs % s == 0 and s <= inputs and (s < 2048 or outputs > inputs))
    step = 512 if inputs > outputs else step
    skinny_gemv[(triton.cdiv(outputs, rows),)](x, weight, out, outputs, K=inputs, ROWS=rows, STEP=step, num_warps=8)
    return out


if triton is not None:

    @triton.jit
    def skinny_gemv(x, weight, out, outputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
        n, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
        inside = (n < outputs)[:, None]
        acc = tl.zeros([ROWS, STEP], tl.float32)
        for start in range(0, K, STEP):
            value = tl.load(x + start + k).to(tl.float32)
            part = tl.load(weight + n[:, None] * K + start + k[None, :], mask=inside, other=0.0)
            acc += value[None, :] * part.to(tl.float32)
        tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < outputs)
'''


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    trees = t.parse_all(sources, "F.linear(")
    changed: dict[str, str] = {}
    for file, tree in trees.items():
        path = gpu.new_file(sources, file, "skinny")
        if path in sources:
            return {"declined": f"{path} is there already"}
        new: dict[cst.CSTNode, object] = {}
        for node in t.walk(tree):
            if isinstance(node, cst.Call) and t.code(node.func) == "F.linear" and len(node.args) == 2 and not any(a.keyword for a in node.args):
                new[node.func] = cst.parse_expression("skinny.linear")
        if new:
            changed[file] = gpu.imported(t.replace(tree, new), file, sources, "skinny").code
            changed[path] = SKINNY
    if not changed or len(changed) > 3:
        return {"declined": "no products by F.linear without bias" if not changed else f"products in {len(changed)} files"}
    return {
        "sources": changed,
        "mechanism": "skinny-gemm",
        "title": "Products of one row at the memory bandwidth",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["sums run in float32", "more than one row, odd sizes and CPUs go to F.linear"],
        "params": {},
        "activation": {"appear": [{"row": "skinny_gemv", "phase": "decode", "ranks": "all"}], "vanish": []},
    }
