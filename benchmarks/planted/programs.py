"""Three well-behaved decode programs and the inefficiencies that can be planted in them.

`graphed` runs a layer stack as one CUDA graph, `eager` launches every kernel but keeps the device busy, `cpu`
has no device. Each takes `Plant`, whose default plants nothing. Not for: the machine (machine), scoring.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from benchmarks.planted.machine import Machine, Yield
from trace_diff.findings.roofline_gap import CPU_READ_BYTES_PER_NS

LAYERS = 12
STEP = "execute_context_0(0)_generation_1(1)"
K = 1000  # ns in a microsecond

RMS = "void vllm::rms_norm_kernel<c10::BFloat16, 8, 3, true>(c10::BFloat16*)"
ADD_RMS = "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>"
ROPE = "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)"
CACHE = "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>"
FLASH = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128>>"
SILU = "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>"
ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::ArgMaxOps<float>>>"
REDUCE = "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 2>(vllm::RankData*)"  # no rank has a whole row, so no norm could stand in it
ADD = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>"
MUL = "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, at::native::binary_internal::MulFunctor<float>>>"
CAST = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
POW = "void at::native::vectorized_elementwise_kernel<4, at::native::pow_tensor_scalar_kernel_impl<float, float>>"
MEAN = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>"
RSQRT = "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(at::TensorIteratorBase&)>"
PLAIN_SILU = "void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel(at::TensorIteratorBase&)>"
INT_ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<int>>"
NORM_CHAIN = [(ADD, 1500), (CAST, 2400), (POW, 1500), (MEAN, 2400), (ADD, 1500), (RSQRT, 1500), (MUL, 1500), (CAST, 1500), (MUL, 2400)]
# Role -> (ns, inputs, outputs); bf16 at 4.13 TB/s, just under the measured read bandwidth of an H200.
PRODUCTS = {"qkv": (12_190, 4096, 6144), "o": (8_130, 4096, 4096), "gate_up": (48_760, 4096, 24576), "down": (24_380, 12288, 4096)}
HEAD_NS = 198_500  # 4096 x 100,000
SAMPLING = ("aten::div", "aten::sort", "aten::softmax", "aten::cumsum", "aten::le", "aten::scatter", "aten::masked_fill", "aten::softmax", "aten::multinomial", "aten::gather")


@dataclass(frozen=True)
class Plant:
    """What to plant; all zero or False: nothing."""

    reads_per_step: int = 0  # .item() calls spread over the layers
    copies_per_step: int = 0  # extra small host-to-device copies
    mallocs_per_step: int = 0  # device allocations
    empties_per_step: int = 0  # tensor allocations
    between_ns: int = 0  # host work behind the step's annotation
    compile_ns: int = 0  # compilation inside every step
    slow: tuple[tuple[str, float], ...] = ()  # product or "attention" -> factor on its time
    split_norm: bool = False
    split_silu: bool = False
    split_qkv: bool = False
    device_copies: int = 0  # extra device-to-device copies a layer
    metadata: bool = False  # integer kernel (CPU: mask operators) in every layer
    host_op_ns: int = 0  # extra host time per launch
    autograd: tuple[int, int] | None = None  # (ns per dispatch, ns per node)
    late_rank_ns: int = 0  # extra host time of rank 1 before every collective
    transfer_ns: int = 4_000  # of one collective
    side_copy_ns: int = 0  # a copy on another stream that the compute stream waits for
    side_reads: int = 0  # .item() calls on a stream that has nothing else to do
    python_ns: int = 0  # Python in front of every operator (CPU)
    gathers: int = 0  # gathers of the cache before attention, a layer (CPU)
    sampling: int = 0  # small operations behind the output head
    clones: int = 0  # copying operators a layer (CPU)
    duty: float = 1.0  # of all device times: below 1 the host is too slow for the device


def layer_kernels(p: Plant) -> list[tuple[str, int, str]]:
    """(name, ns, role) of one layer's kernels; role is a product's name, "attention" or ""."""
    slow = dict(p.slow)

    def product(role: str, part: float = 1.0) -> tuple[str, int, str]:
        ns = int(PRODUCTS[role][0] * part * slow.get(role, 1.0))
        return (f"nvjet_sm90_tst_64x8_{role}_TNT", ns, role)

    norm = [(n, ns, "") for n, ns in NORM_CHAIN] if p.split_norm else [(ADD_RMS, 2 * K, "")]
    qkv = [product("qkv", x) for x in (0.72, 0.25, 0.25)] if p.split_qkv else [product("qkv")]
    silu = [(PLAIN_SILU, 1500, ""), (MUL, 1800, "")] if p.split_silu else [(SILU, 2 * K, "")]
    meta = [(INT_ADD, 2500, "")] if p.metadata else []
    copies = [("Memcpy DtoD (Device -> Device)", 1500, "copy")] * p.device_copies
    attention = (FLASH, int(9 * K * slow.get("attention", 1.0)), "attention")
    return [
        *norm, *qkv, (ROPE, 2 * K, ""), *meta, (CACHE, 2 * K, ""), attention, product("o"), *copies,
        (ADD_RMS, 2 * K, ""), product("gate_up"), *silu, product("down"),
    ]  # fmt: skip


def graphed(m: Machine, p: Plant) -> Generator[Yield, int, None]:
    """One step: a little metadata, one graph (cut where the host reads), one asynchronous read-back."""
    with m.annotate(STEP):
        m.python(15 * K)
        _inputs(m, p)
        _compile(m, p)
        pieces = max(1, p.reads_per_step + 1)
        kernels = [(n, int(ns * p.duty)) for _ in range(LAYERS) for n, ns, _ in layer_kernels(p)]
        kernels += [("nvjet_sm90_tst_head_TNT", HEAD_NS), (ARGMAX, 8 * K)]
        kernels += [(f"void at::native::sampling_kernel_{i}", 5 * K) for i in range(p.sampling)]
        size = -(-len(kernels) // pieces)
        for i in range(0, len(kernels), size):
            if i:
                m.item()
                m.python(12 * K)
            m.graph(kernels[i : i + size])
        m.read_later()
        m.wait_for_read(back=2)
    m.python(p.between_ns)
    return
    yield


def eager(m: Machine, p: Plant) -> Generator[Yield, int, None]:
    """One step with an operator and a launch per kernel; with several ranks two all-reduces a layer."""
    m.grad = p.autograd
    with m.annotate(STEP):
        m.python(15 * K)
        _inputs(m, p)
        reads = set(range(0, LAYERS, max(1, LAYERS // p.reads_per_step))) if p.reads_per_step else set()
        for layer in range(LAYERS):
            for name, ns, role in layer_kernels(p):
                _launch(m, p, name, int(ns * p.duty), role)
                if m.world > 1 and role in ("o", "down"):
                    yield from _all_reduce(m, p)
            if layer in reads:
                m.item()
        _launch(m, p, "nvjet_sm90_tst_head_TNT", int(HEAD_NS * p.duty), "head")
        _launch(m, p, ARGMAX, 8 * K, "")
        if p.side_copy_ns:
            m.free[13] = max(m.free.get(13, 0), m.free[7])
            m.kernel("Memcpy DtoD (Device -> Device)", p.side_copy_ns, 13, "gpu_memcpy", bytes=1 << 20)
            m.free[7] = m.free[13]
        m.read_later()
        m.wait_for_read(back=2)
    m.grad = None


def _launch(m: Machine, p: Plant, name: str, ns: int, role: str) -> None:
    shapes = {}
    if role in PRODUCTS:
        _, k, n = PRODUCTS[role]
        shapes = {"Input Dims": [[1, k], [k, n]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    elif role == "head":
        shapes = {"Input Dims": [[1, 4096], [4096, 100_000]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    op = {"attention": "vllm::unified_attention_with_output", "copy": "aten::clone"}.get(role)
    op = op or ("aten::mm" if shapes else "aten::op")
    m.python(2 * K + p.host_op_ns)
    with m.op(op, 2 * K, **shapes):
        m.kernel(name, ns, cat="gpu_memcpy" if role == "copy" else "kernel")


def _all_reduce(m: Machine, p: Plant) -> Generator[Yield, int, None]:
    m.python(2 * K)
    if m.rank == 1:
        m.python(p.late_rank_ns)
    start = m.at_device_collective()
    end = yield start, p.transfer_ns
    m.leave_device_collective(REDUCE, start, end)


def _inputs(m: Machine, p: Plant) -> None:
    for _ in range(1 + p.copies_per_step):
        m.python(2 * K)
        with m.op("aten::copy_", 3 * K):
            m.copy("Memcpy HtoD (Pinned -> Device)")
    for _ in range(p.side_reads):
        m.item(stream=13)
    for _ in range(p.mallocs_per_step):
        m.call("cudaMalloc", 120 * K)
    for _ in range(p.empties_per_step):
        m.leaf("aten::empty", 3 * K)


def _compile(m: Machine, p: Plant) -> None:
    if p.compile_ns:
        m.leaf("CompileFxGraph (dynamic shape changed): compile_fx", p.compile_ns)


def cpu(m: Machine, p: Plant) -> Generator[Yield, int, None]:
    """One step on a CPU; with several ranks two gloo all-reduces a layer."""
    m.grad = p.autograd
    with m.annotate(STEP):
        _cpu_op(m, p, "aten::embedding", 30 * K, [[2048, 256], [1]])
        for _ in range(p.empties_per_step):
            m.leaf("aten::empty", 3 * K, below_autograd=True)
        for _ in range(p.reads_per_step):
            m.leaf("aten::item", 2 * K)
        for _ in range(LAYERS):
            _cpu_norm(m, p)
            if p.split_qkv:
                _cpu_product(m, p, 256, 256)
                for _ in "kv":  # small ones cost a call more than their bytes
                    _cpu_op(m, p, "aten::linear", 20 * K, [[1, 256], [128, 256]])
            else:
                _cpu_product(m, p, 256, 512)
            _cpu_op(m, p, "_C::rotary_embedding", 15 * K, [[1], [1, 512]])
            if p.metadata:
                _cpu_op(m, p, "aten::arange", 12 * K, [[]])
                _cpu_op(m, p, "aten::lt", 10 * K, [[21], [1, 1]])
            for _ in range(p.gathers):
                _cpu_op(m, p, "aten::index", 25 * K, [[4096, 16, 4, 32], []])
            _cpu_op(m, p, "aten::scaled_dot_product_attention", 80 * K, [[1, 8, 1, 32], [1, 8, 21, 32]])
            _cpu_product(m, p, 256, 256)
            for _ in range(p.clones):
                _cpu_op(m, p, "aten::clone", 14 * K, [[1, 256]])
            if m.world > 1:
                yield from _gloo(m, p)
            _cpu_norm(m, p)
            _cpu_product(m, p, 256, 1536)
            _cpu_op(m, p, "_C::silu_and_mul", 10 * K, [[1, 1536]])
            _cpu_product(m, p, 768, 256)
            if m.world > 1:
                yield from _gloo(m, p)
        _cpu_product(m, p, 256, 2048)
        _cpu_op(m, p, "aten::argmax", 15 * K, [[1, 2048]])
        for name in SAMPLING[: p.sampling]:
            _cpu_op(m, p, name, 14 * K, [[1, 2048]])
    m.grad = None
    m.python(p.between_ns)


def _cpu_op(m: Machine, p: Plant, name: str, ns: int, dims: list[list[int]]) -> None:
    m.python(300 + p.python_ns)
    m.leaf(name, ns, **{"Input Dims": dims, "Input type": ["float"] * len(dims)})


def _cpu_product(m: Machine, p: Plant, inputs: int, outputs: int) -> None:
    """As fast as one core reads weights: nothing to find."""
    ns = round(4 * (inputs * outputs + inputs + outputs) / CPU_READ_BYTES_PER_NS)
    _cpu_op(m, p, "aten::linear", ns, [[1, inputs], [outputs, inputs]])


def _cpu_norm(m: Machine, p: Plant) -> None:
    if not p.split_norm:
        _cpu_op(m, p, "aten::rms_norm", 14 * K, [[1, 256]])
        return
    for name, ns in (("pow", 8), ("mean", 14), ("add", 7), ("rsqrt", 6), ("mul", 7), ("mul", 7)):
        _cpu_op(m, p, f"aten::{name}", ns * K, [[1, 256]])


def _gloo(m: Machine, p: Plant) -> Generator[Yield, int, None]:
    """A gloo all-reduce: started by an operator, run by a helper thread, waited for without any operator."""
    if m.rank == 1:
        m.python(p.late_rank_ns)
    m.leaf("c10d::allreduce_", 5 * K, below_autograd=True)
    start = m.now
    end = yield start, max(p.transfer_ns, 20 * K)
    m.event("user_annotation", "gloo:all_reduce", start, end, 101)
    m.now = end + 1 * K


