"""What the codemods for GPUs share: new files and imports, and the paged attention that two of
them bring.

Pure functions on texts and syntax trees, as in `codemod_tools.py`. Not for: choosing skills, or anything about traces.
"""

from __future__ import annotations

from collections.abc import Iterable

import codemod_tools as t
import libcst as cst

PAGED_ATTENTION = '''"""Decode attention on the pages of the cache where they lie: no gathered copy, no length read by the host.

Each program takes a part of one sequence for one KV head; the part that ends last joins them all. On Hopper it is set up
while the kernel before still runs (programmatic dependent launch). Not for: prompts, two streams at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs: `reference` is all that is used
    triton = None

_ended: dict[tuple[torch.device, int], torch.Tensor] = {}  # parts of a sequence and KV head that have ended; else zero


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """q [G, heads, D], pages k and v [blocks, page, kv_heads, D], tables [G, most], lengths [G] -> [G, heads, D]."""
    if triton is None or not q.is_cuda or q.element_size() != 2:
        return reference(q, k, v, tables, lengths)
    count, heads, size = q.shape
    q, (page, kv_heads) = q.contiguous(), k.shape[1:3]
    tokens, parts = 64, min(16, triton.next_power_of_2(max(2, 64 // count)))  # read at a time; a batch fills the GPU with fewer parts
    if count == 1 and tables.shape[1] * page <= 1024:  # longer ones run what batches of 2 have compiled
        tokens, parts = 32, 8
    out, key = torch.empty_like(q), (q.device, max(4096, triton.next_power_of_2(count * kv_heads)))
    if key not in _ended:
        _ended[key] = torch.zeros(key[1], dtype=torch.int32, device=q.device)
    partial = torch.empty((count, heads, parts, size), dtype=torch.float32, device=q.device)
    sums = torch.empty((count, heads, parts, 2), dtype=torch.float32, device=q.device)
    pdl = torch.cuda.get_device_capability(q.device) >= (9, 0)
    paged_attention_parts[(count, kv_heads, parts)](
        q, k, v, tables, lengths, partial, sums, _ended[key], out, tables.stride(0), size**-0.5,
        PAGE=page, KV=kv_heads, GROUP=heads // kv_heads, ROWS=max(16, heads // kv_heads), D=size, PARTS=parts, TOKENS=tokens,
        PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return out


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The same by gathering whole pages and masking what lies past each length."""
    k, v = k[tables].flatten(1, 2), v[tables].flatten(1, 2)
    mask = torch.arange(k.shape[1], device=q.device) < lengths.unsqueeze(1)
    grouped = q.unflatten(1, (k.shape[2], -1))
    out = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None, None, :])
    return out.flatten(1, 2)


if triton is not None:

    @triton.jit(do_not_specialize=["table_row"])  # it changes with the longest sequence: no step may wait for a compiler
    def paged_attention_parts(q, k, v, tables, lengths, partial, sums, ended, out, table_row, scale, PAGE: tl.constexpr,
               KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
               TOKENS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        if PDL:  # the next kernel may be set up
            tl.extra.cuda.gdc_launch_dependents()
        sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        length = tl.load(lengths + sequence).to(tl.int32)  # a step's numbers were there before its first kernel
        span = tl.cdiv(tl.cdiv(length, PARTS), TOKENS) * TOKENS
        row, position = tables + sequence * table_row, part * span + tl.arange(0, TOKENS)
        block = tl.load(row + position // PAGE, mask=position < length, other=0)
        if PDL:  # queries, and the newest keys and values, must be there; of few sequences the older ones come to L2 meanwhile
            if PARTS > 4:
                lines = ((block.to(tl.int64) * PAGE + position % PAGE) * KV + head)[:, None] * D + (tl.arange(0, D // 64 if D >= 64 else 1) * 64)[None, :]
                tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [k + lines], dtype=tl.int32, is_pure=False, pack=1)
                tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [v + lines], dtype=tl.int32, is_pure=False, pack=1)
            tl.extra.cuda.gdc_wait()
        if part * span < length:
            last = tl.minimum((part + 1) * span, length)
            rows, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TOKENS)
            at, own = (sequence * KV + head) * GROUP + rows, rows < GROUP
            query = tl.load(q + at[:, None] * D + d[None, :], mask=own[:, None], other=0.0)
            top, total, acc = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
            for start in range(part * span, last, TOKENS):
                position = start + t
                inside = position < last
                if start > part * span:
                    block = tl.load(row + position // PAGE, mask=inside, other=0)
                place = ((block.to(tl.int64) * PAGE + position % PAGE) * KV + head) * D
                keys = tl.load(k + place[None, :] + d[:, None], mask=inside[None, :], other=0.0)
                values = tl.load(v + place[:, None] + d[None, :], mask=inside[:, None], other=0.0)
                scores = tl.where(inside[None, :], tl.dot(query, keys) * scale, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                weights, keep = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
                acc = acc * keep[:, None] + tl.dot(weights.to(values.dtype), values)
                total, top = total * keep + tl.sum(weights, 1), higher
            used, count = tl.cdiv(length, span), 0
            if used > 1:
                to = at * PARTS + part
                tl.store(partial + to[:, None] * D + d[None, :], acc, mask=own[:, None])
                tl.store(sums + to * 2, top, mask=own)
                tl.store(sums + to * 2 + 1, total, mask=own)
                tl.debug_barrier()  # all of the program's stores before its count
                count = tl.atomic_add(ended + sequence * KV + head, 1, sem="acq_rel")
            if count == used - 1:  # the last to end, or alone
                if used > 1:
                    each, inside = at[:, None] * PARTS + tl.arange(0, PARTS)[None, :], own[:, None] & (tl.arange(0, PARTS) < used)[None, :]
                    top = tl.max(tl.load(sums + each * 2, mask=inside, other=float("-inf"), cache_modifier=".cg"), 1)
                    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
                    for p in tl.static_range(PARTS):
                        there, of = own & (p < used), at * PARTS + p
                        share = tl.exp(tl.load(sums + of * 2, mask=there, other=float("-inf"), cache_modifier=".cg") - top)
                        total += share * tl.load(sums + of * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                        acc += share[:, None] * tl.load(partial + of[:, None] * D + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
                    tl.store(ended + sequence * KV + head, 0)
                tl.store(out + at[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=own[:, None])
'''


