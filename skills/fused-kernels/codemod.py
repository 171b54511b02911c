"""Triton kernels for the small chains of a decoder layer, each beside the operators that it stands for.

Four parts, one patch each: residual add + RMS norm; norm, rotation and cache write of query and key heads; these and attention in
decode steps of one sequence; silu * up. The part that the finding names comes first, else the first that is not there yet. Found by what the code computes; the
fused path is taken for CUDA tensors only.
"""

from __future__ import annotations

import itertools

import codemod_tools as t
import gpu_tools as gpu
import libcst as cst

NORM = '''"""Residual add and RMS norm in one kernel, beside the operators that it stands for.

Rounds where the operators round (sum, normed value, product with the weight), so the results are theirs. Not for:
norms of heads.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs: `reference` is all that is used
    triton = None


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and delta [T, n] -> (x + delta, its RMS norm times weight); without delta (x, its norm)."""
    on_gpu = triton is not None and x.is_cuda and x.is_contiguous() and (delta is None or delta.is_contiguous())
    return launch(x, delta, weight, eps) if on_gpu else reference(x, delta, weight, eps)


def reference(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if delta is None else x + delta
    x32 = x.float()
    return x, weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def launch(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape
    out, added = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    block, pdl = triton.next_power_of_2(size), torch.cuda.get_device_capability(x.device) >= (9, 0)
    fused_add_rms_norm[(rows,)](x, x if delta is None else delta, weight, added, out, eps, N=size, BLOCK=block, ADD=delta is not None,
                     PDL=pdl, launch_pdl=pdl, num_warps=min(16, max(1, block // 512)))  # fmt: skip
    return added, out


if triton is not None:

    @triton.jit
    def fused_add_rms_norm(x, delta, weight, added, out, eps, N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        i = tl.arange(0, BLOCK)
        inside, at = i < N, tl.program_id(0).to(tl.int64) * N + i
        kind = out.dtype.element_ty
        factor = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        if PDL:  # the next kernel may be set up; what this one reads must be there
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            value = (value + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(kind)
            tl.store(added + at, value, mask=inside)
            value = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / N + eps)
        normed = (value * scale).to(kind).to(tl.float32)
        tl.store(out + at, (normed * factor).to(kind), mask=inside)
'''

