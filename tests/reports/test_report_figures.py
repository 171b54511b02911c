"""Figures give the same bytes for the same input and survive extreme values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from matplotlib.figure import Figure

from reports import figures
from reports.views import Prediction, Reference, WaterfallStep

STEPS = [
    WaterfallStep("1 custom-all-reduce", 54_800, 14_800, 38_000),
    WaterfallStep("2 inference_mode", 14_800, 15_100, None),
]


def _waterfall() -> Figure:
    return figures.waterfall(54_800, STEPS, 13_000, [Reference("vLLM $x$", 9_000), Reference("bound", 10)])


def _tiny() -> Figure:
    return figures.waterfall(0.4, [], None)


def _calibration() -> Figure:
    return figures.calibration([Prediction("1", 900, 950, "accepted"), Prediction("2", 40_000, -12, "undecided")])


def _all_lost() -> Figure:
    return figures.calibration([Prediction("1", 100, 0.0, "rejected"), Prediction("2", 0.0, -5, "weird outcome")])


@pytest.mark.parametrize("draw", [_waterfall, _tiny, _calibration, _all_lost])
def test_the_same_input_gives_the_same_bytes(draw: Callable[[], Figure]) -> None:
    assert figures.svg(draw()) == figures.svg(draw())
    assert figures.png(draw()) == figures.png(draw())


def test_svg_holds_no_date_no_version_and_no_link() -> None:
    text = figures.svg(_waterfall())
    assert text.startswith("<svg")
    assert "<dc:date" not in text and "Matplotlib" not in text
    assert "href" not in text.replace('xlink:href="#', "").replace("xmlns:xlink", "")


def test_long_waterfalls_use_a_log_axis_and_short_ones_do_not() -> None:
    assert _waterfall().axes[0].get_yscale() == "log"
    assert figures.waterfall(100, [WaterfallStep("1", 100, 80, 20)], 80).axes[0].get_yscale() == "linear"


def test_bars_stand_where_their_levels_are() -> None:
    bars = [p for p in _waterfall().axes[0].patches if p.get_facecolor()[3] and hasattr(p, "get_height")]
    fallen = next(p for p in bars if abs(p.get_height() - 40_000) < 1)
    assert fallen.get_y() == 14_800


@pytest.mark.parametrize("steps", [1, 6, 12])
def test_labels_of_neighbouring_bars_do_not_touch(steps: int) -> None:
    """Six patches' names once ran into each other, and `merge-projections + skinny-gemm` lost its second half."""
    names = ["cuda-graph-capture", "merge-projections + skinny-gemm", "preallocate-decode-buffers", "paged-attention-backend"]
    figure = figures.waterfall(1000, [WaterfallStep(f"{n} {names[n % 4]}", 1000 / n, 900 / n, 80) for n in range(1, steps + 1)], 50)
    figure.canvas.draw()
    labels = figure.axes[0].get_xticklabels()
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert "skinny-" in labels[1].get_text() or "merge-" not in labels[1].get_text()