def new_file(sources: t.Sources, beside: str, name: str) -> str:
    """Path of a module `name` in the folder of the file `beside`."""
    folder = beside.rpartition("/")[0]
    return f"{folder}/{name}.py" if folder else f"{name}.py"


def local_names(text: str, file: str, sources: t.Sources) -> str:
    """A template's imports of `engine.x`, spelt as the folder of `file` is imported."""
    folder = file.rpartition("/")[0].replace("/", ".")
    return text if folder == "engine" else text.replace("from engine.", f"from {folder}." if folder else "from ")


def replaced(text: str, pairs: Iterable[tuple[str, str]], file: str, sources: t.Sources) -> tuple[str, str | None]:
    """The text with each pair's first part, found once, replaced by the second; and the first that was not found so.

    The pairs are spelt like a template: see `local_names`.
    """
    for old, new in ((local_names(a, file, sources), local_names(b, file, sources)) for a, b in pairs):
        if text.count(old) != 1:
            return text, old
        text = text.replace(old, new)
    return text, None


def imported(tree: cst.Module, file: str, sources: t.Sources, module: str) -> cst.Module:
    """The tree with an import of a sibling module."""
    return t.add_import(tree, t.sibling_import(file, sources, module))


def paged_attention(sources: t.Sources) -> dict[str, str] | str:
    """Changed files that let decode attention read the pages in place on a GPU; or the reason why not.

    Looked for: a function that looks pages up by a block table of its metadata argument, masks by the lengths of the
    same object, calls scaled_dot_product_attention, and returns [G, heads, D].
    """
    trees = t.parse_all(sources, "scaled_dot_product_attention")
    why = "no attention over pages gathered by a block table"
    for function in t.functions(trees):
        if "decode_attention(" in t.code(function.node):
            return "decode attention reads the pages in place already"
        found = _gathers(function)
        if found is None:
            continue
        cache, keys, values, meta, table = found
        lengths = _lengths(function, meta, table)
        query = next((p for p in function.params if p not in ("self", cache, meta)), None)
        if lengths is None or query is None or f"{query}.unflatten(1" not in t.code(function.node):
            why = f"{function.cls}.{function.name} is not laid out as [sequences, heads, size]"
            continue
        file = new_file(sources, function.file, "paged_attention")
        if file in sources:
            return f"{file} is there already"
        call = f"paged_attention.decode_attention({query}, {cache}.{keys}, {cache}.{values}, {meta}.{table}, {meta}.{lengths})"
        lines = f"if {query}.is_cuda:  # the pages where they lie: nothing is gathered, no length is read\n    return {call}\n"
        tree = t.replace(trees[function.file], t.before(function.statements()[0], lines) | _lone_parts(trees[function.file]))
        return {file: PAGED_ATTENTION, function.file: imported(tree, function.file, sources, "paged_attention").code}
    return why