HEADS = '''"""Norm and rotation of query and key heads and the write to the cache in one kernel, beside what it stands for.

Rounds where the operators round, so the results are theirs. Not for: attention itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs: `reference` is all that is used
    triton = None


def norm_rotate_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_norm: Any, k_norm: Any, rotary: Any, positions: torch.Tensor,
    cache: Any, slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q [T, heads, D], k and v [T, kv_heads, D] -> normed and rotated q and k; k and v go to the cache at `slots`."""
    plain = all(x.stride(-1) == 1 and x.stride(1) == x.shape[2] for x in (q, k, v))
    call = launch if triton is not None and q.is_cuda and plain else reference
    return call(q, k, v, q_norm, k_norm, rotary, positions, cache, slots)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_norm: Any, k_norm: Any, rotary: Any, positions: torch.Tensor,
    cache: Any, slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    q, k = rotary(q_norm(q), positions), rotary(k_norm(k), positions)
    cache.write(k, v, slots)
    return q, k


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_norm: Any, k_norm: Any, rotary: Any, positions: torch.Tensor,
    cache: Any, slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    (count, heads, size), kv_heads = q.shape, k.shape[1]
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    pdl = torch.cuda.get_device_capability(q.device) >= (9, 0)
    each = 1 if count <= 32 else math.gcd(heads, kv_heads, 8)  # few tokens: all heads beside each other; many: fewer programs
    fused_qk_norm_rope[(count, (heads + kv_heads) // each)](
        q, k, v, q_norm.weight, k_norm.weight, rotary.cos, rotary.sin, positions, slots, q_out, k_out, cache.k, cache.v,
        q.stride(0), k.stride(0), v.stride(0), q_norm.eps, HEADS=heads, KV=kv_heads, HALF=size // 2, EACH=each,
        PDL=pdl, launch_pdl=pdl, num_warps=max(1, each // 2),
    )  # fmt: skip
    return q_out, k_out


if triton is not None:

    @triton.jit
    def fused_qk_norm_rope(q, k, v, q_weight, k_weight, cos, sin, positions, slots, q_out, k_out, k_cache, v_cache, q_row, k_row, v_row, eps,
                HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        if PDL:  # the next kernel may be set up
            tl.extra.cuda.gdc_launch_dependents()
        t, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH + tl.arange(0, EACH)[:, None], tl.arange(0, HALF)[None, :]
        slot = tl.load(slots + t)  # a step's numbers were there before its first kernel: read while the one before this ends
        angle = tl.load(positions + t) * 2 * HALF + i  # both halves of a row of the tables are the same
        kind = q_out.dtype.element_ty
        c, s = tl.load(cos + angle).to(kind).to(tl.float32), tl.load(sin + angle).to(kind).to(tl.float32)
        of_q = tl.program_id(1) < HEADS // EACH
        weight = (q_weight if of_q else k_weight) + i
        first, second = tl.load(weight).to(tl.float32), tl.load(weight + HALF).to(tl.float32)
        if PDL:  # q, k and v must be there
            tl.extra.cuda.gdc_wait()
        if of_q:
            a, b = _turn(q + t * q_row + head * 2 * HALF + i, first, second, c, s, eps, kind, HALF)
            at = q_out + (t * HEADS + head) * 2 * HALF + i
            tl.store(at, a)
            tl.store(at + HALF, b)
        else:
            head -= HEADS
            a, b = _turn(k + t * k_row + head * 2 * HALF + i, first, second, c, s, eps, kind, HALF)
            at, to = k_out + (t * KV + head) * 2 * HALF + i, (slot * KV + head) * 2 * HALF + i
            tl.store(at, a)
            tl.store(at + HALF, b)
            tl.store(k_cache + to, a)
            tl.store(k_cache + to + HALF, b)
            value = v + t * v_row + head * 2 * HALF + i
            tl.store(v_cache + to, tl.load(value))
            tl.store(v_cache + to + HALF, tl.load(value + HALF))

    @triton.jit
    def _turn(x, first, second, c, s, eps, kind: tl.constexpr, HALF: tl.constexpr):
        a, b = tl.load(x).to(tl.float32), tl.load(x + HALF).to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = ((a * scale).to(kind).to(tl.float32) * first).to(kind).to(tl.float32)
        b = ((b * scale).to(kind).to(tl.float32) * second).to(kind).to(tl.float32)
        turned = (a * c).to(kind).to(tl.float32) + (-b * s).to(kind).to(tl.float32)
        other = (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)
        return turned.to(kind), other.to(kind)
'''

ACTIVATION = '''"""silu(gate) * up in one kernel, beside the operators that it stands for; rounds where they round."""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs: `reference` is all that is used
    triton = None


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate and up [T, n], rows may be parts of wider ones -> [T, n]."""
    plain = gate.dim() == 2 and gate.stride(1) == 1 and up.stride(1) == 1
    return launch(gate, up) if triton is not None and gate.is_cuda and plain else reference(gate, up)


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def launch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    rows, size = gate.shape
    out = gate.new_empty(gate.shape)
    pdl = torch.cuda.get_device_capability(gate.device) >= (9, 0)
    silu_and_mul[(rows, triton.cdiv(size, 1024))](
        gate, up, out, gate.stride(0), up.stride(0), N=size, BLOCK=1024, PDL=pdl, launch_pdl=pdl
    )
    return out


if triton is not None:

    @triton.jit
    def silu_and_mul(gate, up, out, gate_row, up_row, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
        if PDL:  # the next kernel may be set up; what this one reads must be there
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        kind = out.dtype.element_ty
        inside = i < N
        g = tl.load(gate + row * gate_row + i, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + i, mask=inside, other=0.0).to(tl.float32)
        active = (g / (1 + tl.exp(-g))).to(kind).to(tl.float32)
        tl.store(out + row * N + i, (active * u).to(kind), mask=inside)
'''


