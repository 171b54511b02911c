"""`--goal` as a number: every target in the unit that a person states it in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optimizer import run, state, stopping, targets

MIB = 1 << 20


@pytest.mark.parametrize(
    ("target", "goal", "not_yet", "reached", "says"),
    [
        ("tok/s", "60", 20_000.0, 16_000.0, "62.5 of 60 tok/s"),
        ("tpot", "16", 20_000.0, 15_900.0, "15.9 of 16 ms"),
        ("ttft", "35.5", 36_000.0, 35_500.0, "35.5 of 35.5 ms"),
        ("throughput@8", "400", 2_600.0, 2_500.0, "400.0 of 400 tok/s"),
        ("goodput@200,50", "3", 500_000.0, 250_000.0, "4.0 of 3 requests/s"),
        ("memory", "512", 600.0 * MIB, 511.0 * MIB, "511.0 of 512 MiB"),
    ],
)
def test_a_run_ends_when_the_number_is_reached_whichever_way_is_better(monkeypatch, target, goal, not_yet, reached, says):
    wanted = run.parse_goal(goal, targets.stated(target, 1.0)[1])
    asked: Any = SimpleNamespace(request=SimpleNamespace(goal=wanted, metric=target))
    monkeypatch.setattr(state, "token_us", lambda lines: None)
    assert stopping.goal_reached(asked, []) is None, "nothing was measured yet"
    monkeypatch.setattr(state, "token_us", lambda lines: not_yet)
    assert stopping.goal_reached(asked, []) is None
    monkeypatch.setattr(state, "token_us", lambda lines: reached)
    assert stopping.goal_reached(asked, []) == f"goal reached: {says}"
