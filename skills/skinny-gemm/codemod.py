"""Products of few rows by Triton kernels near the memory bandwidth; all others stay with F.linear.

Replaces `F.linear(x, weight)` without bias in modules by a function that chooses by the number of rows. Where gate and up
are one product, a second patch takes silu(gate) * up into it: of the same series, or later, once that is so.
"""

from __future__ import annotations

import re

import codemod_tools as t
import gpu_tools as gpu
import libcst as cst

SKINNY = '''"""Products of few rows with a weight, near the memory bandwidth: each program reads whole rows of the weight once.

One row is summed by plain arithmetic, up to 32 on the tensor cores. On Hopper a kernel is set up while the one before
still runs, and one row's first weights are read then (programmatic dependent launch). More rows, other devices and odd
sizes go to F.linear, which is also the reference. Not for: prefill.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs: F.linear is all that is used
    triton = None


MOST_ROWS = 32


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, k], weight [n, k] -> x weight^T [T, n]."""
    few = triton is not None and x.is_cuda and x.dim() == 2 and x.shape[0] <= MOST_ROWS
    if not few or weight.shape[1] % 512 or not weight.is_contiguous() or weight.element_size() != 2:
        return F.linear(x, weight)
    return launch(x, weight) if x.shape[0] == 1 else launch_few(x.contiguous(), weight)


def launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    out = x.new_empty((1, outputs))
    rows, step, warps, passing = sizes(outputs, inputs)
    pdl = torch.cuda.get_device_capability(x.device) >= (9, 0)
    skinny_gemv[(triton.cdiv(outputs, rows),)](
        x, weight, out, outputs, inputs, K=inputs, ROWS=rows, STEP=step, LONG=step >= 2048 and inputs > 4096,
        KEEP="evict_first" if passing else "", PDL=pdl, launch_pdl=pdl, num_warps=warps,
    )  # fmt: skip
    return out


def sizes(outputs: int, inputs: int) -> tuple[int, int, int, bool]:
    """Rows and columns that a program takes at a time, its warps, whether weights leave the L1 cache first: see the skill."""
    if inputs in (1024, 2048, 4096) and outputs % inputs == 0:  # behind attention, which leaves the memory idle: rows whole
        return 8192 // inputs, inputs, 8, False
    if inputs > 4096 and inputs % 2048 == 0:
        return (1, 4096, 8, False) if inputs % 4096 == 0 else (4, 2048, 4, True)
    if inputs % 2048 == 0 and outputs <= 2 * inputs:
        return 4, 2048, 4, False
    return 1, 1024 if inputs % 1024 == 0 else 512, 8, True


def launch_few(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    out, pdl = x.new_empty((rows, outputs)), torch.cuda.get_device_capability(x.device) >= (9, 0)
    wide, step = (64, 256 if outputs < 16384 else 128) if outputs > 4096 else (32, 512)
    skinny_gemm[(triton.cdiv(outputs, wide),)](
        x, weight, out, rows, outputs, K=inputs, M=16 if rows <= 16 else 32, N=wide, STEP=step, PDL=pdl, launch_pdl=pdl, num_warps=4
    )
    return out


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])  # it changes from step to step: none may wait for a compiler
    def skinny_gemm(x, weight, out, rows, outputs, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
        n, m, k = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.arange(0, M), tl.arange(0, STEP)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        inside, real = (n < outputs)[None, :], (m < rows)[:, None]
        acc = tl.zeros([M, N], tl.float32)
        for start in tl.range(0, K, STEP, num_stages=4):
            value = tl.load(x + m[:, None] * K + start + k[None, :], mask=real, other=0.0)
            acc = tl.dot(value, tl.load(weight + n[None, :] * K + start + k[:, None], mask=inside, other=0.0), acc)
        tl.store(out + m[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=real & inside)

    @triton.jit
    def skinny_gemv(x, weight, out, outputs, inputs, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, LONG: tl.constexpr,
                    KEEP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        n, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
        inside, at = (n < outputs)[:, None], weight + n[:, None] * K + k[None, :]
        part = tl.load(at, mask=inside, other=0.0, eviction_policy=KEEP)  # no kernel before writes weights: they come while it ends
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        acc = tl.load(x + k).to(tl.float32)[None, :] * part.to(tl.float32)
        if LONG:  # fewer registers, more programs at a time
            acc = tl.sum(tl.reshape(acc, (ROWS, STEP // 8, 8)), 2)
        for start in range(STEP, inputs if LONG else K, STEP):
            value = tl.load(x + start + k).to(tl.float32)
            more = value[None, :] * tl.load(at + start, mask=inside, other=0.0, eviction_policy=KEEP).to(tl.float32)
            acc += tl.sum(tl.reshape(more, (ROWS, STEP // 8, 8)), 2) if LONG else more
        tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < outputs)
'''