ONE_SEQUENCE = '''"""A decode step of one sequence, from the product of q, k and v to the output product, in one kernel.

Each program takes the query heads of one KV head and up to 256 tokens; the one that ends last joins them. On Hopper earlier tokens come
while the kernel before still runs. Rounds where the operators round. Not for: prompts, several sequences; `attend` declines those.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs: nothing here is used
    triton = None

TOKENS, LONGEST, FITS = 256, 1024, (9, 10)  # of a program, of a sequence; compute capabilities (major) with 128 KiB of shared memory
_ended: dict[tuple[torch.device, int], torch.Tensor] = {}  # parts of a KV head that have ended; else zero


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_norm: Any, k_norm: Any, rotary: Any, positions: torch.Tensor, cache: Any, metadata: Any
) -> torch.Tensor | None:
    """q [1, heads, D], k and v [1, kv_heads, D] before their norms -> [1, heads, D]; None where the caller must compute it."""
    (count, heads, size), (page, kv_heads), tables = q.shape, cache.k.shape[1:3], metadata.block_tables
    if triton is None or count != 1 or metadata.num_context_tokens or tables.shape[1] * page > LONGEST or not q.is_cuda or q.element_size() != 2:
        return None
    major, plain = torch.cuda.get_device_capability(q.device)[0], all(x.stride(-1) == 1 and x.stride(1) == size for x in (q, k, v))
    if major not in FITS or not plain or size not in (16, 32, 64, 128):
        return None
    group, parts = heads // kv_heads, triton.next_power_of_2(triton.cdiv(tables.shape[1] * page, TOKENS))
    out, key = q.new_empty(q.shape), (q.device, kv_heads)
    if key not in _ended:
        _ended[key] = torch.zeros(kv_heads, dtype=torch.int32, device=q.device)
    partial = torch.empty((heads, parts, size + 2), dtype=torch.float32, device=q.device)
    qk_norm_rope_attention[(kv_heads, parts)](
        q, k, v, q_norm.weight, k_norm.weight, rotary.cos, rotary.sin, positions, metadata.slot_mapping, cache.k, cache.v, tables, metadata.seq_lens,
        partial, _ended[key], out, tables.shape[1], q_norm.eps, size**-0.5, PAGE=page, KV=kv_heads, GROUP=group, ROWS=triton.next_power_of_2(max(16, group)),
        D=size, TOKENS=TOKENS, PARTS=parts, PDL=major >= 9, launch_pdl=major >= 9, num_warps=8,
    )  # fmt: skip
    return out


if triton is not None:

    @triton.jit(do_not_specialize=["width"])  # it changes with the sequence: no step may wait for a compiler
    def qk_norm_rope_attention(q, k, v, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache, tables, lengths, partial, ended, out, width, eps, scale, PAGE: tl.constexpr,
                KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        head, part = tl.program_id(0), tl.program_id(1)
        kind = out.dtype.element_ty
        first, t, d, rows = part * TOKENS, part * TOKENS + tl.arange(0, TOKENS), tl.arange(0, D), tl.arange(0, ROWS)
        last = tl.load(lengths).to(tl.int32) - 1  # a step's numbers, and what earlier steps wrote, were there before its first kernel
        place = ((tl.load(tables + t // PAGE, mask=t // PAGE < width, other=0).to(tl.int64) * PAGE + t % PAGE) * KV + head) * D
        old, own, at, slot = t < last, rows < GROUP, (head * GROUP + rows)[:, None] * D, (tl.load(slots) * KV + head) * D
        every, other = rows[:, None] * 0 + d[None, :], rows[:, None] * 0 + ((d + D // 2) % D)[None, :]
        c, s = tl.load(cos + tl.load(positions) * D + every).to(kind), tl.load(sin + tl.load(positions) * D + every).to(kind)
        q_own, q_other, k_own, k_other = tl.load(q_weight + every), tl.load(q_weight + other), tl.load(k_weight + every), tl.load(k_weight + other)
        query, acc, top, total = tl.zeros([ROWS, D], kind), tl.zeros([ROWS, D], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        for turn in tl.range(0, tl.where(first <= last, 1, 0), num_stages=2):  # a pipeline: its loads are under way before the turn, and its wait
            keys = tl.load(k_cache + place[None, :] + d[:, None], mask=old[None, :], other=0.0)
            values = tl.load(v_cache + place[:, None] + d[None, :], mask=old[:, None], other=0.0)
            if turn == 0:  # always; loads in here are not moved to before the wait
                if PDL:  # the next kernel's loads come behind these; q, k and v must be there
                    tl.extra.cuda.gdc_launch_dependents()
                    tl.extra.cuda.gdc_wait()
                x, y = tl.load(q + at + every, mask=own[:, None], other=0.0), tl.load(q + at + other, mask=own[:, None], other=0.0)
                a, b, value = tl.load(k + head * D + every), tl.load(k + head * D + other), tl.load(v + head * D + d)
                exact, key = normed_rotated(x, y, q_own, q_other, c, s, eps, kind, D), normed_rotated(a, b, k_own, k_other, c, s, eps, kind, D)
                query = exact.to(kind)
                if last - first < TOKENS:  # the newest token is among these
                    tl.store(k_cache + slot + every, key.to(kind), mask=rows[:, None] + every * 0 == 0)
                    tl.store(v_cache + slot + d, value)
                    top, total, acc = tl.sum(exact * key, 1) * scale, total + 1.0, acc + value.to(tl.float32)[None, :]
            scores = tl.where(old[None, :], tl.dot(query, keys) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights, keep = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
            acc = tl.dot(weights.to(kind), values, acc * keep[:, None])
            total, top = total * keep + tl.sum(weights, 1), higher
        if first <= last:
            used, count, to = last // TOKENS + 1, 0, (head * GROUP + rows) * PARTS
            if used > 1:
                mine = partial + (to + part) * (D + 2)
                tl.store(mine, top, mask=own)
                tl.store(mine + 1, total, mask=own)
                tl.store(mine[:, None] + 2 + d[None, :], acc, mask=own[:, None])
                tl.debug_barrier()  # all of the program's stores before its count
                count = tl.atomic_add(ended + head, 1, sem="acq_rel")
            if count == used - 1:  # the last to end, or alone
                if used > 1:
                    each, inside = partial + (to[:, None] + tl.arange(0, PARTS)[None, :]) * (D + 2), own[:, None] & (tl.arange(0, PARTS) < used)[None, :]
                    top = tl.max(tl.load(each, mask=inside, other=float("-inf"), cache_modifier=".cg"), 1)
                    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
                    for p in tl.static_range(PARTS):
                        there, of = own & (p < used), partial + (to + p) * (D + 2)
                        share = tl.exp(tl.load(of, mask=there, other=float("-inf"), cache_modifier=".cg") - top)
                        total += share * tl.load(of + 1, mask=there, other=0.0, cache_modifier=".cg")
                        acc += share[:, None] * tl.load(of[:, None] + 2 + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
                    tl.store(ended + head, 0)
                tl.store(out + at + d[None, :], (acc / total[:, None]).to(kind), mask=own[:, None])

    @triton.jit
    def normed_rotated(x, y, weight, other_weight, c, s, eps, kind: tl.constexpr, D: tl.constexpr):
        """x [ROWS, D], y the same with its halves swapped -> float32, rounded where the operators round."""
        x, y, c, s = x.to(tl.float32), y.to(tl.float32), c.to(tl.float32), tl.where(tl.arange(0, D) < D // 2, -1.0, 1.0)[None, :] * s.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = ((x * scale).to(kind).to(tl.float32) * weight.to(tl.float32)).to(kind).to(tl.float32)
        y = ((y * scale).to(kind).to(tl.float32) * other_weight.to(tl.float32)).to(kind).to(tl.float32)
        return ((x * c).to(kind).to(tl.float32) + (y * s).to(kind).to(tl.float32)).to(kind).to(tl.float32)
'''


