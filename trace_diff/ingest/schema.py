"""What each Kineto category is, since torch 1.8, for every accelerator. Data; not for: names of operations."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from trace_diff.types import Kind

# Lower-cased `cat` -> Kind. 1.8-1.12 wrote Kernel, Memcpy, Memset, Runtime, Operator; ROCm, XPU and private
# backends name their own runtimes; all are one kind. (libkineto/src/ActivityType.cpp, output_json.cpp)
CATEGORIES: dict[str, Kind] = {
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "memset": Kind.MEMSET,
    "cpu_op": Kind.CPU_OP,
    "operator": Kind.CPU_OP,
    "python_function": Kind.PYTHON,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "cuda_sync": Kind.SYNC,
    "cuda_event": Kind.SYNC,
    "hpu_op": Kind.RUNTIME,  # Kineto: "HPU host side runtime event"
    "external_correlation": Kind.PROFILER,
    "external correlation": Kind.PROFILER,
    "gpu_pm_counter": Kind.PROFILER,
    "overhead": Kind.PROFILER,
    "trace": Kind.PROFILER,
    "cuda_profiler_range": Kind.PROFILER,
    "runtime": Kind.RUNTIME,
    "driver": Kind.DRIVER,
}
# A backend that names its own rows after Kineto's pattern: npu_kernel, xpu_memcpy, musa_runtime.
_NAMED_AFTER = re.compile(r"[a-z0-9]+_(kernel|memcpy|memset|sync|runtime|driver)")
_AS = {
    "kernel": Kind.KERNEL,
    "memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET,
    "sync": Kind.SYNC,
    "runtime": Kind.RUNTIME,
    "driver": Kind.DRIVER,
}
# Processes of the profiler before Kineto (torch < 1.8, use_kineto=False), which wrote no categories.
LEGACY_PROCESSES = {"CPU functions": Kind.CPU_OP, "CUDA functions": Kind.KERNEL}

# Rows that live on a device track.
DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.GPU_ANNOTATION, Kind.SYNC)
WORK_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)

# Flow categories that tie a launch to its device row.
LAUNCH_FLOWS = frozenset({"ac2g", "async_cpu_to_gpu", "async_gpu", "async"})


def mask_of(kinds: tuple[Kind, ...]) -> npt.NDArray[np.bool_]:
    """A table to index with a column of kinds: True for `kinds`."""
    mask = np.zeros(256, bool)
    mask[list(kinds)] = True
    return mask


def kind_of(category: object) -> Kind:
    """Kind of a `cat` value; Kind.OTHER for what no table knows (an unknown accelerator's own rows)."""
    name = str(category).lower()
    known = CATEGORIES.get(name)
    if known is not None:
        return known
    named = _NAMED_AFTER.fullmatch(name)
    if named is not None:
        return _AS[named.group(1)]
    return Kind.OTHER
