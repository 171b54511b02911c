"""The end of a run: the first engine against the final one, in the time that was set aside for it.

Not for: the gain of one patch (it comes from its confirmation), or dropping members (ablate.py).
"""

from __future__ import annotations

import statistics
from typing import Any

from optimizer import accept, state
from optimizer.budget import headline_pairs
from optimizer.candidate import incumbent_name
from optimizer.gates.model_math import Model
from optimizer.judge import calibration_of, failures, kept, take_pair
from optimizer.run import Run
from optimizer.services import Services, Stop
from optimizer.types import Pair, Stage


def headline(run: Run, do: Services) -> dict[str, Any] | None:
    """Ratio of the final engine's time to the first one's, with interval and pairs; None when nothing was accepted."""
    final = run.repo.incumbent()
    if final == run.base:
        return None
    first = run.spec(run.base, incumbent_name(run.base), "original")
    last = run.spec(final, incumbent_name(final), "final")
    key = f"headline/{final}"
    why = None
    try:
        with failures(run, Stage.HEADLINE):
            while headline_pairs(do.budget, len(kept(_pairs(run, key)))) and len(_pairs(run, key)) < 2 * planned(do):
                take_pair(run, do, first, last, Stage.HEADLINE, key, None)
    except Stop as stop:
        why = f"{stop.reason}: {stop.detail}"
    good = kept(_pairs(run, key))
    if len(good) < planned(do) and why is None:
        why = "the time set aside was spent"
    found: dict[str, Any] = {"pairs": len(good), "planned": planned(do), "short": why if len(good) < planned(do) else None}
    if good:
        ratio, ci95 = accept.interval(good, calibration_of(run))
        found |= {
            "ratio": ratio,
            "ci95": list(ci95),
            "a_us": statistics.median(p.a_us_per_token or 0.0 for p in good),
            "b_us": statistics.median(p.b_us_per_token or 0.0 for p in good),
        }
    return found


def floor(run: Run, do: Services) -> dict[str, float]:
    """What one stream cannot beat here: every token reads all weights, in the run's dtype, at the bandwidth just measured.

    Measured once, before the first candidate; {} where there is nothing to measure with.
    """
    if do.bandwidth is None:
        return {}
    try:
        size = int(Model.of(run.request.model_dir).pass_bytes(4 if run.request.dtype == "float32" else 2))
    except KeyError:  # a config.json that is not of a dense decoder: no bound, and so none is shown
        return {}
    rate = do.bandwidth(size)
    return {"bound_us_per_token": size / rate * 1e6, "bound_bytes": size, "bandwidth_bytes_per_s": rate}


def bound_us(run: Run) -> float | None:
    """Least microseconds per token that this machine allows one stream, as measured at the start and by the physics gate."""
    lines = run.ledger.lines()
    floors = [line["data"]["bound_us_per_token"] for line in lines if line["kind"] == "calibrated" and line["data"].get("bound_us_per_token")]
    floors += [
        line["data"]["facts"]["floor_s"] * 1e6
        for line in lines
        if line["kind"] == "gate" and line["data"].get("gate") == "physics" and line["data"]["facts"].get("floor_s")
    ]
    return min(floors, default=None)


def planned(do: Services) -> int:
    return do.protocol.headline_pairs


def _pairs(run: Run, key: str) -> list[Pair]:
    return state.pairs(run.ledger.lines(), Stage.HEADLINE, key, run.ledger.context.incumbent_commit)

