"""The table of outside engines says what the attempt measured, not what a later look at the whole run did."""

from __future__ import annotations

from benchmarks.outside_engines import cells, outcome


def test_the_ablation_at_the_end_of_a_run_does_not_overwrite_its_attempt(repo) -> None:
    found = outcome(repo / "reports/gallery/mcp-tiny")
    assert found is not None and found["verdict"] == "accepted"
    assert found["ci95"][0] < found["ratio"] < found["ci95"][1] < 1
    assert cells(found)[1].startswith("0.691 [0.545, 0.876]")