def propose(sources: dict[str, str], finding: dict) -> dict | list[dict]:
    """One patch: the part that the finding names, or the first that applies; with the heads' comes that of one sequence."""
    name = str(finding.get("id", "")).partition(":")[2]
    if "all-reduce" in name:
        return {"declined": "the sum over the ranks is not among its chains (all-reduce-rms-fusion)"}
    order = sorted(PARTS, key=lambda part: not any(word in name for word in PARTS[part][1]))
    whys = []
    for part in order:
        changed = PARTS[part][0](sources)
        if isinstance(changed, str):
            whys.append(f"{part}: {changed}")
            continue
        more = one_sequence({**sources, **changed}) if part == HEADS_PART else ""
        first = _patch(part, changed, finding.get("bound_us"))
        return first if isinstance(more, str) else [first, _patch(ONE_SEQUENCE_PART, more, 0.0)]
    return {"declined": "; ".join(whys)}


def _patch(part: str, changed: dict[str, str], predicted_us: float | None) -> dict:
    _, _, row, also = PARTS[part]
    return {
        "sources": changed,
        "mechanism": "fused-kernels",
        "title": f"One kernel for {part}",
        "predicted_us": predicted_us,
        "invariants": ["rounds where the operators round", "rows are contiguous, or the operators are used"],
        "params": {"part": part},
        "also": list(also),
        "activation": {"appear": [{"row": row, "phase": "decode", "ranks": "all"}], "vanish": []},
    }