GATED = '''

def gated(x: torch.Tensor, weight: torch.Tensor, silu_mul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """x [T, k], weight [2n, k], gates first -> silu(x gate^T) * (x up^T) [T, n]; rounds where `silu_mul` rounds."""
    outputs, inputs = weight.shape[0] // 2, weight.shape[1]
    one_row = triton is not None and x.is_cuda and x.shape[0] == 1 and x.dim() == 2
    if not one_row or inputs % 512 or not weight.is_contiguous() or weight.element_size() != 2:
        return silu_mul(*linear(x, weight).chunk(2, dim=-1))
    out, pdl = x.new_empty((1, outputs)), torch.cuda.get_device_capability(x.device) >= (9, 0)
    skinny_gated_gemv[(outputs,)](x, weight, out, outputs, K=inputs, STEP=512, PDL=pdl, launch_pdl=pdl, num_warps=8)
    return out


if triton is not None:

    @triton.jit
    def skinny_gated_gemv(x, weight, out, outputs, K: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
        n, k = tl.program_id(0).to(tl.int64), tl.arange(0, STEP)
        kind = out.dtype.element_ty
        gate_at, up_at = weight + n * K + k, weight + (n + outputs) * K + k
        gate, up = tl.load(gate_at, eviction_policy="evict_first"), tl.load(up_at, eviction_policy="evict_first")  # before the wait
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        value = tl.load(x + k).to(tl.float32)
        gates, ups = value * gate.to(tl.float32), value * up.to(tl.float32)
        for start in range(STEP, K, STEP):
            value = tl.load(x + start + k).to(tl.float32)
            gates += value * tl.load(gate_at + start, eviction_policy="evict_first").to(tl.float32)
            ups += value * tl.load(up_at + start, eviction_policy="evict_first").to(tl.float32)
        g, u = tl.sum(gates, 0).to(kind).to(tl.float32), tl.sum(ups, 0).to(kind).to(tl.float32)
        tl.store(out + n, ((g / (1 + tl.exp(-g))).to(kind).to(tl.float32) * u).to(kind))
'''


def propose(sources: dict[str, str], finding: dict) -> dict | list[dict]:
    """One patch or two; see the module docstring."""
    trees = t.parse_all(sources, "F.linear(")
    changed: dict[str, str] = {}
    for file, tree in trees.items():
        path = gpu.new_file(sources, file, "skinny")
        if path in sources:
            return _later(sources, path, finding)
        new: dict[cst.CSTNode, object] = {}
        for node in t.walk(tree):
            if isinstance(node, cst.Call) and t.code(node.func) == "F.linear" and len(node.args) == 2 and not any(a.keyword for a in node.args):
                new[node.func] = cst.parse_expression("skinny.linear")
        if new:
            changed[file] = gpu.imported(t.replace(tree, new), file, sources, "skinny").code
            changed[path] = SKINNY
    if not changed or len(changed) > 3:
        return {"declined": "no products by F.linear without bias" if not changed else f"products in {len(changed)} files"}
    patch = _patch(changed, "Products of few rows at the memory bandwidth", finding, "skinny_gem*", "sums run in float32")
    more = [again for file in changed if file.endswith("skinny.py") and (again := _gated({**sources, **changed}, file, {}, "skinny_g*"))]
    return [patch, *more] if more else patch