def _lone_parts(tree: cst.Module) -> dict[cst.CSTNode, object]:
    """`return torch.cat(parts)` of a list that a function fills: a single part is the result, without a copy."""
    new: dict[cst.CSTNode, object] = {}
    for function in t.functions({"": tree}):
        lists = {p[0] for s in function.statements() if (p := t.assigned(s)) and t.code(p[1]) == "[]"}
        for node in t.walk(function.node):
            value = node.value if isinstance(node, cst.Return) else None
            if isinstance(value, cst.Call) and t.code(value.func) == "torch.cat" and len(value.args) == 1:
                name = t.code(value.args[0].value)
                if name in lists:
                    new[value] = cst.parse_expression(f"{name}[0] if len({name}) == 1 else torch.cat({name})")
    return new


def _gathers(function: t.Function) -> tuple[str, str, str, str, str] | None:
    """(cache, keys, values, metadata, table) of `cache.keys[metadata.table]` and the same for values."""
    found: list[tuple[str, str, str, str]] = []
    for node in t.walk(function.node):
        if isinstance(node, cst.Subscript) and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
            pair = node.value, node.slice[0].slice.value
        elif isinstance(node, cst.Call) and t.last_name(node.func) == "gather_pages" and len(node.args) >= 2:
            pair = node.args[0].value, node.args[1].value
        else:
            continue
        pages, table = pair
        if not isinstance(pages, cst.Attribute) or not isinstance(table, cst.Attribute) or "block_table" not in table.attr.value:
            continue
        owners = t.last_name(pages.value), t.last_name(table.value)
        if all(owner in function.params for owner in owners):
            found.append((owners[0], pages.attr.value, owners[1], table.attr.value))
    if len(found) != 2 or found[0][0] != found[1][0] or found[0][2:] != found[1][2:]:
        return None
    (cache, first, meta, table), (_, second, _, _) = found
    return (cache, first, second, meta, table) if "k" in first and "v" in second and first != second else None


def _lengths(function: t.Function, meta: str, table: str) -> str | None:
    """The attribute of the metadata that the mask compares positions with."""
    for node in t.walk(function.node):
        if isinstance(node, cst.Comparison) and any(isinstance(c.operator, cst.LessThan) for c in node.comparisons):
            for inner in t.walk(node.comparisons[0].comparator):
                if isinstance(inner, cst.Attribute) and t.last_name(inner.value) == meta and inner.attr.value != table:
                    return inner.attr.value
    return None
