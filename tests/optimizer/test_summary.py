"""The table at the end of a run says what the report's page says of an attempt."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from optimizer import summary
from optimizer.ledger import Line


def lines(*entries: tuple[str, dict[str, Any]]) -> list[Line]:
    proposed = {"mechanism": "fused-kernels", "ast_hash": "k", "predicted_us": 10.0}
    return [{"kind": kind, "attempt": 1, "data": data} for kind, data in (("proposed", proposed), *entries)]  # type: ignore[misc]


def pair(stage: str, a: float, b: float, key: str = "k") -> tuple[str, dict[str, Any]]:
    return "pair", {"stage": stage, "key": key, "a_us_per_token": a, "b_us_per_token": b, "discarded": None}


def shown(entries: list[Line]) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(summary.table(entries))
    return console.file.getvalue()  # type: ignore[attr-defined]


SCREENED = ("screened", {"ratio": 0.725, "ci95": [None, None], "measured_us": 275.0, "member": None})


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ([pair("screen", 1000, 725), SCREENED], "0.725"),
        # Time ended within `decide`: its four pairs are what is known, not the one pair of the screen.
        ([pair("screen", 1000, 725), SCREENED, *[pair("decide", 1000, b) for b in (890, 1260, 950, 1050)]], "1.028 [0.8"),
        ([pair("screen", 1000, 725), SCREENED, pair("decide", 1000, 100, key="of another program")], "0.725"),
        ([pair("screen", 1000, 725), SCREENED, ("pair", {**pair("decide", 1000, 100)[1], "discarded": "foreign load"})], "0.725"),
        ([pair("screen", 1000, 400)], "0.400"),
        ([], ""),
    ],
)
def test_an_attempt_shows_its_latest_stage_that_has_pairs(entries, wanted) -> None:
    text = shown(lines(*entries, ("undecided", {"reason": "no_budget", "stage": "decide", "detail": "no time left"})))
    row = next(line for line in text.splitlines() if "fused-kernels" in line)
    assert wanted in row and ("0.725" in row) == (wanted == "0.725")
