"""The validator on files it was not written for: the known kinds of faults in other words, and harmless text."""

from __future__ import annotations

from typing import Any

import pytest
from test_blueprint_formats import CONTRACTS, PHASE, code, note, rule, with_fault

from optimizer.knowledge.check import Kind as K
from optimizer.knowledge.prose import check

# Number of the known contradiction, and how another file says it (zh: in Chinese, as the published one does).
FAULTS: dict[str, tuple[list[tuple[tuple[str, ...], Any]], K]] = {
    "1a int leaves": (
        [((*CONTRACTS, "a", "max_blocks"), 128), ((*CONTRACTS, "b", "max_blocks"), 160)],
        K.CONSTANT_DISAGREES,
    ),
    "1b prose 'of'": ([note("a", "The pool holds max_blocks of 128 for this model.")], K.CONSTANT_DISAGREES),
    "1c zh": ([note("a", "该模型 max_blocks 为 128。")], K.CONSTANT_DISAGREES),
    "1d zh colon": ([note("a", "max_blocks：128")], K.CONSTANT_DISAGREES),
    "1e formula": ([note("a", "max_blocks = 32768 // 256 = 128")], K.CONSTANT_DISAGREES),
    "2a ceil": (
        [
            note("a", "blocks_needed = math.ceil(n / block_size)"),
            note("b", "blocks_needed = n // block_size"),
        ],
        K.CONSTANT_DISAGREES,
    ),
    "2b words": (
        [
            note("a", "The block count is rounded up: ceil(seq_len / block_size)."),
            note("b", "The block count is seq_len // block_size, rounded down."),
        ],
        K.CONSTANT_DISAGREES,
    ),
    "2c zh": (
        [
            note("a", "块数按 seq_len / block_size 向上取整。"),
            note("b", "块数按 seq_len / block_size 向下取整。"),
        ],
        K.CONSTANT_DISAGREES,
    ),
    "2d pseudocode": (
        [
            code("x", "num_blocks = seq_len // block_size"),
            code("y", "num_blocks = (seq_len + block_size - 1) // block_size"),
        ],
        K.CONSTANT_DISAGREES,
    ),
    "3a": (
        [
            rule("P2_a", "Prefer torch.zeros_like for scratch tensors."),
            rule("O4_b", "zeros_like is banned on the decode path."),
        ],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "3b zh": (
        [rule("P2_a", "推荐使用 `zeros_like` 分配。"), rule("O4_b", "禁止使用 `zeros_like`。")],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "3c zh 2": (
        [rule("P2_a", "必须调用 zeros_like"), rule("O4_b", "不应出现 zeros_like")],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "3d audit": (
        [
            rule("O4_b", "No clones.", audit_check="`grep -n 'clone()' model.py` must return 0 matches"),
            code("m", "y = x.clone()", file="model.py"),
        ],
        K.AUDIT_FAILS_ON_ITS_EVIDENCE,
    ),
    "3e audit zh": (
        [
            rule("O4_b", "No clones.", audit_check="grep -c 'clone' model.py 结果为 0"),
            code("m", "y = x.clone()", file="model.py"),
        ],
        K.AUDIT_FAILS_ON_ITS_EVIDENCE,
    ),
    "4a": ([rule("P5_x", "A single host read per step is allowed.")], K.CONSTANT_DISAGREES),
    "4b zh": (
        [rule("P5_x", "每步最多 1 次 item 同步"), rule("O2_x", "decode 路径 0 次 item")],
        K.CONSTANT_DISAGREES,
    ),
    "4c batched": (
        [rule("P5_x", "Collect the 36 values and read them with one .item() per step.")],
        K.CONSTANT_DISAGREES,
    ),
    "5a": (
        [
            rule("O5_d", "index_copy_ is reserved for decode."),
            code("prefill_kv", "k_cache.index_copy_(0, s, k)"),
        ],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "5b zh": (
        [rule("O5_d", "`index_copy_` 仅用于 decode"), code("prefill_kv", "k_cache.index_copy_(0, s, k)")],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "5c": (
        [rule("O5_d", "In prefill, never call scatter_add_."), code("prefill_kv", "k.scatter_add_(0, s, k)")],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "6a": (
        [
            note("a", "Never allocate the complete KV cache up front."),
            code("c", "self.k = torch.empty(self.max_blocks, 256, 8, 128)"),
        ],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "6b zh": (
        [
            note("a", "KV cache 必须懒分配，禁止一次性分配 max_blocks"),
            code("c", "self.k = torch.empty(self.max_blocks, 256, 8, 128)"),
        ],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "7a": (
        [
            note("a", "flash_attn_varlen_func accepts keyword arguments only."),
            code("c", "o = flash_attn_varlen_func(q, k, v, cu)"),
        ],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "7b zh": (
        [
            note("a", "flash_attn_varlen_func 必须使用关键字参数"),
            code("c", "o = flash_attn_varlen_func(q, k, v, cu)"),
        ],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "8a": (
        [
            note("a", "`add_norm` uses the weight of the following layer."),
            note("b", "`add_norm` uses this layer's own weight."),
        ],
        K.CONSTANT_DISAGREES,
    ),
    "8b zh": (
        [
            note("a", "fused_add_rms_norm 使用下一层的 weight"),
            note("b", "fused_add_rms_norm 使用本层的 weight"),
        ],
        K.CONSTANT_DISAGREES,
    ),
    "9a": ([((*PHASE, "implementation_todos"), ["STEP-FIX: P1-P6"])], K.UNKNOWN_REFERENCE),
    "10a": (
        [
            ((*PHASE, "performance_gate"), {"throughput": ">50 tok/s (TP=4)"}),
            ((*PHASE, "done_criteria"), ["single GPU throughput > 54 tok/s"]),
        ],
        K.CONSTANT_NEEDS_NARROWER_SCOPE,
    ),
    "10b zh": (
        [
            ((*PHASE, "performance_gate"), {"throughput": "TP=4 吞吐 >50 tok/s"}),
            ((*PHASE, "done_criteria"), ["单卡吞吐 > 54 tok/s"]),
        ],
        K.CONSTANT_NEEDS_NARROWER_SCOPE,
    ),
    "11a": (
        [
            note("law", "Iron law: eager mode only, torch.compile and CUDA Graph are not allowed."),
            note("road", "Capture every layer in a CUDA graph."),
        ],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "11b zh": (
        [note("law", "铁律：只允许 eager，禁止 CUDA Graph"), note("road", "decode 必须使用 CUDA Graph 捕获")],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "11c compile": (
        [note("law", "torch.compile is forbidden."), note("road", "Use torch.compile for the norm.")],
        K.DEMANDS_WHAT_IS_FORBIDDEN,
    ),
    "12a": (
        [
            (
                (*PHASE, "test_interface_contracts"),
                {"scripts": [{"file": "a.py"}], "note": "All 28 gate scripts must pass."},
            )
        ],
        K.COUNT_DISAGREES,
    ),
    "12b": ([note("a", "FM coverage 17/17.")], K.COUNT_DISAGREES),
    "12c zh": (
        [note("a", "共 28 个脚本"), ((*PHASE, "test_interface_contracts"), {"scripts": [{"file": "a.py"}]})],
        K.COUNT_DISAGREES,
    ),
    "13a": (
        [note("a", "CUDA graph: 35.4 tok/s (1 GPU) versus eager: 55.7 tok/s (TP=4).")],
        K.COMPARES_UNLIKE,
    ),
    "13b zh": ([note("a", "单卡 graph 35.4 tok/s，TP=4 eager 55.7 tok/s")], K.COMPARES_UNLIKE),
    "13c split": (
        [((*CONTRACTS, "g", "single_gpu"), "35.4 tok/s on one GPU; eager at TP=4 55.7 tok/s")],
        K.COMPARES_UNLIKE,
    ),
    "14a": (
        [note("a", "KV cache: contiguous layout per layer."), note("b", "KV cache layout: paged.")],
        K.CONSTANT_DISAGREES,
    ),
    "14b zh": ([note("a", "KV cache 是连续的")], K.CONSTANT_DISAGREES),
    "15a": (
        [
            note("a", "16 lines added, 8 removed in the patch."),
            note("b", "The patch adds 41 and removes 33 lines."),
        ],
        K.CONSTANT_DISAGREES,
    ),
    "15b": ([note("a", "补丁 +16/−8"), note("b", "commit 13d7528: +41/−33")], K.CONSTANT_DISAGREES),
    "16a": (
        [
            note("a", "Commit 13d7528 declares the ROUND_0 ladder not traceable."),
            rule("O9_s", "82 % of gain", why="From the ROUND_0 ladder."),
        ],
        K.DISOWNED_EVIDENCE,
    ),
    "16b zh": (
        [note("a", "ROUND_0 的数据无法追溯"), rule("O9_s", "82%", why="基于 ROUND_0")],
        K.DISOWNED_EVIDENCE,
    ),
    "17a": (
        [code("n", "r = res.contiguous()", "_C.fused_add_rms_norm(x, r, w, eps)", "return x, res")],
        K.FAULTY_CODE,
    ),
    "17b inline": (
        [code("n", "fused_add_rms_norm(x.contiguous(), res.contiguous(), w, eps)", "return x, res")],
        K.FAULTY_CODE,
    ),
    "18a": (
        [rule("O8_f", "num_free_blocks returns max_pos // block_size and is never decremented.")],
        K.CONSTANT_NEEDS_NARROWER_SCOPE,
    ),
    "18b zh": ([rule("O8_f", "空闲块数使用常量 160")], K.CONSTANT_NEEDS_NARROWER_SCOPE),
    "18c": ([rule("O8_f", "free_blocks = 160 is hard-coded.")], K.CONSTANT_NEEDS_NARROWER_SCOPE),
    "loosened": (
        [note("a", "The write-back lowered the throughput floor from 54 to 50 tok/s.")],
        K.LOOSENS_A_GATE,
    ),
    "loosened zh": ([note("a", "本轮放宽门禁容差到 5e-2。")], K.LOOSENS_A_GATE),
}
HARMLESS = (
    "The KV cache is paged; keys must be made contiguous before the kernel.",
    "num_blocks = (seq_len + block_size - 1) // block_size; the slot is position % block_size.",
    "position // block_size picks the page.",
    "Use `index_copy_` in decode and direct assignment in prefill.",
    "Throughput above 50 tok/s at TP=4.",
    "Covers 1/1 failure modes with 4 scripts.",
    "The commit has +41/-33 lines.",
    "该模型 max_blocks 为 160。",
    "decode 使用 `flash_attn_with_kvcache`。",
    "Capture decode in CUDA graphs; use static buffers for it.",
    "fused_add_rms_norm takes the weight of its own layer.",
    "Do not relax the tolerance; never skip the greedy check.",
    "O1 pays most, O2 comes second.",
    "num_free_blocks is decremented with every allocation.",
    "36 items are read in one layer loop and cost 252 ms.",
    "Measured: 55.7 tok/s at TP=4, 53.9 tok/s at TP=4 before.",
)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_other_words_is_found(name: str) -> None:
    changes, kind = FAULTS[name]
    found = check(with_fault(*changes))
    assert kind in {p.kind for p in found}, [str(p) for p in found]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_is_left_alone(text: str) -> None:
    assert check(with_fault(note("n", text))) == []


def test_text_without_contradictions_stays_without_when_it_stands_together() -> None:
    found = check(with_fault(*(note(f"n{i}", text) for i, text in enumerate(HARMLESS))))
    assert [str(p) for p in found] == []


def test_any_json_is_read_without_a_traceback() -> None:
    for data in (
        {},
        {"a": None},
        {"framework_layer": []},
        {"framework_layer": {"data_flow_contracts": 3}},
        {"x": [1, [2, {"pseudocode": [1, None]}]]},
        {"pseudocode": "text"},
    ):
        assert isinstance(check(data), list)  # type: ignore[arg-type]


def test_a_file_that_is_no_blueprint_is_one_line(tmp_path) -> None:
    from typer.testing import CliRunner

    from optimizer.cli import app
    from optimizer.knowledge.blueprint import BlueprintError

    for name, text in (("a.json", "{"), ("b.json", "[1]"), ("c.json", "\xff")):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    for words in (["check", "a.json"], ["check", "b.json"], ["check", "c.json"], ["check", "gone.json"], ["import", "a.json"], ["export", "b.json", "out.json"]):
        done = CliRunner().invoke(app, ["knowledge", words[0], *(str(tmp_path / w) for w in words[1:])])
        assert isinstance(done.exception, BlueprintError), words
    assert not (tmp_path / "out.json").exists()
