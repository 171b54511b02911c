"""Plain values that figures draw: made by `run_page`, drawn by `figures`, importing neither."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """One accepted patch: levels in microseconds per token."""

    label: str
    before_us: float
    after_us: float
    predicted_us: float | None  # predicted saving


@dataclass(frozen=True, slots=True)
class Reference:
    """A horizontal line: another engine or the bound, in microseconds per token."""

    label: str
    us: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """One point of the calibration plot, savings in microseconds."""

    label: str
    predicted_us: float
    measured_us: float
    outcome: str
