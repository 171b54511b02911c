"""The MetaInfer shape: import, export, and the contradictions that a file of that shape can hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from optimizer.knowledge.blueprint import BlueprintError, Detection, Entry, Gain, Gains, Legacy, Scope, Status
from optimizer.knowledge.check import Kind
from optimizer.knowledge.metainfer import PERFORMANCE, export_entries, find, import_entries, parse_audit
from optimizer.knowledge.prose import check

CLEAN: dict[str, Any] = {
    "metadata": {"name": "b", "version": "2.3.0", "last_updated": "2026-04-30"},
    "framework_layer": {
        "data_flow_contracts": {
            "paged_kv_cache_contract": {"format": "The KV cache is paged.", "size": "max_blocks = 160"},
            "tp_layer_interface_contracts": {
                "performance_optimization": {
                    "verified_by": "reports/round_2.md",
                    "O1_inference_mode": {
                        "priority": "critical", "rule": "Use `inference_mode` on forward.", "why": "autograd was on",
                        "real_engine": "qwen.py", "apply_to": ["forward"], "audit_check": "grep -c 'inference_mode' qwen.py -> 2 hits",
                    },
                    "O2_zero_item": {"rule": "Zero item calls in decode.", "apply_to": ["decode"], "audit_check": "grep -c 'item\\(\\)' qwen.py -> 0 hits"},
                },
                "model": {"file": "qwen.py", "pseudocode": ["@torch.inference_mode()", "def forward(x):", "@torch.inference_mode()", "def decode(x):"]},
            },
        },
        "todo_generation_playbook": {"phase_9": {"done_criteria": ["Runs O1 and O2 on 4 scripts."]}},
    },
    "model_layer": {
        "architecture_knowledge_base": {
            "failure_mode_library": {"entries": [{"id": "FM-001", "category": "embedding", "symptom": "wrong rows", "fix": "shard once", "check": "grep shard"}]}
        }
    },
}  # fmt: skip
CONTRACTS = ("framework_layer", "data_flow_contracts")
PHASE = ("framework_layer", "todo_generation_playbook", "phase_9")


def with_fault(*changes: tuple[tuple[str, ...], Any]) -> dict[str, Any]:
    data = copy.deepcopy(CLEAN)
    for path, value in changes:
        node = data
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return data


def rule(name: str, text: str, **more: Any) -> tuple[tuple[str, ...], Any]:
    return ((*PERFORMANCE, name), {"rule": text, **more})


def code(name: str, *lines: str, **more: Any) -> tuple[tuple[str, ...], Any]:
    return ((*CONTRACTS, "tp_layer_interface_contracts", name), {"pseudocode": list(lines), **more})


def note(name: str, text: str) -> tuple[tuple[str, ...], Any]:
    return ((*CONTRACTS, f"{name}_{len(text)}_{text[:12]}", "note"), text)  # a place of its own for every note


def test_a_file_without_faults_has_no_problem() -> None:
    assert check(CLEAN) == []


# One row per known contradiction of the published file, shown in our own words.
FAULTS = {
    "1 a block count of 128 and of 160": ([note("n", "For this model max_blocks = 128.")], Kind.CONSTANT_DISAGREES, "max_blocks is"),
    "2 rounded down and up": (
        [note("a", "num_pages = positions // page_size"), note("b", "num_pages = (positions + page_size - 1) // page_size")],
        Kind.CONSTANT_DISAGREES, "rounded down and up",
    ),
    "3 one rule recommends what another forbids": (
        [rule("P1_prealloc", "Use `empty_like` for decode buffers."), rule("O3_prealloc", "Never use `empty_like` in decode.")],
        Kind.DEMANDS_WHAT_IS_FORBIDDEN, "empty_like",
    ),
    "3 and the audit rejects its own reference": (
        [rule("O3_prealloc", "Explicit buffers.", audit_check="grep -c 'empty_like' qwen.py -> 0 hits"), code("norm", "out = torch.empty_like(x)", file="qwen.py")],
        Kind.AUDIT_FAILS_ON_ITS_EVIDENCE, "1 times in its own reference",
    ),
    "4 one read allowed, and none": ([rule("P5_item", "At most one item call per step, batched.")], Kind.CONSTANT_DISAGREES, "host reads per step"),
    "4 and the audit does not read the sampler": ([code("sampler", "token = logits.argmax().item()", file="sampler.py")], Kind.AUDIT_MISSES_FILES, "sampler.py"),
    "5 prefill code uses what is for decode only": (
        [rule("O5_direct", "Assign directly; `index_copy_` only in decode."), code("prefill_write", "cache.index_copy_(0, slots, k)", phase="prefill")],
        Kind.DEMANDS_WHAT_IS_FORBIDDEN, "index_copy_",
    ),
    "6 whole allocation forbidden, and written": (
        [note("lazy", "Lazy allocation is mandatory; full max_blocks allocation is forbidden."), code("cache", "k = torch.zeros(max_blocks, page, heads, dim)")],
        Kind.DEMANDS_WHAT_IS_FORBIDDEN, "whole cache",
    ),
    "7 keyword-only function called by position": (
        [note("flash", "Pass every argument of flash_attn_with_kvcache by keyword."), code("attend", "o = flash_attn_with_kvcache(q, k_cache, v_cache, causal=True)")],
        Kind.DEMANDS_WHAT_IS_FORBIDDEN, "by position",
    ),
    "8 weight of the own and of the next layer": (
        [note("a", "fused_add_rms_norm takes the weight of the next layer."), note("b", "fused_add_rms_norm takes the weight of its own layer.")],
        Kind.CONSTANT_DISAGREES, "own layer, and of the next",
    ),
    "9 todos name rules that are gone": ([((*PHASE, "implementation_todos"), ["Apply P3, then P4."])], Kind.UNKNOWN_REFERENCE, "P3, P4"),
    "10 targets for different numbers of GPUs": (
        [((*PHASE, "performance_gate"), "Throughput above 50 tok/s at TP=4."), ((*PHASE, "criteria"), ["Above 54 tok/s on a single GPU."])],
        Kind.CONSTANT_NEEDS_NARROWER_SCOPE, "4 GPUs",
    ),
    "11 eager only, and graphs": (
        [note("iron_law", "Eager mode only: CUDA graphs are forbidden."), ((*CONTRACTS, "cuda_graph_execution_contract"), {"rule": "Decode must capture CUDA graphs per layer."})],
        Kind.DEMANDS_WHAT_IS_FORBIDDEN, "CUDA graphs",
    ),
    "12 scripts that are not there": (
        [((*PHASE, "test_interface_contracts"), {"scripts": [{"file": "a.py"}, {"file": "b.py"}]})], Kind.COUNT_DISAGREES, "4 scripts; 2 are registered",
    ),
    "12 and coverage of more failure modes than there are": ([note("n", "Covers 17/17 failure modes.")], Kind.COUNT_DISAGREES, "library has 1"),
    "13 one GPU against four": ([note("n", "Graphs reach 35.4 tok/s on a single GPU, eager 55.7 tok/s at TP=4.")], Kind.COMPARES_UNLIKE, "1 GPU and 4 GPUs"),
    "14 contiguous and paged": ([note("n", "In round 3 the KV cache is contiguous.")], Kind.CONSTANT_DISAGREES, "contiguous in one place"),
    "15 two sizes of one patch": ([note("a", "The patch is +16/-8 lines."), note("b", "The commit has +41/-33 lines.")], Kind.CONSTANT_DISAGREES, "+16/-8 and +41/-33"),
    "16 a share computed on disowned rounds": (
        [note("a", "The numbers of ROUND_1 are untraceable."), rule("O9_share", "82 % of the gain.", why="Computed on ROUND_1.")],
        Kind.DISOWNED_EVIDENCE, "ROUND_1",
    ),
    "17 an in-place kernel on what may be a copy": (
        [code("residual", "r = residual.contiguous()", "fused_norm(x, r, w)", "return x, residual")], Kind.FAULTY_CODE, "returns residual",
    ),
    "18 a constant for the free blocks": ([rule("O8_free", "Return num_free_blocks as a constant.")], Kind.CONSTANT_NEEDS_NARROWER_SCOPE, "nothing can be refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_known_contradiction_is_found(name: str) -> None:
    changes, kind, words = FAULTS[name]
    found = check(with_fault(*changes))
    assert any(p.kind is kind and words in p.detail for p in found), [str(p) for p in found]


def test_all_of_them_at_once_are_found_in_one_file() -> None:
    everything = check(with_fault(*(change for changes, _, _ in FAULTS.values() for change in changes)))
    for name, (_, kind, _) in FAULTS.items():
        assert any(p.kind is kind for p in everything), name
    assert len({p.detail for p in everything}) >= len(FAULTS)


def test_import_keeps_every_field_and_accepts_nothing() -> None:
    one, two, failure = import_entries(CLEAN)
    assert (one.status, one.mechanism, one.legacy.priority) == (Status.IMPORTED, "inference-mode", "critical")  # type: ignore[union-attr]
    assert one.legacy is not None and one.legacy.real_engine == "qwen.py" and one.legacy.verified_by == "reports/round_2.md"
    assert one.audit[0].least == one.audit[0].most == 2 and two.audit[0].most == 0
    assert one.scope == Scope() and failure.id == "metainfer.FM-001" and failure.topic == "failure-modes"
    with pytest.raises(BlueprintError, match="neither"):
        import_entries({})
    with pytest.raises(BlueprintError, match="O1_x: not an object"):
        import_entries(with_fault(((*PERFORMANCE, "O1_x"), {"why": "?"})))


def test_audits_are_read_where_they_have_the_known_form() -> None:
    assert parse_audit("grep -c 'x' a.py -> at least 6 hits").most is None  # type: ignore[union-attr]
    assert parse_audit("look at it") is None


def test_export_adds_accepted_entries_under_new_numbers_and_reads_back() -> None:
    full = {"engine": ["e"], "tp": [4], "batch": [1]}
    new = Entry(
        id="run.1", topic="t", mechanism="merge-projections", title="t", rule="One product.", why="0.9", detection=Detection(signature="s"),
        scope=Scope(**full), status=Status.ACCEPTED, reviewer="me", patch="+++ b/engine/model.py\n", gain=Gains(marginal=Gain(ratio=0.9, ci95=(0.88, 0.93), pairs=6)),
    )  # fmt: skip
    back = import_entries(CLEAN)[0].model_copy(update={"status": Status.ACCEPTED})
    done = export_entries([new, back, new.model_copy(update={"id": "run.2", "status": Status.PROPOSED})], CLEAN, "2026-12-01")
    node = find(done, PERFORMANCE)
    assert list(node) == ["verified_by", "O1_inference_mode", "O2_zero_item", "O3_merge_projections"]
    assert node["O1_inference_mode"]["audit_check"] == CLEAN["framework_layer"]["data_flow_contracts"]["tp_layer_interface_contracts"]["performance_optimization"]["O1_inference_mode"]["audit_check"]
    assert node["O3_merge_projections"]["apply_to"] == ["engine/model.py"] and node["O3_merge_projections"]["measured_gain"]["ci"] == [0.88, 0.93]
    assert done["metadata"] == {"name": "b", "version": "2.3.1", "last_updated": "2026-12-01"}
    again = export_entries([new], done, "2026-12-02")  # the same entry keeps its number
    assert list(find(again, PERFORMANCE)) == list(node)
    assert {e.legacy.key for e in import_entries(done) if e.legacy} >= {"O3_merge_projections"}
    clash = new.model_copy(update={"id": "run.9", "legacy": Legacy(key="O3_merge_projections")})
    with pytest.raises(BlueprintError, match=r"already run\.1"):
        export_entries([clash], done, "2026-12-02")
