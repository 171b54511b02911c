"""The fusion table on hand-made chains, and what may be compared with what."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trace_diff import fusion
from trace_diff.analysis import Cell
from trace_diff.bandwidth import MEMORIES, memory
from trace_diff.comparable import compare_cells
from trace_diff.products import Product, product_of
from trace_diff.types import Phase

NORM = ["aten::pow", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul", "aten::mul"]


def names(*ops: str) -> list[tuple[str, str]]:
    return [(o, "elementwise") for o in ops]


def test_the_longest_chain_wins_and_each_item_is_claimed_once():
    found = fusion.match(names("aten::add", *NORM))
    assert [(m.family.name, m.first, m.last) for m in found] == [("residual add + RMSNorm", 0, 6)]


def test_only_adjacent_items_match():
    broken = names(*NORM[:3], "aten::index_select", *NORM[3:])
    assert all(m.family.name != "RMSNorm" for m in fusion.match(broken))


def test_two_chains_in_one_stretch_are_both_found():
    found = fusion.match(names(*NORM, "aten::silu", "aten::mul"))
    assert [m.family.name for m in found] == ["RMSNorm", "SwiGLU"]


def test_a_chain_does_not_match_inside_a_longer_token():
    assert fusion.match([("aten::silu", "activation"), ("aten::mul_something_else", "multiply_more")]) == []


@pytest.mark.parametrize(
    ("sums", "behind", "found"),
    [
        ("one_shot_all_reduce", "fused_add_rms_norm", 1),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "vllm::rms_norm_kernel<c10::BFloat16>", 1),
        ("one_shot_all_reduce", "skinny_gemv", 0),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "fused_add_rms_norm", 0),  # a library's ring: a faster sum comes first
        ("one_shot_all_reduce_norm", "skinny_gemv", 0),
    ],
)
def test_a_sum_over_ranks_and_the_norm_behind_it_are_one_chain(sums, behind, found):
    kernels = [(sums, "communication"), (behind, "norm" if "norm" in behind else "gemm")]
    assert [m.family.name for m in fusion.match(kernels)] == ["all-reduce + residual add + RMSNorm"] * found


def test_gpu_kernels_of_hugging_face_match_as_rms_norm():
    kernels = [
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::pow_tensor_scalar_kernel_impl>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda>",
        "void at::native::elementwise_kernel<128, 2, BinaryFunctor<float, MulFunctor<float>>>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>",
        "void at::native::elementwise_kernel<128, 4, BinaryFunctor<c10::BFloat16, MulFunctor<float>>>",
    ]
    found = fusion.match([(k, "elementwise") for k in kernels])
    assert [(m.family.name, len(m)) for m in found] == [("RMSNorm", 8)]


def test_every_family_has_sources_skills_and_a_chain_that_compiles():
    table = fusion.table()
    assert table.version == json.loads(fusion.TABLE.read_text())["version"]
    for family in table.families:
        assert family.where and family.skills and family.chain.pattern


H200 = Cell(device="NVIDIA H200", tp=1, phase=Phase.DECODE, batch=1, tokens=1, layers=36)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NVIDIA H100"}, "device class: NVIDIA H200 here, NVIDIA H100 there"),
        ({"tp": 2}, "TP: 1 here, 2 there"),
        ({"layers": 24}, "model layers: 36 here, 24 there"),
        ({"batch": 32, "tokens": 32}, "batch: 1 here, 32 there"),
        ({"phase": Phase.PREFILL}, "phase: decode here, prefill there"),
        ({"context": 4096}, "context: 100 tokens here, 4096 there"),
    ],
)
def test_a_known_difference_is_named(change: dict, reason: str):
    base = replace(H200, context=100)
    assert compare_cells(base, replace(base, **change)).reasons == (reason,)


def test_an_unknown_batch_is_taken_as_one_and_said_so_but_never_as_many():
    unknown = replace(H200, batch=None, tokens=None)
    assert compare_cells(unknown, H200).ok
    assert "batch" in compare_cells(unknown, H200).assumed
    assert not compare_cells(unknown, replace(H200, batch=8, tokens=8)).ok


def test_merged_and_split_products_of_one_model_agree_and_another_model_does_not():
    merged = replace(H200, products=((256, 512), (256, 256)))
    split = replace(H200, products=((256, 256), (256, 128), (256, 128), (256, 256)))
    assert compare_cells(merged, split).ok
    assert not compare_cells(merged, replace(H200, products=((512, 1024), (512, 512)))).ok


def test_product_shapes_from_either_operand_order():
    mm = product_of({"Input Dims": [[1, 256], [256, 64]], "Input type": ["c10::BFloat16", "c10::BFloat16"]})
    linear = product_of({"Input Dims": [[1, 256], [64, 256], []], "Input type": ["c10::BFloat16"] * 2})
    assert mm == linear == Product(1, 256, 64, "bfloat16")
    assert mm.bytes == 2 * (256 * 64 + 256 + 64)
    assert product_of({"Input Dims": [[1, 256], []]}) is None


@pytest.mark.parametrize(
    ("device", "figure"),
    [
        ("NVIDIA H200", 4169), ("NVIDIA H100 80GB HBM3", 3350), ("NVIDIA H100 PCIe", 2000), ("NVIDIA H100 NVL", 3900),
        ("NVIDIA A100-SXM4-80GB", 2039), ("NVIDIA A100 80GB PCIe", 1935), ("NVIDIA A10", 600), ("NVIDIA A10G", 600),
        ("Tesla V100-SXM2-16GB", 900), ("AMD Instinct MI300X", 5300), ("NVIDIA B200", 8000), ("NVIDIA L40S", 864), ("NVIDIA L4", 300),
        ("NVIDIA A100-PG509-200", None), ("NVIDIA A1000", None), ("H100", None), ("", None), (None, None),
    ],
)  # fmt: skip
def test_bandwidth_is_known_by_the_drivers_name_of_a_device_or_not_at_all(device, figure):
    found = memory(device)
    assert (found.bytes_per_ns if found else None) == figure


def test_every_bandwidth_has_a_source_and_says_whether_it_was_measured():
    assert len({m.name for m in MEMORIES}) == len(MEMORIES)
    assert all(m.source and m.kind in ("measured", "peak") for m in MEMORIES)


@pytest.mark.parametrize(
    ("here", "there", "ok", "assumed"),
    [
        (16, 400, True, ()),  # both short: the cache is nothing
        (1024, 2048, False, ()),
        (2048, 2200, True, ("context (2048 tokens here, 2200 there)",)),
        (2048, 2048, True, ()),
        (None, 2048, True, ("context",)),
        (None, 100, True, ()),
    ],
)
def test_contexts_are_never_mixed_silently(here, there, ok, assumed):
    verdict = compare_cells(replace(H200, context=here), replace(H200, context=there))
    assert (verdict.ok, verdict.assumed) == (ok, assumed)
