"""THE table of what kernels, copies, host ops and runtime calls are. Data, first match wins; not for: code.

Each row: (class, pattern). Kernel patterns are searched in the name in lower case. A name that no row knows is
"unknown" and reported as such. Names come from the public sources of cuBLAS/CUTLASS/cuDNN traces, PyTorch (ATen/native),
TorchInductor, flash-attention, FlashInfer, vLLM (csrc), SGLang (sgl-kernel), TensorRT-LLM, NCCL, RCCL, AMD Tensile,
composable_kernel, hipBLASLt, AITER, and MetaInfer.
"""

from __future__ import annotations

# Communication first: fused all-reduce kernels also say "norm".
COLLECTIVES: tuple[tuple[str, str, str], ...] = (
    # backend, operation, pattern
    ("custom", "all_reduce_norm", r"allreduce_fusion_kernel|allreduce.*(?:rms_?norm|residual)|(?:rms_?norm|residual).*allreduce"),
    ("custom", "all_reduce", r"cross_device_reduce_|twoshotallreducekernel|oneshotallreduce|one_?shot_?all_?reduce|two_?shot_?all_?reduce|allreduce_?(?:one|two)shot"),
    ("custom", "all_reduce", r"quickreduce|quick_?all_?reduce|(?<![a-z])qr::|trtllm_allreduce|vllm_allreduce|userbuffers_.*allreduce|lamport.*all_?reduce|mnnvl.*all_?reduce|allreducekernel|allreduce_prototype|mscclpp.*all_?reduce|aiter.*all_?reduce|hip_?allreduce|cross_device_reduce"),
    ("custom", "reduce_scatter", r"(?:custom|quick|cross_device).*reduce_?scatter"),
    ("custom", "all_gather", r"(?:custom|quick|cross_device).*all_?gather|fused_allgather|all_gather_kernel_push"),
    ("custom", "all_to_all", r"deep_?ep::|deepep|(?:internode|intranode)::(?:dispatch|combine|notify)|moe_?all_?to_?all|moealltoall|pplx.*(?:dispatch|combine)|nvshmem.*all_?to_?all"),
    ("symm_mem", "all_reduce", r"multimem_all_reduce|multimem_.*all_?reduce|symm_?mem.*all_?reduce"),
    ("symm_mem", "all_gather", r"multimem_all_gather|symm_?mem.*all_?gather|multimem_one_shot_all_gather"),
    ("symm_mem", "reduce_scatter", r"symm_?mem.*reduce_?scatter|multimem_.*reduce_?scatter"),
    ("symm_mem", "barrier", r"c10d::symmetric_memory|symmetric_memory.*(?:barrier|signal)|(?<![a-z_])barrier_kernel|put_signal_kernel|wait_signal_kernel"),
    ("rccl", "all_reduce", r"rccl.*all_?reduce"),
    ("rccl", "all_gather", r"rccl.*all_?gather"),
    ("rccl", "reduce_scatter", r"rccl.*reduce_?scatter"),
    ("rccl", "send_recv", r"rccl"),
    ("nccl", "all_reduce", r"nccl\w*_all_?reduce|ncclallreduce"),
    ("nccl", "all_gather", r"nccl\w*_all_?gather"),
    ("nccl", "reduce_scatter", r"nccl\w*_reduce_?scatter"),
    ("nccl", "broadcast", r"nccl\w*_broadcast"),
    ("nccl", "send_recv", r"nccl\w*_send_?recv"),
    ("nccl", "all_to_all", r"nccl\w*_all_?to_?all"),
    ("nccl", "reduce", r"nccl\w*_reduce(?!_?scatter)"),
    ("nccl", "other", r"nccl(?:dev)?kernel|ncclsymk|nccl\w*_"),
)

# Short texts that mean the same wherever they stand; other short ones must begin a word (see classify).
ANYWHERE = frozenset({"gemm", "gemv", "nvjet", "xmma", "mmha", "fmha", "_mha", "dtoh", "htod", "dtod", "ptop", "htoh", "memcpy", "memset", "get", "query", "event", "stream", "ctx"})