# -- silu(gate) * up -----------------------------------------------------------------------------------------------


def activation(sources: dict[str, str]) -> dict[str, str] | str:
    """`gate = F.silu(...)` and `up = ...` whose only use is the product `gate * up`, or that product as a function handed on."""
    trees = t.parse_all(sources, "silu(")
    for function in t.functions(trees):
        values = {p[0]: (p[1], s) for s in function.statements() if (p := t.assigned(s))}
        for node in t.walk(function.node):
            if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Multiply):
                continue
            gate, up = t.code(node.left), t.code(node.right)
            silu = values.get(gate, (None, None))[0]
            if not isinstance(silu, cst.Call) or t.code(silu.func) not in ("F.silu", "torch.nn.functional.silu") or up not in values:
                continue
            if sum(isinstance(n, cst.Name) and n.value == gate for n in t.walk(function.node)) != 2:
                continue
            file = gpu.new_file(sources, function.file, "fused_activation")
            if file in sources:
                return f"{file} is there already"
            new: dict[cst.CSTNode, object] = {silu: silu.args[0].value, node: cst.parse_expression(f"fused_activation.silu_mul({gate}, {up})")}
            tree = gpu.imported(t.replace(trees[function.file], new), function.file, sources, "fused_activation")
            return {file: ACTIVATION, function.file: tree.code}
    for where, tree in trees.items():
        handed = [n for n in t.walk(tree) if isinstance(n, cst.Lambda) and t.code(n) == "lambda gate, up: F.silu(gate) * up"]
        file = gpu.new_file(sources, where, "fused_activation")
        if handed and file not in sources:
            tree = t.replace(tree, {n: cst.parse_expression("fused_activation.silu_mul") for n in handed})
            return {file: ACTIVATION, where: gpu.imported(tree, where, sources, "fused_activation").code}
    return "no product of silu(gate) and up"


# -- residual add + norm -------------------------------------------------------------------------------------------

def norm(sources: dict[str, str]) -> dict[str, str] | str:
    """A decoder layer of two residual branches, a loop over layers and a last norm: the sums move into the norms."""
    trees = t.parse_all(sources, "Module")
    classes = t.classes(trees)
    norms = {n for n, c in classes.items() if _is_norm(c)}
    if not norms:
        return "no RMS norm module whose arithmetic is known"
    for cls in classes.values():
        branches = _layer(cls, norms)
        if branches is None:
            continue
        model = next((m for c in classes.values() if c.file == cls.file and (m := _model(c, cls.node.name.value, norms))), None)
        if model is None:
            return f"the loop over {cls.node.name.value} was not recognised"
        file = gpu.new_file(sources, cls.file, "fused_norm")
        if file in sources:
            return f"{file} is there already"
        new: dict[cst.CSTNode, object] = {**_rewrite_layer(cls, branches), **model, **_rewrite_norm(classes, norms)}
        tree = gpu.imported(t.replace(trees[cls.file], new), cls.file, sources, "fused_norm")
        return {file: NORM, cls.file: tree.code}
    return "no layer of the form x = x + f(norm(x)); return x + g(norm(x))"


