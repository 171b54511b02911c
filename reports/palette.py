"""One place for colours and category names of every report.

Okabe-Ito colours (safe for the common kinds of colour blindness); neighbours in a stack also differ in
lightness, so a grey print stays readable. Not for: deciding what a kernel is (`trace_diff.classify`).
"""

from __future__ import annotations

from collections.abc import Iterable

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PINK, YELLOW, BLACK = "#D55E00", "#CC79A7", "#F0E442", "#222222"
GREY, LIGHT, PALE = "#8A8F98", "#C9CDD3", "#ECEEF1"

# What a part of a step is about, whether it ran on the CPU or the GPU.
TOPICS: dict[str, tuple[str, str]] = {
    "gemm": (BLUE, "matrix products"),
    "attention": (GREEN, "attention, KV cache"),
    "norm": (SKY, "norm, RoPE, pointwise"),
    "comm": (VERMILION, "communication"),
    "wait": ("#F0B48A", "waiting for peers"),
    "memory": (YELLOW, "copies, tensors, allocation"),
    "autograd": (PINK, "autograd"),
    "sampling": ("#7A5CA8", "sampling"),
    "python": (ORANGE, "Python"),
    "runtime": ("#8C5A2B", "runtime calls, launches"),
    "graph": ("#4B2E83", "graph launch"),
    "sync": (BLACK, "blocked in a sync"),
    "idle.host_late": ("#F7DFC0", "GPU idle: host late"),
    "idle.host_sync": ("#9A97A0", "GPU idle: host blocked"),
    "idle.launch_latency": ("#D9E4EF", "GPU idle: launch latency"),
    "idle.dependency": ("#E9D5E4", "GPU idle: stream dependency"),
    "idle.graph_gap": ("#E4DCF2", "GPU idle: inside a graph"),
    "idle.between_steps": ("#E3E5E8", "GPU idle: between steps"),
    "idle": (LIGHT, "idle, other"),
    "other": (GREY, "other"),
}

# Class names of `trace_diff.classify`, and words in the part names of an account.
_CLASSES: dict[str, str] = {
    **dict.fromkeys(("gemm", "gemv", "conv", "moe", "product"), "gemm"),
    **dict.fromkeys(("attention", "kv_write"), "attention"),
    **dict.fromkeys(("norm", "rope", "activation", "elementwise", "quant", "reduce", "compiled", "loss", "pool"), "norm"),
    **dict.fromkeys(("communication", "comm", "transfer", "collective"), "comm"),
    **dict.fromkeys(("copy", "fill", "index", "allocation", "view", "metadata", "embedding", "memset", "memcpy", "d2h",
                     "h2d", "d2d", "h2h", "scan", "malloc", "free", "tensor", "memory"), "memory"),
    **dict.fromkeys(("sampling", "random", "softmax"), "sampling"),
    **dict.fromkeys(("runtime", "launch", "launches", "module", "query", "event", "event_query", "stream", "driver"), "runtime"),
    **dict.fromkeys(("graph_launch", "graph"), "graph"),
    **dict.fromkeys(("sync", "blocked", "host_read", "stream_wait", "host_blocked"), "sync"),
    "autograd": "autograd", "python": "python", "idle": "idle", "wait": "wait",
}  # fmt: skip


def topic(category: str) -> str:
    """The topic of a class or part name: `gemm`, `gpu.kv_write`, `idle.host_late`, `comm.wait`."""
    head, _, tail = category.lower().partition(".")
    if head == "idle":
        return category if category in TOPICS else "idle"
    name = tail or head
    if name in _CLASSES:
        return _CLASSES[name]
    found = [_CLASSES[w] for w in name.replace(" ", "_").split("_") if w in _CLASSES]
    return found[0] if found else _CLASSES.get(head, "other")


def colour(category: str) -> str:
    return TOPICS[topic(category)][0]


def legend(categories: Iterable[str]) -> list[tuple[str, str, str]]:
    """(topic, colour, words) of the topics that occur, in the order of TOPICS, each colour once."""
    used = {topic(c) for c in categories}
    seen: set[str] = set()
    rows = []
    for name, (shade, words) in TOPICS.items():
        if name in used and shade not in seen:
            seen.add(shade)
            rows.append((name, shade, words))
    return rows