# On a ROCm trace, NCCL's names mean RCCL (it keeps them); see classify.collective.

KERNELS: tuple[tuple[str, str], ...] = (
    # -- key-value cache writes: before attention, whose names they often contain
    ("kv_write", r"reshape_and_cache|concat_and_cache_mla|store_kv_?cache|store_cache|set_kv_buffer|append_paged_kv|appendpagedkv|kv_cache_(?:update|write|store)|kvcache_(?:update|write|store)|copy_blocks_kernel|store_kvcache|write_kv|paged_kv_append|mla_kv_store|indexer_k_quant_and_cache|rope_.*_kv_?cache|fused_qkv_.*cache"),
    # -- attention, its combine and its planning
    ("attention", r"flash_fwd|flash_bwd|flash::|flashattn|flash_attn|flash_attention|fmha|(?<![a-z])mha_|_mha|paged_?attention|pagedattn|paged_attn|unified_attention|unifiedattention|batchdecodewith|batchprefillwith|singledecodewith|singleprefillwith|decode_attention|extend_attention|prefill_attention|_fwd_kernel_stage|_fwd_grouped_kernel_stage|attention_kernel|attn_fwd|attnfwd|mla_decode|flash_?mla|flashmla|xqa_kernel|kernel_mha|masked_multihead_attention|mmha|sdpa|efficient_attention|attentionkernel|attention_forward|merge_attn_states|mergestate|merge_state|sage_fwd|sage_quant|sageattn|persistentvariablelengthmergestates|ragged_attention|cascade|prepare_varlen_num_blocks|get_scheduler_metadata|flex_attention|ck_tile.*fmha|fmhafwd|fmhasm|cute.*attention|_attn_(?:fwd|bwd)|context_attention|lightning_attn|linear_attention|chunk_gated_delta|fused_recurrent|composedattention|create_flashinfer_kv_indices|reduce_segments|kernel_unified_attention|wvsplitk_attention|(?:rope|rotary)\w*_(?:attention|attn)"),
    # -- rotary embedding (also fused with the norm of q and k)
    ("rope", r"rotary|rope|(?<![a-z])apply_rot"),
    # -- fused quantisation + norm counts as norm; normalisation
    ("norm", r"rms_?norm|layer_?norm|rmsnorm|layernorm|group_?norm|groupnorm|batch_?norm|bn_(?:fw|bw)_|(?<![a-z])bn_(?:fw|bw)|instance_?norm|qk_?norm|gammabetabackward|rowwise_?moments|computefusedparams|batchnorm"),
    # -- mixture of experts
    ("moe", r"(?<![a-z])moe|_combined_routing|fused_moe|moe_|topk_?gating|topkgating|grouped_topk|moe_align|moe_sum|expert|_topk_forward|topk_softmax|permute_kernel.*token|group_gemm|grouped_gemm|count_and_sort|sort_tokens|_bitmatrix|(?<![a-z])matmul_ogs|_p_matmul_ogs|silu_and_mul_masked_post"),
    # -- matrix products and convolutions that carry an activation in their name as an epilogue
    ("gemm", r"s\d+gemm|cutlass_\d\d_|cijk_|nvjet|xmma_gemm|bmm_"),
    ("conv", r"scudnn|cudnn.*(?:fprop|dgrad|wgrad)|implicit_convolve|winograd"),
    # -- activations fused with the gate product, and plain ones
    ("activation", r"act_and_mul|silu|swiglu|swigluoai|gelu|geglu|(?<![a-z])relu|sigmoid_kernel|launch_gelu|tanh_kernel|threshold_kernel|leaky_relu|elu_kernel|hardswish|mish_kernel|softplus|sigmoid"),
    # -- convolutions before matrix products: implicit GEMMs say "gemm" too
    ("conv", r"conv|wgrad|dgrad|fprop|igemm_(?:fwd|bwd|wrw)|miopen(?!.*gemm)|im2d?2?col|im2col|im2d2col|col2im|nchwtonhwc|nhwctonchw|batched_transpose_\d+x\d+_(?:half|float|dword)|scudnn|winograd|fft2d|fft1d|cgemm|flip_filter|naive_conv|subtensorop|cudnn::cnn|cudnn::winograd|cask_cudnn"),
    # -- vector times matrix: batch-one decode
    ("gemv", r"gemv|(?<![a-z])gevm|dot_kernel|reduce_1block_kernel|wvsplitk|llmm1|gemv2|matvec|ger_kernel|wv_?splitk|skinny_gemm|rowwise_gemv"),
    # -- matrix products and their split-K reductions and epilogues
    ("gemm", r"gemm|nvjet|xmma|cutlass_\d|cutlass::kernel|cutlass(?:__5x)?\w*::kernel|cutlass::device_kernel|cutlass_tensorop|cutlass_(?:simt|wmma|tensorop)|splitkreduce|split_k_reduce|splitk|cublaslt|cublas|epilogue::impl|cijk_|tensile|hipblas|rocblas|ck::kernel_|kernel_gemm|matmul|_mm_|triton_mm|triton_tem_fused.*_?(?:mm|addmm|bmm)|deep_gemm|deepgemm|marlin|machete|awq|gptq|(?<![a-z])exl2|w8a8|w4a16|scaled_mm|fp8_blockscale|scal_kernel|bmm_|(?<![a-z])dgemm|cask|tinygemm|dsv3_|router_gemm|fused_a_gemm|kernel2<cutlass|gett_kernel|magma_"),
    # -- quantisation on its own
    ("quant", r"quant|qparam|fp8.*rowwise|rowwise.*fp8|hfp8|per_token_group|scaled_fp8|fp8_cast|mxfp|nvfp4|cvt_fp|convert_fp8"),
    # -- token embedding lookups
    ("embedding", r"embedding|indexselect|index_select|vocab_parallel"),
    # -- sampling: arg-max, top-k, top-p, random choice, penalties
    ("sampling", r"argmax|argmin|multinomial|top_?k|top_?p|sampl|radixsort|radix_sort|bitonicsort|sortkeyvalue|penalt|rejection|gumbel|exponential_kernel|philox.*exponential|logits_|_logits|_logprob|ranks_kernel|min_p|greedy|gathertopk|sbtopk|mbtopk|segmented_?sort|temperature|onlinesoftmax|speculative|eagle_|bincount|nucleus"),
    ("softmax", r"softmax|soft_max"),
    ("optimizer", r"adam|adagrad|sgd|multi_tensor_apply|foreach|lamb_|rowwise_adagrad"),
    # -- copies and casts
    ("copy", r"direct_copy|copy_kernel|_copy_kernel_cuda|catarraybatchedcopy|copy_device_to_device|float8_copy|convert_kernel|cast_kernel|tofloat|fbgemm_gpu::.*transpose|transpose|cudnn::ops::nchw|permute|_copy_page_indices|copydevicetodevice|copybuffer|(?<![a-z])copy_|memcpy_kernel|__amd_rocclr_copy|foreach_copy|pack_|unpack_"),
    ("fill", r"fillfunctor|fill_kernel|fillbuffer|__amd_rocclr_fill|zero_kernel|(?<![a-z])zeros?_|memset_kernel"),
    ("random", r"distribution_|dropout|philox|randperm|curand|rand_|normal_and_transform|bernoulli"),
    ("index", r"index_|gather|scatter|(?<![a-z])take_|put_|_index|slice_|nonzero|masked_(?:fill|select|scatter)|where_kernel|compare_?index|bucketize|searchsorted|unique|resolve_future_token_ids|slot_mapping|compute_position|clamp_position|prepare_inputs|prepare_pos|block_table|req_to_token|write_req|get_last_loc|assign_|alloc_extend|alloc_decode|jagged|offsets_range|lengths_range|sparse_data|permute_2d|cumsum|asynchronous_complete|input_ids|expand_kernel|update_.*(?:metadata|buffer)|_post_update_kernel|_apply_write_kernel|prepare_.*inputs|indexfunc|compute_cuda_kernel|bounds_check|to_dense_representation|get_num_kv_splits|kv_indices|page_table"),
    ("reduce", r"reduce_kernel|reducekernel|reduce_|devicereduce|cub::.*reduce|reduction|norm_kernel|mean_kernel|sum_kernel|linalg_vector_norm"),
    ("scan", r"devicescan|scan_kernel|cub::.*scan|rocprim.*scan|device_scan|scan_by_key|thrust::.*scan"),
    ("pool", r"pool|upsample|interpolate|grid_sample|adaptive_average|max_pool"),
    ("loss", r"loss|_entropy|mse_|nll_"),
    ("embedding", r"lookup_kernel"),
    ("elementwise", r"elementwise_kernel|elementwise|_pointwise|pointwise|binaryop|unaryop|cub::.*transform|devicetransform|for_each|thrust::.*parallel_for|addcmul|mul_kernel|add_kernel|logit_kernel|logit_backward|triu_tril|arange|range_|op_generic_tensor|add_tensor|bias_add|optensor|nan_to_num|clamp|axpy|tensor_kernel"),
)

