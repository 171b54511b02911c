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
FIRST = (("vLLM", "cuda graph"), ("vLLM", "eager"), ("MetaInfer meta0", "eager"))  # engine and mode; then all others


def stored(device: str, tp: int, batch: int) -> list[Analysis]:
    """Decode traces kept with this code for the device class, the nearest cell first, then as in FIRST; stacks, which
    slow an engine down, last. Empty when none can be read."""
    try:
        known = baselines.load_index(check=False)
    except (baselines.BaselineError, OSError):
        return []
    fitting = [t for t in known if (t.device == "cpu") == (device == "cpu") and "decode" in t.phases]
    fitting.sort(key=lambda t: (t.tp != tp, t.batch != batch, "with_stack" in t.profiler, _place(t), t.id))
    found = []
    for trace in fitting[:MOST]:
        try:
            baselines.verify(trace)
            loaded = api.load(list(trace.paths), trace.label)
            found.append(api.analyse(loaded, tp=trace.tp, engine=trace.label).with_control(trace.control_us))
        except (baselines.BaselineError, TraceError, ValueError, OSError):
            continue  # context that cannot be read is left out: nothing depends on it
    return found


def _place(trace: baselines.BaselineTrace) -> int:
    which = trace.engine, trace.mode
    return FIRST.index(which) if which in FIRST else len(FIRST)


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
