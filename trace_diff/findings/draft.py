"""What a rule answers, before its saving is judged against everything else (ledger).

Not for: the finished finding that readers see (types.Finding).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trace_diff.whatif import Edit


class Basis(StrEnum):
    """What a saving's size rests on; decides what the observer effect does to it."""

    DEVICE = "device"  # device clocks: the profiler does not stretch them
    COUNTS = "counts"  # occurrences times a unit cost that was measured without the profiler
    HOST = "host"  # host durations as traced: stretched by the profiler, scaled to the control


@dataclass(frozen=True, slots=True)
class Draft:
    """A cost that was found. Amounts are ns per step on the rank that sets the pace.

    The saving is `edit` replayed on the representative step (whatif), or `direct_ns` where no replay can show
    it (waits for other ranks, time between steps), or with `rest` what remains of the step beyond its busy time
    once all causes are taken out.
    """

    title: str
    formula: str
    basis: Basis
    edit: Edit | None = None
    direct_ns: float | None = None
    rest: str | None = None  # "idle": wall beyond device busy time; "python": host time outside operators
    evidence: tuple[dict[str, Any], ...] = ()
    skills: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inferred: bool = False
    seen_in: tuple[int, int] | None = None  # (steps with it, steps averaged)
    counted_under: str | None = None  # rule that already claims this time: bound stays None
    suffix: str = ""  # makes the id unique when one rule answers several times


@dataclass(frozen=True, slots=True)
class NotFound:
    """The rule looked and there is nothing."""

    why: str
    evidence: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class CouldNotLook:
    """The rule had nothing to look at. `missing` says what would be needed."""

    missing: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


Answer = Draft | NotFound | CouldNotLook
