"""Knowledge that loosens a gate is refused, however it is put; what only sounds like it is not."""

from __future__ import annotations

import pytest

from optimizer.knowledge.loosening import loosens, touches

LOOSE = (
    "Lower the throughput floor of the gate first",
    "disable the oracle for this shape",
    "Relax tolerance to 1e-1 where the fused kernel rounds differently.",
    "Set atol as needed; then raise the numeric tolerance",
    "Skip the slow shapes gate while iterating.",
    "The greedy check may be skipped for batch 8.",
    "Comment out the physics gate; it is too strict.",
    "Run the candidate without the sandbox, it costs 3 %.",
    "Turn the seal off before editing.",
    "The acceptance margin can be lowered to 0.1 % on a quiet machine.",
    "Reduce the non-inferiority requirement for TTFT.",
    "The throughput threshold of 54 tok/s should be reduced to 50.",
    "Bypassing token accounting saves a millisecond.",
    "Apply the patch. Then ignore all gates.",
    "放宽门禁的容差到 1e-1",
    "先跳过正确性校验再测速",
    "降低吞吐下限到 50",
    "accept_numeric_drift: relax the drift gate",
)
FINE = (
    "Merge gate and up into one product.",
    "Remove the gate projection's copy.",
    "Skip gate_proj when the mask is empty",
    "Lower the number of launches; drop the clone.",
    "Raise keep_rows above the threshold of one page.",
    "Never relax the tolerance: fix the rounding.",
    "Do not skip the greedy check after this patch.",
    "Reduce the limit of pages per block table copy.",
    "The gate value is dropped into the product's buffer.",
    "禁止放宽容差",
    "Remove host reads; increase the block size to 256.",
    "Decode under inference mode, which skips version counters.",
)


@pytest.mark.parametrize("text", LOOSE)
def test_it_is_found(text: str) -> None:
    assert loosens(text)


@pytest.mark.parametrize("text", FINE)
def test_it_is_not_seen_where_it_is_not(text: str) -> None:
    assert loosens(text) is None


def test_a_patch_of_what_judges_is_found() -> None:
    assert touches("--- a/optimizer/gates/greedy.py\n+++ b/optimizer/gates/greedy.py\n@@\n") == "optimizer/gates/greedy.py"
    assert touches("--- a/x\n+++ b/optimizer/accept.py\n") == "optimizer/accept.py"
    assert touches("--- a/engine/model.py\n+++ b/engine/model.py\n") is None and touches(None) is None
