"""The vLLM configurations that are tried before ours is compared with the best of them.

One axis at a time from the server's own defaults (full graphs for decode and piecewise ones for prefill, async
scheduling, 8,192 batched tokens, FlashAttention 3 on Hopper, the second model runner, on several ranks its own all-reduce
over CUDA IPC), the likeliest first; then one that joins what helped. Names and values are those of vLLM 0.25
(`CUDAGraphMode`, `PassConfig`, `PerformanceMode`, `AttentionBackendEnum`, `ParallelConfig`). All-reduce and norm in one
kernel (`fuse_allreduce_rms`) is none of them: it needs FlashInfer, and with FlashInfer the defaults have it on. Not for:
starting any of them (`gpu_headline.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.vllm_server import Setting

DEFAULTS = "defaults"
JOINED = "what helped, joined"
HELPED = 0.995  # of the defaults' time, geometric mean over the cells

SETTINGS: tuple[Setting, ...] = (
    Setting(DEFAULTS),
    Setting("2048 batched tokens", ("--max-num-batched-tokens", "2048")),
    Setting("Triton attention", ("--attention-backend", "TRITON_ATTN")),
    Setting("q/k norm and rope fused", compilation={"pass_config": {"enable_qk_norm_rope_fusion": True}}),
    Setting("graphs of just these batches", ("--cudagraph-capture-sizes", "1", "8", "32")),
    Setting("full graphs for decode only", compilation={"cudagraph_mode": "FULL_DECODE_ONLY"}),
    Setting("hand-written kernels", compilation={"custom_ops": ["all"]}),
    Setting("the first model runner", env=(("VLLM_USE_V2_MODEL_RUNNER", "0"),)),
    Setting("no async scheduling", ("--no-async-scheduling",)),
    Setting("full graphs for all", compilation={"cudagraph_mode": "FULL"}),
    Setting("block size 32", ("--block-size", "32")),
    Setting("mode for interactivity", ("--performance-mode", "interactivity")),
    Setting("FlashInfer attention", ("--attention-backend", "FLASHINFER")),
    Setting("piecewise graphs", compilation={"cudagraph_mode": "PIECEWISE"}),
    Setting("eager", ("--enforce-eager",)),
)  # fmt: skip
NCCL = Setting("NCCL all-reduce", ("--disable-custom-all-reduce",))


def settings(tp: int) -> tuple[Setting, ...]:
    """Those to be tried on `tp` ranks, in this order."""
    return SETTINGS if tp == 1 else (SETTINGS[0], NCCL, *SETTINGS[1:])


def joined(scores: Mapping[str, float], tried: Sequence[Setting] = SETTINGS) -> Setting | None:
    """One setting with everything that beat the defaults; None where fewer than two did. scores: name -> mean log ms.

    Of settings that say different things about the same flag or key, the fastest is kept.
    """
    if DEFAULTS not in scores:
        return None
    bar = scores[DEFAULTS] + math.log(HELPED)
    helped = [s for s in tried if s.name in scores and scores[s.name] < bar]
    if len(helped) < 2:
        return None
    flags: dict[str, tuple[str, ...]] = {}
    compilation: dict[str, Any] = {}
    env: dict[str, str] = {}
    for setting in sorted(helped, key=lambda s: scores[s.name], reverse=True):  # the fastest last: it has the last word
        if setting.flags:
            flags[setting.flags[0]] = setting.flags
        env |= dict(setting.env)
        for key, value in setting.compilation.items():
            compilation[key] = {**compilation.get(key, {}), **value} if isinstance(value, dict) else value
    return Setting(JOINED, tuple(word for words in flags.values() for word in words), compilation, tuple(env.items()))
