"""Tables of skills: the attempt's own measure, not a later look at the whole run; bold where an interval excludes 1."""

from __future__ import annotations

import pytest

from benchmarks.outside_engines import cells, outcome
from benchmarks.skill_effects import effect


def test_the_ablation_at_the_end_of_a_run_does_not_overwrite_its_attempt(repo) -> None:
    found = outcome(repo / "reports/gallery/mcp-tiny")
    assert found is not None and found["verdict"] == "accepted"
    assert found["ci95"][0] < found["ratio"] < found["ci95"][1] < 1
    assert cells(found)[1].startswith("0.691 [0.545, 0.876]")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, ""),
        ({"why": "declines: a | b"}, "declines: a / b"),
        ({"ratio": 0.9, "ci95": [0.8, 1.01], "metric": "tok/s"}, "0.900 [0.800, 1.010]"),
        ({"ratio": 0.9, "ci95": [0.8, 0.99], "metric": "ttft"}, "**0.900 [0.800, 0.990]** to the first token"),
        ({"ratio": 1.2, "ci95": [1.1, 1.3], "metric": "tok/s"}, "**1.200 [1.100, 1.300]**"),
    ],
)
def test_what_a_skill_brings_alone_is_bold_where_it_is_shown(found, text) -> None:
    assert effect(found) == text