def _patch(changed: dict[str, str], title: str, finding: dict, row: str, invariant: str) -> dict:
    return {
        "sources": changed,
        "mechanism": "skinny-gemm",
        "title": title,
        "predicted_us": finding.get("bound_us", 0.0),
        "invariants": [invariant, "more than 32 rows, odd sizes and CPUs go to F.linear"],
        "params": {},
        "activation": {"appear": [{"row": row, "phase": "decode", "ranks": "all"}], "vanish": []},
    }


def _later(sources: dict[str, str], path: str, finding: dict) -> dict:
    """The second patch alone, where `skinny.linear` is there, or why not."""
    if "def gated(" in sources[path]:
        return {"declined": f"{path} is there already, the gated product too"}
    why = f"{path} is there already; no gate and up that come from one product and meet in silu(gate) * up alone"
    return _gated(sources, path, finding, "skinny_gated_gemv") or {"declined": why}


def _gated(sources: dict[str, str], path: str, finding: dict, row: str) -> dict | None:
    """silu(gate) * up inside the product that makes both; `row`: what a trace must show (with several sequences not its kernel)."""
    for file, tree in t.parse_all(sources, "skinny.linear(").items():
        for function in t.functions({file: tree}):
            new = _gate_and_up(function)
            if new is not None:
                before = sources[path].replace("\nimport torch\n", "\nfrom collections.abc import Callable\n\nimport torch\n", 1)
                changed = {file: t.replace(tree, new).code, path: before + GATED}
                return _patch(changed, "silu(gate) * up inside the product of one row", finding, row, "gate and up round before silu, as operators do")
    return None


def _gate_and_up(function: t.Function) -> dict[cst.CSTNode, object] | None:
    """`g, u = skinny.linear(x, w).split(sizes, dim=-1)`, names for g, u and F.silu(g), one `silu_mul(g, u)` or `F.silu(g) * u`."""
    body = list(function.statements())
    for at, statement in enumerate(body):
        split = re.fullmatch(r"(\w+), (\w+) = skinny\.linear\((.+), (\w+)\)\.split\((\w+), dim=-1\)", t.code(statement).strip())
        if split is None:
            continue
        first, second, x, weight, _ = split.groups()
        gone: list[cst.CSTNode] = [statement]
        names = {first: "gate", second: "up"}
        for later in body[at + 1 :]:
            pair = t.assigned(later)
            value = t.code(pair[1]) if pair is not None else ""
            silu = re.fullmatch(r"F\.silu\((\w+)\)", value)
            kind = "silu" if silu is not None and names.get(silu[1]) == "gate" else names.get(value)
            if pair is not None and kind is not None:
                names[pair[0]] = kind
                gone.append(later)
        gates, silus, ups = ("|".join(n for n, kind in names.items() if kind == k) for k in ("gate", "silu", "up"))
        active = rf"F\.silu\((?:{gates})\)" + (f"|{silus}" if silus else "")
        wanted = re.compile(rf"(?:\w+\.)?silu_mul\((?:{gates}), (?:{ups})\)|(?:{active}) \* (?:{ups})")
        uses = [n for s in body if s not in gone for n in t.walk(s) if isinstance(n, cst.Call | cst.BinaryOperation) and wanted.fullmatch(t.code(n))]
        others = sum(n.value in names for s in body if s not in gone for n in t.walk(s) if isinstance(n, cst.Name))
        if len(uses) == 1 and others == 2:
            call = uses[0]
            rest = t.code(call.func) if isinstance(call, cst.Call) else "lambda gate, up: F.silu(gate) * up"
            return {call: cst.parse_expression(f"skinny.gated({x}, {weight}, {rest})")} | dict.fromkeys(gone, cst.RemoveFromParent())
    return None