def _is_norm(cls: t.Class) -> bool:
    """Its forward is weight * (x32 * rsqrt(mean(x32^2) + eps)).to(dtype), or torch's rms_norm; it keeps `eps`."""
    forward = cls.methods.get("forward")
    if forward is None or "eps" not in t.attributes_set(cls) or len(forward.params) != 2:
        return False
    text = t.code(forward.node).replace(" ", "").replace("\n", "")
    by_hand = ".float()" in text and ".pow(2).mean(-1,keepdim=True)" in text and "torch.rsqrt(" in text and "self.weight*(" in text
    return by_hand or "F.rms_norm(" in text


def _layer(cls: t.Class, norms: set[str]) -> tuple[str, cst.Call, str, cst.Call, str] | None:
    """(stream, first branch, its norm, second branch, its norm) of `x = x + f(n1(x), ...)`, `return x + g(n2(x), ...)`."""
    forward = cls.methods.get("forward")
    built = {a: t.last_name(v) for a, v in t.attributes_set(cls).items()}
    body = list(forward.statements()) if forward else []
    if len(body) != 2 or (pair := t.assigned(body[0])) is None:
        return None
    last = body[1].body[0] if isinstance(body[1], cst.SimpleStatementLine) else None
    if not isinstance(last, cst.Return) or last.value is None:
        return None
    found = []
    for value in (pair[1], last.value):
        plus = isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add) and t.code(value.left) == pair[0]
        call = value.right if plus and isinstance(value, cst.BinaryOperation) else None
        inner = call.args[0].value if isinstance(call, cst.Call) and call.args else None
        if not isinstance(call, cst.Call) or not isinstance(inner, cst.Call) or t.code(inner.args[0].value) != pair[0]:
            return None
        name = t.last_name(inner.func)
        if built.get(name) not in norms or t.code(inner.func) != f"self.{name}":
            return None
        found += [call, name]
    return (pair[0], *found)  # type: ignore[return-value]


def _rewrite_layer(cls: t.Class, branches: tuple[str, cst.Call, str, cst.Call, str]) -> dict[cst.CSTNode, object]:
    x, first, norm1, second, norm2 = branches
    forward = cls.methods["forward"]
    calls = [c.with_changes(args=[c.args[0].with_changes(value=cst.Name("normed")), *c.args[1:]]) for c in (first, second)]
    lines = f"{x}, normed = self.{norm1}.add({x}, delta)\ndelta = {t.code(calls[0])}\n"
    lines += f"{x}, normed = self.{norm2}.add({x}, delta)\nreturn {x}, {t.code(calls[1])}\n"
    body = list(forward.statements())
    new: dict[cst.CSTNode, object] = {body[0]: t.statements(lines), body[1]: cst.RemoveFromParent()}
    where = next(p for p in forward.node.params.params if p.name.value == x)
    delta = cst.Param(cst.Name("delta"), cst.Annotation(cst.parse_expression("torch.Tensor | None")), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    new[where] = cst.FlattenSentinel([where.with_changes(comma=comma), delta])
    if forward.node.returns is not None:
        new[forward.node.returns.annotation] = cst.parse_expression("tuple[torch.Tensor, torch.Tensor]")
    return new


def _model(cls: t.Class, layer: str, norms: set[str]) -> dict[cst.CSTNode, object] | None:
    """Edits of a forward with `for layer, ... in ...: x = layer(x, ...)` and `return self.norm(x)`."""
    forward = cls.methods.get("forward")
    if forward is None or layer not in t.code(cls.node):
        return None
    built = {a: t.last_name(v) for a, v in t.attributes_set(cls).items()}
    body = list(forward.statements())
    at = next((n for n, s in enumerate(body) if isinstance(s, cst.For)), None)
    if at is None or at != len(body) - 2:
        return None
    loop, last = body[at], body[-1]
    assert isinstance(loop, cst.For)
    inner = loop.body.body[0] if isinstance(loop.body, cst.IndentedBlock) and len(loop.body.body) == 1 else None
    pair = t.assigned(inner) if inner is not None else None
    end = last.body[0] if isinstance(last, cst.SimpleStatementLine) else None
    if pair is None or inner is None or not isinstance(pair[1], cst.Call) or not isinstance(end, cst.Return) or not isinstance(end.value, cst.Call):
        return None
    x, name = pair[0], t.last_name(end.value.func)
    if t.code(pair[1].args[0].value) != x or built.get(name) not in norms or t.code(end.value.args[0].value) != x:
        return None
    call = pair[1].with_changes(args=[pair[1].args[0].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))), cst.Arg(cst.Name("delta"), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))), *pair[1].args[1:]])
    new: dict[cst.CSTNode, object] = dict(t.before(loop, "delta: torch.Tensor | None = None  # what the last branch adds: the next norm's kernel does it\n"))
    new[inner] = t.statements(f"{x}, delta = {t.code(call)}\n")[0]
    new[end.value] = cst.parse_expression(f"self.{name}.add({x}, delta)[1]")
    return new


