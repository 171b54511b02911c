"""Whether loading lost so much that no verdict on the averaged steps is safe.

A damaged trace is analysed as far as it is good; but a rule that finds nothing where events are missing has not
looked. Not for: repairing (ingest), single odd rows that were set aside without harm.
"""

from __future__ import annotations

import numpy as np

from trace_diff.findings.context import Context

MOST_LOST = 0.01  # of the rank's events, or of a step's rows
MOST_INCOMPLETE = 0.5  # of the phase's steps, first and last not counted


def doubts(context: Context) -> tuple[str, ...]:
    """Reasons to withhold every verdict; empty when the averaged steps are whole."""
    notes, events = context.trace.notes, context.trace.events
    out: list[str] = []
    if notes.lost > MOST_LOST * max(1, len(events)):
        out.append(f"{notes.lost} of {len(events) + notes.lost} events could not be read")
    aside = context.trace.quarantine
    if len(aside):
        inside = sum(
            int(np.count_nonzero((aside.ts_ns >= s.start_ns) & (aside.ts_ns < s.end_ns))) for s in context.steps
        )
        rows = sum(len(s.rows) for s in context.steps)
        if inside > MOST_LOST * max(1, rows):
            out.append(f"{inside} rows of the averaged steps have no usable time")
    if context.trace.strange_device:
        out.append(f"the device's rows are of categories unknown to this tool: {', '.join(context.trace.unknown)}")
    total, bad = context.analysis.seen_steps
    if total and bad > MOST_INCOMPLETE * total:
        out.append(f"{bad} of {total} steps of this phase are empty or not whole")
    return tuple(out)
