"""What else is known and was measured elsewhere: stored traces and published rows, shown as context, never compared.

Not for: anything that a finding, a gate or a verdict rests on.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from reports import baselines
from trace_diff import api
from trace_diff.analysis import Analysis
from trace_diff.ingest import TraceError

MOST = 3  # stored engines on screen; the report and `trace-diff` know the others


def stored(device: str, tp: int) -> list[Analysis]:
    """Decode traces kept with this code for the device class, those of the same TP first. Empty when none can be read."""
    try:
        known = baselines.load_index(check=False)
    except (baselines.BaselineError, OSError):
        return []
    fitting = [t for t in known if (t.device == "cpu") == (device == "cpu") and "decode" in t.phases]
    fitting.sort(key=lambda trace: (trace.tp != tp, trace.id))
    found = []
    for trace in fitting[:MOST]:
        try:
            baselines.verify(trace)
            loaded = api.load(list(trace.paths), trace.label)
            found.append(api.analyse(loaded, tp=trace.tp, engine=trace.label).with_control(trace.control_us))
        except (baselines.BaselineError, TraceError, ValueError, OSError):
            continue  # context that cannot be read is left out: nothing depends on it
    return found


def published() -> Any | None:
    """Tokens per second that others published, the first figure of each engine and mode; None without the table."""
    try:
        first = {(row.engine, row.mode): row for row in reversed(baselines.published()) if row.tok_s is not None}
        rows = reversed(first.values())
    except (OSError, ValueError, KeyError):
        return None
    table = Table(
        title="Published elsewhere, on other hardware: context only", title_justify="left", title_style="bold", box=None
    )
    for head in ("engine", "mode", "tok/s", "hardware", "source"):
        table.add_column(head, justify="right" if head == "tok/s" else "left")
    for row in rows:
        table.add_row(row.engine, row.mode, f"{row.tok_s:.1f}", row.hardware, row.source)
    return table