# Inductor: triton_{poi|red|per|tem|for|spl}_fused_<op>_<op>..._N. The op names decide; else the template does.
INDUCTOR: tuple[tuple[str, str], ...] = (
    ("attention", r"flex_attention|attention|sdpa"),
    ("norm", r"rms_norm|layer_norm|group_norm|batch_norm|mean_mul_pow_rsqrt|pow_rsqrt|mean_.*rsqrt|var_mean|rsqrt"),
    ("moe", r"moe|topk_gating"),
    ("activation", r"silu|gelu|relu|sigmoid|swiglu|tanh"),
    ("rope", r"rotary|rope|(?:cos|sin).*neg|neg.*(?:cos|sin)|index_.*neg_.*cat|cat_.*neg_.*index"),
    ("sampling", r"argmax|topk|multinomial|sort|gumbel"),
    ("softmax", r"softmax"),
    ("embedding", r"embedding"),
    ("quant", r"quant|fp8"),
)
INDUCTOR_TEMPLATES: dict[str, str] = {"poi": "elementwise", "red": "reduce", "per": "reduce", "for": "elementwise", "spl": "scan", "tem": "gemm"}
INDUCTOR_COPIES = frozenset({"to", "copy", "clone", "slice", "view", "split", "with", "sizes", "select", "cat", "permute", "transpose", "unsafe", "contiguous", "expand", "unsqueeze", "squeeze", "t"})

