"""Run every kernel of the GPU skills by Triton's interpreter: python kernel_cases.py TREE, with TRITON_INTERPRET=1.

TREE holds the engine with all GPU skills in it. The launches are the skills' own, on CPU tensors; half precision, as the interpreter's
bfloat16 neither rounds nor multiplies matrices as a GPU does. Prints a JSON object: case -> [largest difference, largest value].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(sys.argv[1]).resolve()))
torch.cuda.get_device_capability = lambda device=None: (8, 0)  # no dependent launches
torch.set_default_dtype(torch.float16)
torch.manual_seed(1)

from engine import fused_activation, fused_decode, fused_heads, fused_norm, paged_attention, skinny  # noqa: E402
from engine.kv_cache import LayerCache  # noqa: E402
from engine.model import RMSNorm, RotaryEmbedding  # noqa: E402

found: dict[str, list[float]] = {}


def compare(case: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape, case
    found[case] = [(got.float() - wanted.float()).abs().max().item(), wanted.float().abs().max().item()]


def on_gpu(function, *args):
    """The function as if its tensors were on a GPU."""
    torch.Tensor.is_cuda = True  # type: ignore[assignment]
    try:
        return function(*args)
    finally:
        del torch.Tensor.is_cuda


def products() -> None:
    own = skinny.sizes
    for outputs, inputs in ((4096, 4096), (4096, 2048), (4096, 1024), (6144, 4096), (4096, 12288), (4096, 6144), (151936, 4096), (300, 2560)):
        x, weight = torch.randn(1, inputs), torch.randn(21, inputs) / inputs**0.5  # a few rows, in sizes for all
        skinny.sizes = lambda *_, shape=(outputs, inputs): own(*shape)
        compare(f"one row, {outputs} x {inputs}", skinny.launch(x, weight), x @ weight.T)
    skinny.sizes = own
    for rows, outputs, inputs in ((2, 70, 1024), (16, 33, 512), (17, 40, 1024), (32, 64, 512)):
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
        compare(f"{rows} rows", skinny.launch_few(x, weight), x @ weight.T)
    x, weight = torch.randn(1, 1536), torch.randn(2 * 19, 1536) / 1536**0.5
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    got = on_gpu(skinny.gated, x, weight, lambda gate, up: torch.full_like(gate, float("nan")))  # the operators would show
    compare("gated", got, torch.nn.functional.silu(gate) * up)


def attention() -> None:
    kv_heads, heads, pages = 2, 8, 90
    k, v = torch.randn(pages, 16, kv_heads, 128), torch.randn(pages, 16, kv_heads, 128)
    for lengths, wide in (([1], 64), ([16], 64), ([33], 64), ([140], 64), ([1000], 64), ([1100], 128), ([5, 70, 300], 64), ([17] * 33, 4)):
        q = torch.randn(len(lengths), heads, 128)
        tables = torch.randint(0, pages, (len(lengths), wide), dtype=torch.int32)
        args = q, k, v, tables, torch.tensor(lengths, dtype=torch.int32)
        got = on_gpu(paged_attention.decode_attention, *args)
        compare(f"attention over {lengths[:3]}", got, paged_attention.reference(*args))
    found["counts that are left"] = [float(sum(int(counts.abs().sum()) for counts in paged_attention._ended.values())), 0.0]


def chains() -> None:
    x, delta, weight = torch.randn(3, 160), torch.randn(3, 160), torch.randn(160)
    for name, more in (("sum and norm", delta), ("norm", None)):
        for part, got, wanted in zip(("sum", "normed"), fused_norm.launch(x, more, weight, 1e-6), fused_norm.reference(x, more, weight, 1e-6), strict=True):
            compare(f"{name}: {part}", got, wanted)
    gate, up = torch.randn(3, 2300).split([1200, 1100], dim=-1)
    compare("silu(gate) * up", fused_activation.launch(gate[:, :1100], up), fused_activation.reference(gate[:, :1100], up))


def head_rows() -> None:
    """Few tokens take a program for each head, many one for several heads: as many as divide both kinds."""
    for heads, kv_heads, tokens in ((4, 2, 3), (6, 3, 33), (16, 8, 33)):
        size = 16
        q, k, v = torch.randn(tokens, (heads + 2 * kv_heads) * size).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        q, k, v = q.view(tokens, heads, size), k.view(tokens, kv_heads, size), v.view(tokens, kv_heads, size)
        norms = [RMSNorm(size, 1e-6) for _ in range(2)]
        for norm in norms:
            norm.weight.data = torch.randn(size)
        rotary = RotaryEmbedding(size, 10000.0)
        rotary.build(64, torch.device("cpu"))
        slots, positions = torch.randperm(48)[:tokens], torch.randint(0, 64, (tokens,))
        caches = [LayerCache(torch.zeros(3, 16, kv_heads, size), torch.zeros(3, 16, kv_heads, size)) for _ in range(2)]
        with torch.no_grad():
            got, wanted = (call(q, k, v, *norms, rotary, positions, cache, slots) for call, cache in zip((fused_heads.launch, fused_heads.reference), caches, strict=True))
        for name, one, two in (("queries", got[0], wanted[0]), ("keys", got[1], wanted[1]), ("cached keys", caches[0].k, caches[1].k), ("cached values", caches[0].v, caches[1].v)):
            compare(f"{name} of {tokens} tokens, {heads} and {kv_heads} heads", one, two)


def one_sequence() -> None:
    """One kernel beside the heads' operators and attention by gathered pages; tables are as wide as the sequence, or wider."""
    kv_heads, heads, size, pages = 2, 6, 64, 90
    norms = [RMSNorm(size, 1e-6) for _ in range(2)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
    rotary = RotaryEmbedding(size, 1000000.0)
    rotary.build(1100, torch.device("cpu"))
    fused_decode.FITS = (8,)  # what stands above for the GPU
    for length, wide in ((1, 1), (16, 1), (17, 64), (140, 9), (256, 16), (257, 17), (1024, 64)):
        row = torch.randn(1, (heads + 2 * kv_heads) * size)
        q, k, v = (x.view(1, -1, size) for x in row.split([heads * size, kv_heads * size, kv_heads * size], dim=-1))
        tables, last = torch.randperm(pages)[:wide].view(1, wide).int(), length - 1
        step = SimpleNamespace(
            block_tables=tables, seq_lens=torch.tensor([length], dtype=torch.int32), num_context_tokens=0, slot_mapping=(tables[0, last // 16] * 16 + last % 16).long().view(1)
        )
        cache = LayerCache(torch.randn(pages, 16, kv_heads, size), torch.randn(pages, 16, kv_heads, size))
        same, positions = LayerCache(cache.k.clone(), cache.v.clone()), torch.tensor([last])
        got = on_gpu(fused_decode.attend, q, k, v, *norms, rotary, positions, cache, step)
        turned, _ = fused_heads.reference(q, k, v, *norms, rotary, positions, same, step.slot_mapping)
        compare(f"one sequence of {length}", got, paged_attention.reference(turned, same.k, same.v, tables, step.seq_lens))
        compare(f"cached key {length}", cache.k, same.k)
        assert (cache.k != same.k).flatten(2).any(-1).sum() <= 1 and torch.equal(cache.v, same.v), length  # all other slots as they were
    found["counts that are left"][0] += float(sum(int(counts.abs().sum()) for counts in fused_decode._ended.values()))
    step.block_tables = torch.zeros(1, 65, dtype=torch.int32)
    assert on_gpu(fused_decode.attend, q, k, v, *norms, rotary, positions, cache, step) is None  # longer than it takes


if __name__ == "__main__":
    with torch.inference_mode():
        products()
        attention()
        chains()
        head_rows()
        one_sequence()
    print(json.dumps(found))