def _rewrite_norm(classes: dict[str, t.Class], norms: set[str]) -> dict[cst.CSTNode, object]:
    """Each norm module gets `add`; its forward stays for norms of heads."""
    text = """def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    \"\"\"(x + delta, its norm): the residual stream and what the next branch reads.\"\"\"
    return fused_norm.add_rms_norm(x, delta, self.weight, self.eps)
"""
    new: dict[cst.CSTNode, object] = {}
    for name in norms:
        node = classes[name].methods["forward"].node
        method = t.statements(text)[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        new[node] = lambda updated, method=method: [updated, method]
    return new


# -- query and key heads ---------------------------------------------------------------------------------------------


def heads(sources: dict[str, str]) -> dict[str, str] | str:
    """`q = self.rotary(self.q_norm(q), p)`, the same for k, `cache.write(k, v, slots)`: three statements in a row."""
    for file, tree in t.parse_all(sources, "rotary").items():
        for function in t.functions({file: tree}):
            body = list(function.statements())
            for at in range(len(body) - 2):
                call = _heads(body[at : at + 3])
                if call is None:
                    continue
                path = gpu.new_file(sources, file, "fused_heads")
                if path in sources:
                    return f"{path} is there already"
                new: dict[cst.CSTNode, object] = {body[at]: t.statements(call), body[at + 1]: cst.RemoveFromParent(), body[at + 2]: cst.RemoveFromParent()}
                return {path: HEADS, file: gpu.imported(t.replace(tree, new), file, sources, "fused_heads").code}
    return "no norm, rotation and cache write of query and key heads in a row"


def _heads(body: list[cst.BaseStatement]) -> str | None:
    """The one call that stands for the three statements."""
    turned = []
    for statement in body[:2]:
        text = t.code(statement).strip()
        pair = t.assigned(statement)
        call = pair[1] if pair else None
        inner = call.args[0].value if isinstance(call, cst.Call) and len(call.args) == 2 else None
        if pair is None or not isinstance(call, cst.Call) or not isinstance(inner, cst.Call) or len(inner.args) != 1 or t.code(inner.args[0].value) != pair[0]:
            return None
        if "rotary" not in t.code(call.func) or "norm" not in t.last_name(inner.func) or not text:
            return None
        turned.append((pair[0], t.code(inner.func), t.code(call.func), t.code(call.args[1].value)))
    write = body[2].body[0] if isinstance(body[2], cst.SimpleStatementLine) else None
    call = write.value if isinstance(write, cst.Expr) else None
    if not isinstance(call, cst.Call) or t.last_name(call.func) != "write" or len(call.args) != 3 or turned[0][2:] != turned[1][2:]:
        return None
    (q, q_norm, rotary, positions), (k, k_norm, _, _) = turned
    written, values, slots = (t.code(a.value) for a in call.args)
    if written != k or not isinstance(call.func, cst.Attribute):
        return None
    cache = t.code(call.func.value)
    return f"{q}, {k} = fused_heads.norm_rotate_write(\n    {q}, {k}, {values}, {q_norm}, {k_norm}, {rotary}, {positions}, {cache}, {slots}\n)\n"


def one_sequence(sources: dict[str, str]) -> dict[str, str] | str:
    """`q, k = fused_heads.norm_rotate_write(...)` and `out = <backend>.attend(q, k, v, cache, metadata)` behind it."""
    if not all(t.parse_all(sources, f"{name}: ") for name in ("block_tables", "seq_lens", "num_context_tokens", "slot_mapping")):
        return "no metadata of a step with block tables and lengths"
    for file, tree in t.parse_all(sources, "fused_heads.norm_rotate_write").items():
        for function in t.functions({file: tree}):
            body = list(function.statements())
            for fused, attention in itertools.pairwise(body):
                lines = _one_sequence(fused, attention)
                if lines is None:
                    continue
                path = gpu.new_file(sources, file, "fused_decode")
                if path in sources:
                    return f"{path} is there already"
                new: dict[cst.CSTNode, object] = {fused: t.statements(lines), attention: cst.RemoveFromParent()}
                return {path: ONE_SEQUENCE, file: gpu.imported(t.replace(tree, new), file, sources, "fused_decode").code}
    return "no attention right behind the kernel of the heads"


def _one_sequence(fused: cst.BaseStatement, attention: cst.BaseStatement) -> str | None:
    """The statements that stand for the two."""
    pair, call = t.assigned(attention), _call(fused)
    if pair is None or call is None or t.code(call.func) != "fused_heads.norm_rotate_write" or len(call.args) != 9:
        return None
    q, k, v, q_norm, k_norm, rotary, positions, cache, slots = (t.code(a.value) for a in call.args)
    attend = pair[1] if isinstance(pair[1], cst.Call) and t.last_name(pair[1].func) == "attend" else None
    if attend is None or [t.code(a.value) for a in attend.args] != [q, k, v, cache, slots.removesuffix(".slot_mapping")]:
        return None
    same, out = f"{q}, {k}, {v}, {q_norm}, {k_norm}, {rotary}, {positions}, {cache}", pair[0]
    inner = f"    {q}, {k} = fused_heads.norm_rotate_write({same}, {slots})\n    {t.code(attention).strip()}\n"
    return f"{out} = fused_decode.attend({same}, {slots.removesuffix('.slot_mapping')})\nif {out} is None:\n{inner}"


def _call(statement: cst.BaseStatement) -> cst.Call | None:
    """The call whose value the statement assigns, to one name or several."""
    only = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None
    return only.value if isinstance(only, cst.Assign) and isinstance(only.value, cst.Call) else None


# Between the product of q, k and v and attention nothing else is left: these findings lose what they had there.
BEFORE_ATTENTION = (
    "unfused-chains:rmsnorm", "unfused-chains:rotary-embedding-with-cache-lookup", "unfused-chains:kv-cache-write",
    "redundant-copies", "step-invariant-work",
)  # fmt: skip
HEADS_PART, ONE_SEQUENCE_PART = "norm, rotation and cache write of heads", "heads and attention of one sequence"
# Part: (rewrite, words of the finding that names it, its kernel in a trace, further findings that it answers).
PARTS = {
    "residual add and norm": (norm, ("rmsnorm", "residual"), "fused_add_rms_norm", ()),
    HEADS_PART: (heads, ("rotary", "rope", "kv-cache"), "*qk_norm_rope*", BEFORE_ATTENTION),
    ONE_SEQUENCE_PART: (one_sequence, ("attention",), "*qk_norm_rope*", ()),  # with several sequences a step has the heads' alone
    "silu(gate) * up": (activation, ("swiglu", "silu"), "silu_and_mul", ()),
}