COPIES: tuple[tuple[str, str], ...] = (
    ("d2h", r"dtoh|device ?-> ?(?:pinned|pageable|host)|devicetohost"),
    ("h2d", r"htod|(?:pinned|pageable|host) ?-> ?device|hosttodevice"),
    ("d2d", r"dtod|device ?-> ?device|devicetodevice|ptop|peer"),
    ("h2h", r"htoh|hosttohost"),
)

# Host operators, by their name as written (not lower-cased). (class, pattern; matched from the start)
OPS: tuple[tuple[str, str], ...] = (
    ("autograd", r"autograd::|torch::autograd::|\w+Backward\d*$|GeneratedBackwardFor_|<backward op>|torch::jit::.*Backward|CompiledFunctionBackward|AccumulateGrad"),
    ("communication", r"c10d::|nccl:|gloo:|ucc:|mpi:|record_param_comms|vllm::(?:all_reduce|all_gather|reduce_scatter|all_to_all|broadcast)|_C_custom_ar::|_C::(?:shm_\w+|init_shm_manager)|sgl_kernel::(?:all_reduce|shm_\w+|custom_ar)|symm_mem::|_c10d_functional|meta_infer::all_reduce|torch\.distributed|torch::distributed|DistributedDataParallel|outplace_all_reduce|sglang::(?:inplace|outplace|reg)_all|trtllm::(?:allreduce|allgather|reducescatter)|flashinfer::trtllm_allreduce|fbgemm::.*(?:all_reduce|all2all)|All2All|engine::all_reduce|hotloop::all_reduce|\w*::?all_?reduce\w*|\w+::all_gather\w*"),
    ("host_read", r"aten::(?:item|_local_scalar_dense|is_nonzero|equal|allclose|tolist|__bool__|__int__|__float__)$"),
    ("attention", r"aten::(?:_?scaled_dot_product\w*|_flash_attention\w*|_efficient_attention\w*|_cudnn_attention\w*|_fused_sdp\w*|_native_multi_head_attention|scaled_dot_product_attention|_scaled_dot_product\w*)|vllm::unified_attention\w*|vllm::unified_mla\w*|_vllm_fa\d_C::\w+|_vllm_fa\d::|flash_attn\w*::|FlashAttn\w*|_C::(?:paged_attention\w*|merge_attn_states|cpu_attention\w*|mla_\w+|get_scheduler_metadata)|aiter::(?:mha\w*|paged_attention\w*|fmha\w*|pa_\w+|mla\w*)|sgl_kernel::(?:fwd|flash\w*|cutlass_mla\w*|decode_attention\w*|extend_attention\w*|merge_state\w*)|flashinfer::(?!.*(?:norm|rope|sampl|allreduce|gemm))\w*(?:attention|prefill|decode|mla)\w*|batch_\w*(?:prefill|decode)|meta_infer::flash_attn\w*|sglang_profiler::(?:mha|attention)\w*|torch_attn"),
    ("kv_write", r"_C_cache_ops::|vllm::unified_kv_cache_update|_C::cpu_attn_reshape_and_cache|sglang::store_cache|sgl_kernel::(?:transfer_kv|set_kv)\w*|flashinfer::append_paged\w*|sglang_profiler::memory_pool\w*|aiter::reshape_and_cache\w*"),
    ("moe", r"vllm::\w*moe\w*|_moe_C::|aiter::\w*moe\w*|sgl_kernel::\w*(?:moe|topk_softmax|grouped)\w*|TopK$|SortTokens$|trtllm::\w*moe\w*|sglang_profiler::\w*moe\w*"),
    ("norm", r"aten::(?:native_)?(?:layer|batch|group|instance)_norm\w*|aten::(?:_batch_norm|_fused_rms|rms_norm|cudnn_batch_norm|miopen_batch_norm)\w*|aten::(?:layer_norm|rms_norm)|\w+::(?:fused_add_)?(?:gemma_)?\w*(?:rms_?norm|layer_?norm|layernorm)\w*|aiter::(?:add_)?rmsnorm\w*|aiter::_groupnorm\w*|\w*rmsnorm\w*"),
    ("rope", r"\w+::\w*(?:rotary|rope)\w*|sglang_profiler::\w*rotary\w*"),
    ("gemm", r"aten::(?:mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|addbmm|einsum|tensordot|_scaled_mm|_int_mm|mkldnn_linear|_addmm_activation|outer|inner|chain_matmul|_grouped_mm|_weight_int\dpack_mm\w*)(?:_out|\.\w+)?$|mkl::|mkldnn::|mkldnn_prepacked::|onednn::|quantized::linear\w*|_C::(?:onednn_\w*mm\w*|\w*gemm\w*|\w*scaled_mm\w*|\w*marlin\w*|machete\w*|cutlass_\w+|awq_\w+|gptq_\w+)|_rocm_C::(?:wvSplitK\w*|LLMM1)|\w+::\w*gemm\w*|\w+::\w*_mm(?:_\w+)?$|aiter::gemm\w*|vllm::\w*gemm\w*|sgl_kernel::\w*(?:gemm|mm|linear)\w*|deep_gemm::|torch_ipex::\w*linear\w*|trtllm::\w*(?:gemm|mm)\w*|fbgemm::\w*gemm\w*|xsmm::"),
    ("activation", r"aten::(?:relu|gelu|silu|sigmoid|tanh|elu|leaky_relu|hardswish|mish|softplus|threshold\w*|glu|celu|selu|hardtanh|relu6)_?(?:_backward)?$|\w+::\w*(?:silu|gelu|swiglu|swish)\w*|\w+::\w*act_and_mul\w*"),
    ("conv", r"aten::(?:_?conv\w*|cudnn_convolution\w*|miopen_convolution\w*|mkldnn_convolution\w*|thnn_conv\w*|slow_conv\w*)"),
    ("embedding", r"aten::embedding\w*|fbgemm::(?:split_embedding|.*lookup)\w*|\w+::\w*vocab_parallel\w*"),
    ("sampling", r"aten::(?:argmax|argmin|multinomial|topk|sort|argsort|exponential_|kthvalue)$|\w+::\w*(?:sampl|top_?k|top_?p|argmax|penalt|min_p)\w*"),
    ("softmax", r"aten::_?(?:log_)?softmax\w*|aten::(?:logsumexp|_safe_softmax)"),
    ("quant", r"\w+::\w*(?:quant|fp8|int8)\w*|aten::(?:quantize\w*|dequantize\w*|fake_quant\w*)"),
    ("allocation", r"aten::(?:empty|empty_strided|empty_like|new_empty|new_empty_strided|empty_permuted|resize_|_resize\w*|set_|_empty_affine_quantized|pin_memory|_pin_memory)(?:\.\w+)?$"),
    ("copy", r"aten::(?:copy_|clone|contiguous|to|_to_copy|cat|stack|hstack|vstack|concat|repeat|tile|repeat_interleave|flip|roll|type_as|_foreach_copy_|lift\w*|constant_pad_nd|pad|float|half|bfloat16|cpu|cuda|index_copy\w*|flatten_dense_tensors|unflatten_dense_tensors|record_stream|is_pinned)(?:\.\w+)?$|_C::weak_ref_tensor"),
    ("fill", r"aten::(?:zeros|ones|full|zero_|fill_|zeros_like|ones_like|full_like|new_zeros|new_ones|new_full|arange|eye|scalar_tensor|linspace|tril|triu|range)(?:\.\w+)?$"),
    ("view", r"aten::(?:view|as_strided|_unsafe_view|reshape|_reshape_\w+|transpose|t|permute|select|slice|narrow|unsqueeze|squeeze|expand|expand_as|split|split_with_sizes|chunk|unbind|detach|alias|view_as\w*|flatten|unflatten|movedim|diagonal|unfold|swapaxes|swapdims|mT|mH|numpy_T|resolve_conj|resolve_neg|real|broadcast_to|broadcast_tensors|_reshape_alias|result_type|_has_compatible_shallow_copy_type|_conj|unsafe_split\w*|tensor_split|as_strided_|unsqueeze_|squeeze_|transpose_|t_|detach_|swap\w+|_\w*version\w*|size|stride|numel|dim|_lazy_clone)(?:\.\w+)?$|detach_?$"),
    ("index", r"aten::(?:index\w*|_index\w*|gather\w*|scatter\w*|masked_\w+|where|take\w*|nonzero\w*|searchsorted|bucketize|isin|unique\w*|put_\w*|_unique\w*|one_hot|cumsum\w*|cumprod|diff)|fbgemm::(?:.*cumsum|permute\w*|.*offsets\w*|.*jagged\w*|bounds_check\w*|recat\w*|block_bucketize\w*)|_C::compute_slot_mapping\w*|fb::\w+|sglang_profiler::forward_batch_info\w*|sgl_kernel::(?:assign|build_tree)\w*"),
    ("reduce", r"aten::(?:sum|mean|max|min|amax|amin|any|all|prod|var\w*|std\w*|norm|linalg_\w*norm|count_nonzero|aminmax|median|mode|bincount|histc|value_selecting_reduction_backward|_amp\w*)(?:\.\w+)?$"),
    ("random", r"aten::(?:rand\w*|normal_?|uniform_|bernoulli\w*|dropout|native_dropout\w*|random_|_fused_dropout|cauchy_|geometric_|log_normal_)(?:\.\w+)?$"),
    ("pool", r"aten::(?:\w*pool\w*|upsample\w*|interpolate|grid_sampler\w*|adaptive_\w+)"),
    ("loss", r"aten::(?:\w*loss\w*|binary_cross_entropy\w*|\w*_entropy\w*)"),
    ("optimizer", r"Optimizer\.|aten::_foreach_\w+|aten::_fused_(?:adam|sgd)\w*"),
    ("graph", r"(?:CUDA|Cuda|HIP)Graph|cuda_?graph|## Call .*[Gg]raph.*replay"),
    ("compiled", r"## Call CompiledFxGraph|Torch-Compiled Region|TorchDynamo|AOTDispatcher|Pregraph|CompiledFunction|CompiledFxGraph|<forward op>|forward$|\w*Inductor\w*|torch::jit::|graph_\d+_cpp_fused|cpp_fused"),
    ("elementwise", r"aten::(?:add|sub|mul|div|true_divide|floor_divide|remainder|fmod|neg|abs|pow|rsqrt|sqrt|square|exp|exp2|expm1|log|log2|log10|log1p|sin|cos|tan|erf|erfinv|sign|sgn|ceil|floor|round|trunc|frac|reciprocal|clamp|clamp_min|clamp_max|clip|minimum|maximum|fmax|fmin|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|__\w+__|nan_to_num|isnan|isinf|isfinite|rsub|addcmul|addcdiv|lerp|logit|atan2|hypot|_foreach_\w+|positive|copysign|xlogy|polar|complex|view_as_complex|view_as_real)_?(?:\.\w+|_backward)?$|aten::\w+_backward\w*"),
    ("metadata", r"aten::(?:is_\w+|_is_\w+|size|stride|storage_offset|device|_version)\b|profiler::|ProfilerStep|_grad_sum_to_size$|_NoopSaveInputs$|PythonSubclass|torch::"),
)

