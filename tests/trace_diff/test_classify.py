"""One table decides what a kernel, an operator and a call are; what it does not know is unknown, never guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trace_diff import classify, kernel_table
from trace_diff.classify import call_class, collective, copy_kind, host_collective, kernel_class, op_class

KERNELS = {
    "gemm": [
        "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(cutlass_80::Params)",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "volta_sgemm_32x128_nt",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1",
        "void Marlin<256, 1, 8, 8, 4, 8>(int4 const*)",
        "_w8a8_block_fp8_matmul",
        "deep_gemm::fp8_gemm_kernel<4096u, 7168u>",
    ],
    "gemv": [
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16>(cublasGemvParamsEx)",
        "gemvNSP_kernel<float, float>",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>",
        "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int, int)",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float>>>",
    ],
    "attention": [
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, cutlass::bfloat16_t>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>",
        "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<x>",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP32VarSeqQ8Kv128PersistentContext",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16>",
        "kernel_unified_attention_3d",
        "qk_norm_rope_attention",  # rotation and attention in one: what it does most
        "_fwd_grouped_kernel_stage1",
        "void vllm::merge_attn_states_kernel<float>",
        "pytorch_flash::flash_fwd_kernel<x>",
        "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelI",
        "flash_fwd_mla_kernel",
    ],
    "norm": [
        "void vllm::rms_norm_kernel<c10::BFloat16, 8, 3, true>(c10::BFloat16*)",
        "std::enable_if<true, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8, true>",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>",
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256E",
        "triton_red_fused_fused_add_rms_norm_0",
        "triton_red_fused_add_mean_mul_pow_rsqrt_0",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
    ],
    "rope": ["void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<x>", "fused_rope_kernel"],
    "activation": [
        "void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>)>",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16>",
        "triton_poi_fused_mul_silu_slice_1",
        "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)>",
        "void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<silu>",
    ],
    "kv_write": [
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>",
        "void (anonymous namespace)::store_kvcache<2048l, 4, false, long>(StoreKVCacheParams)",
        "void flashinfer::AppendPagedKVCacheKernel<128u>",
        "void vllm::concat_and_cache_mla_kernel<x>",
    ],
    "copy": [
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<x>",
        "triton_poi_fused__to_copy_1",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >",
        "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(at::TensorIteratorBase&)>",
        "triton_poi_fused_add_mul_3",
        "triton_poi_fused_4",
    ],
    "reduce": ["void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>", "triton_red_fused_3"],
    "sampling": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, 4, 4> >",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>",
        "_gumbel_sample_kernel",
        "void at::native::sbtopk::gatherTopK<float>",
    ],
    "embedding": ["void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long>", "vocab_parallel_embedding_kernel"],
    "moe": ["fused_moe_kernel", "void vllm::moe::topkGatingSoftmax<4>", "void moe_align_block_size_kernel<int>", "_matmul_ogs_NNT_bf16xbf16xmxfp4"],
    "quant": ["void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16>", "per_token_group_quant_8bit_kernel"],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>",
        "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_twoshot_sync<x>",
        "void quickreduce::allreduce_prototype_twoshot<x>",
        "void deep_ep::intranode::dispatch<4>",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel<x>",
    ],
    "memset": ["Memset (Device)"],
    "d2h": ["Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pageable)"],
    "h2d": ["Memcpy HtoD (Pageable -> Device)"],
    "d2d": ["Memcpy DtoD (Device -> Device)", "Memcpy PtoP (Device -> Device)"],
}  # fmt: skip


@pytest.mark.parametrize(("cls", "name"), [(c, n) for c, names in KERNELS.items() for n in names])
def test_kernels_of_the_engines_are_known(cls, name):
    assert kernel_class(name) == cls


@pytest.mark.parametrize(
    "name",
    ["strange_kernel_42", "mystery", "my_custom_op", "zebra", "kernel0", "_ZN3foo3barEv", "triton_", "my_triton_kernel", "",
     "void ns::Thing<float>(float*)", "step_kernel", "process_tile", "Kernel", "do_the_work"],
)  # fmt: skip
def test_a_name_that_no_row_knows_is_unknown(name):
    assert kernel_class(name) == "unknown"


OPS = {
    "gemm": ["aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "_C::onednn_mm", "aiter::gemm_a16w16", "aten::_scaled_mm", "mkldnn::_linear_pointwise"],
    "communication": ["c10d::allreduce_", "gloo:all_reduce", "nccl:all_gather", "_C::shm_allreduce", "record_param_comms", "vllm::all_reduce", "meta_infer::all_reduce_sum", "symm_mem::multimem_all_reduce_"],
    "host_read": ["aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"],
    "allocation": ["aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"],
    "view": ["aten::view", "aten::transpose", "aten::as_strided", "aten::t", "aten::slice"],
    "copy": ["aten::copy_", "aten::to", "aten::_to_copy", "aten::clone", "aten::cat", "aten::contiguous"],
    "autograd": ["AddmmBackward0", "autograd::engine::evaluate_function: MulBackward0", "torch::autograd::AccumulateGrad", "GeneratedBackwardFor_meta_infer_all_reduce_sum_default"],
    "attention": ["aten::scaled_dot_product_attention", "vllm::unified_attention_with_output", "_vllm_fa3_C::fwd", "_C::cpu_attention_with_kv_cache", "flash_attn::_flash_attn_varlen_forward"],
    "norm": ["_C::rms_norm", "_C::fused_add_rms_norm", "aten::native_layer_norm", "aiter::rmsnorm"],
    "rope": ["_C::rotary_embedding", "sgl_kernel::rotary_embedding"],
    "activation": ["_C::silu_and_mul", "aten::silu", "aten::gelu"],
    "kv_write": ["_C_cache_ops::reshape_and_cache_flash", "sglang::store_cache"],
    "sampling": ["aten::argmax", "aten::multinomial", "aten::topk"],
    "compiled": ["## Call CompiledFxGraph abc ##", "Torch-Compiled Region: 0/0", "TorchDynamo Cache Lookup"],
    "elementwise": ["aten::add", "aten::mul", "aten::rsqrt", "aten::pow"],
    "unknown": ["mylib::frobnicate", "whatever", ""],
}  # fmt: skip


@pytest.mark.parametrize(("cls", "name"), [(c, n) for c, names in OPS.items() for n in names])
def test_operators_are_known(cls, name):
    assert op_class(name) == cls


@pytest.mark.parametrize(
    ("name", "cls"),
    [("cudaLaunchKernel", "launch"), ("cudaLaunchKernelExC", "launch"), ("cuLaunchKernelEx", "launch"), ("cuLaunchKernel", "launch"),
     ("hipLaunchKernel", "launch"), ("hipExtModuleLaunchKernel", "launch"), ("hipModuleLaunchKernel", "launch"),
     ("cudaLaunchCooperativeKernel", "launch"), ("cudaGraphLaunch", "graph_launch"), ("hipGraphLaunch", "graph_launch"),
     ("cudaMemcpyAsync", "memcpy"), ("hipMemcpyWithStream", "memcpy"), ("cudaMemsetAsync", "memset"),
     ("cudaStreamSynchronize", "sync"), ("cudaDeviceSynchronize", "sync"), ("hipEventSynchronize", "sync"),
     ("cudaStreamWaitEvent", "stream_wait"), ("cudaMalloc", "malloc"), ("hipMalloc", "malloc"), ("cudaHostAlloc", "malloc"),
     ("cudaFree", "free"), ("cudaEventQuery", "event_query"), ("cudaStreamIsCapturing", "query"), ("INVALID", "unknown")],
)  # fmt: skip
def test_runtime_calls_are_known(name, cls):
    assert call_class(name) == cls


@pytest.mark.parametrize(
    ("name", "backend", "operation"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "nccl", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "nccl", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", "nccl", "reduce_scatter"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(x)", "nccl", "broadcast"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "nccl", "send_recv"),
        ("ncclKernel_AllReduce", "nccl", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<float, 4>(x)", "custom", "all_reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>", "custom", "all_reduce_norm"),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>", "symm_mem", "all_reduce"),
        ("void deep_ep::internode_ll::combine<x>", "custom", "all_to_all"),
    ],
)
def test_device_collectives_are_known(name, backend, operation):
    assert collective(name) == (backend, operation)


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("gloo:all_reduce", ("gloo", "all_reduce")),
        ("nccl:_all_gather_base", ("nccl", "all_gather")),
        ("c10d::allreduce_", ("c10d", "all_reduce")),
        ("_C::shm_allreduce", ("shm", "all_reduce")),
        ("_C::shm_all_gather", ("shm", "all_gather")),
        ("_C_custom_ar::all_reduce", ("custom", "all_reduce")),
        ("symm_mem::multimem_all_reduce_", ("symm_mem", "all_reduce")),
        ("aten::mm", None),
    ],
)
def test_host_collectives_are_known(name, pair):
    assert host_collective(name) == pair


def test_copies_say_their_direction_or_none():
    assert copy_kind("Memcpy DtoH (Device -> Pinned)") == "d2h"
    assert copy_kind("Memcpy Unknown") == "memcpy"


def test_every_pattern_of_the_table_compiles_and_every_class_is_a_word():
    for rows in (kernel_table.KERNELS, kernel_table.OPS, kernel_table.CALLS, kernel_table.INDUCTOR, kernel_table.COPIES):
        for cls, pattern in rows:
            assert re.fullmatch(r"[a-z0-9_]+", cls)
            re.compile(pattern)


def test_no_other_file_of_the_package_decides_what_a_kernel_is():
    """Names of kernels belong in the table (fusion families, which name whole chains, are data of their own)."""
    package = Path(classify.__file__).parent
    for path in package.rglob("*.py"):
        if path.name in ("kernel_table.py", "classify.py"):
            continue
        text = path.read_text()
        for word in ("nvjet", "flash_fwd", "cijk_", "ncclDevKernel", "cross_device_reduce"):
            assert word not in text, f"{path.name} names {word}"
