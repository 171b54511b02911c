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
    "attention": (GREEN, "attention"),
    "norm": (SKY, "norm, activation, rope"),
    "pointwise": (SKY, "pointwise"),
    "comm": (VERMILION, "communication"),
    "memory": (YELLOW, "copies, allocation"),
    "autograd": (PINK, "autograd"),
    "sampling": ("#7A5CA8", "sampling"),
    "python": (ORANGE, "Python"),
    "runtime": ("#A6611A", "runtime calls, launches"),
    "sync": (BLACK, "blocked in a sync"),
    "idle": (LIGHT, "idle"),
    "other": (GREY, "other"),
}

_WORDS: tuple[tuple[str, str], ...] = (
    ("gemm", "gemm"), ("matmul", "gemm"), ("gemv", "gemm"), ("linear", "gemm"),
    ("attention", "attention"), ("attn", "attention"), ("kv_", "attention"),
    ("norm", "norm"), ("activation", "norm"), ("rope", "norm"), ("silu", "norm"), ("pointwise", "norm"),
    ("elementwise", "norm"), ("fused", "norm"),
    ("comm", "comm"), ("reduce_scatter", "comm"), ("all_reduce", "comm"), ("collective", "comm"), ("wait", "comm"),
    ("autograd", "autograd"), ("sampl", "sampling"), ("softmax", "sampling"), ("topk", "sampling"),
    ("sync", "sync"), ("blocked", "sync"),
    ("copy", "memory"), ("memory", "memory"), ("mem", "memory"), ("alloc", "memory"), ("tensor", "memory"),
    ("embedding", "memory"), ("python", "python"), ("runtime", "runtime"), ("launch", "runtime"),
    ("graph", "runtime"), ("driver", "runtime"), ("idle", "idle"),
)  # fmt: skip


def topic(category: str) -> str:
    """The topic of a category name such as `gpu.gemm`, `idle.host_late` or `cpu.tensor_management`."""
    if category.startswith("idle"):
        return "sync" if "sync" in category or "blocked" in category else "idle"
    tail = category.split(".", 1)[-1].lower()
    for word, found in _WORDS:
        if word in tail:
            return found
    return "other"


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