# Runtime and driver calls, by name (cuda, hip, cu, xpu and private runtimes alike).
CALLS: tuple[tuple[str, str], ...] = (
    ("graph_launch", r"(?:cuda|cu|hip|musa|xpu)?_?graphlaunch"),
    ("launch", r"(?:cuda|hip|cu|musa)(?:ext)?(?:module)?launch(?:cooperative)?kernel|cudalaunchkernel|culaunchkernel|hiplaunchkernel|hipextmodulelaunchkernel|hipmodulelaunchkernel|hipextlaunch|launchcooperativekernel|launchkernelexc|zecommandlistappendlaunch|urenqueuekernellaunch|zeurenqueuekernel|runfunction|culaunch(?:grid)?$|^cudalaunch$"),
    ("memcpy", r"memcpy"),
    ("memset", r"memset"),
    ("sync", r"synchronize|waitonevent|zeeventhostsynchronize|urqueuefinish|ureventwait"),
    ("event_query", r"eventquery|streamquery"),
    ("stream_wait", r"streamwaitevent|streamwaitvalue"),
    ("malloc", r"(?:cuda|hip|musa|cu)_?(?:host|mem)?(?:malloc|hostalloc|memalloc|memcreate|memmap|mallocasync|mallocfrompool)|hostalloc|mallochost"),
    ("free", r"(?:cuda|hip|musa|cu)_?(?:free|memfree|freehost|freeasync|memunmap|memrelease)|hostfree"),
    ("capture", r"begincapture|endcapture|graphinstantiate|graphdestroy|graphgetnodes|graphexecupdate|graphexecdestroy|graphadd"),
    ("query", r"get|occupancy|peek|iscapturing|funcsetattribute|attribute|query|drivergetversion|exchangestreamcapturemode|elapsedtime|threadexchange|setdevice|pushcurrent|popcurrent|ctx"),
    ("event", r"event"),
    ("stream", r"stream"),
    ("module", r"moduleload|libraryload|moduleget|modulegetfunction|kernelgetfunction"),
)
