"""Layers and anchors of hand-made sequences, and their alignment between engines that fuse differently."""

from __future__ import annotations

import itertools

from trace_diff.align import Pair, Work, align, image, join
from trace_diff.layers import find_anchors, find_layers, period


def _step(layer: list[tuple[str, str]], layers: int) -> tuple[list[str], list[str]]:
    head = [("copy", "Memcpy HtoD"), ("embedding", "embed"), ("norm", "rms")]
    tail = [("norm", "rms_final"), ("gemm", "lm_head"), ("reduce", "argmax")]
    items = head + layer * layers + tail
    return [c for c, _ in items], [n for _, n in items]


MERGED = [
    ("gemm", "qkv"),
    ("rope", "rope"),
    ("attention", "fa_split"),
    ("attention", "fa_combine"),
    ("gemm", "o"),
    ("gemm", "cublasLt::splitKreduce_kernel"),
    ("norm", "rms"),
    ("gemm", "gate_up"),
    ("activation", "silu_mul"),
    ("gemm", "down"),
    ("norm", "rms"),
]
SPLIT = [
    ("gemm", "q"),
    ("gemm", "k"),
    ("gemm", "v"),
    ("attention", "sdpa"),
    ("gemm", "o"),
    ("gemm", "gate"),
    ("activation", "silu"),
    ("gemm", "up"),
    ("gemm", "down"),
]


def test_layers_are_found_and_the_output_head_is_not_part_of_the_last_one():
    classes, names = _step(MERGED, 6)
    found = find_layers(classes, names)
    assert found.count == 6 and found.how == "attention"
    assert {len(layer) for layer in found.layers} == {5}
    assert names[found.anchors[found.layers[0][0]].first] == "qkv"
    assert names[found.anchors[found.layers[-1][-1]].first] == "down"


def test_attention_metadata_before_the_first_product_is_no_layer():
    classes, names = _step(MERGED, 4)
    classes.insert(1, "attention")
    names.insert(1, "flash::prepare_varlen_num_blocks_kernel")
    assert find_layers(classes, names).count == 4


def test_split_k_reduction_and_combine_join_their_anchor():
    anchors = find_anchors([c for c, _ in MERGED], [n for _, n in MERGED])
    assert [(a.first, a.last) for a in anchors] == [(0, 0), (2, 3), (4, 5), (7, 7), (9, 9)]


def test_layers_without_a_known_attention_kernel_come_from_repetition():
    layer = [(c if c != "attention" else "other", n) for c, n in MERGED]
    classes, names = _step(layer, 5)
    found = find_layers(classes, names)
    assert found.how == "repetition" and found.count == 5
    assert {len(x) for x in found.layers} == {4}


def test_smallest_period_wins_and_noise_has_none():
    assert period(list("xyabcabcabcabcz")) == (3, 2, 12)
    assert period(list("abcdefgh")) is None


def test_nothing_repeats_gives_no_layers():
    found = find_layers(["copy", "norm", "gemm"], ["a", "b", "c"])
    assert found.count == 0 and found.how == "none"


def _works(items: list[tuple[str, float]]) -> list[Work]:
    return [Work(role, amount) for role, amount in items]


A = _works([("product", 16), ("attention", 10), ("product", 11), ("product", 50), ("product", 28)])
B = _works(
    [("product", 7), ("product", 5), ("product", 5), ("attention", 3), ("product", 11), ("product", 26), ("product", 25), ("product", 28)]
)


def test_merged_products_align_with_the_split_ones():
    assert align(A, B) == (
        Pair(0, 1, 0, 3),
        Pair(1, 2, 3, 4),
        Pair(2, 3, 4, 5),
        Pair(3, 4, 5, 7),
        Pair(4, 5, 7, 8),
    )


def test_a_slower_device_does_not_look_like_a_merge():
    slow = [Work(w.role, 3 * w.amount) for w in A]
    assert align(A, slow) == tuple(Pair(i, i + 1, i, i + 1) for i in range(5))


def test_ranges_are_the_finest_that_no_engine_crosses():
    to_a = align(B, A)  # B is the template, A merges
    ranges = join([to_a, align(B, B)], len(B))
    assert ranges == [(0, 3), (3, 4), (4, 5), (5, 7), (7, 8)]
    assert [image(to_a, low, high) for low, high in ranges] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_an_extra_product_of_one_engine_is_kept_in_a_range():
    extra = [*A[:3], Work("product", 0.5), *A[3:]]
    pairs = align(A, extra)
    covered = [image(pairs, low, high) for low, high in join([pairs], len(A))]
    assert covered[0][0] == 0 and covered[-1][1] == len(extra)
    assert all(x[1] == y[0] for x, y in itertools.pairwise(covered))
