"""Traces of the incumbent and of other engines become a side-by-side diff and findings.

Not for: capturing (capture.py), the rules (trace_diff/findings), drawing (reports).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from optimizer.services import Capture, Diagnosis
from trace_diff import api, classify
from trace_diff.analysis import Analysis
from trace_diff.ingest import TraceError
from trace_diff.types import Kind

PRODUCTS = "products"  # a row for activation signatures: matrix products under any name, inside CUDA graphs too
SHOWN_FINDINGS = 8  # on the terminal; the report has all


class DiagnoseError(Exception):
    """The incumbent's own traces cannot be read or hold no decode step: the loop has nothing to go by."""


def diagnose(
    capture: Capture,
    references: Sequence[Capture] = (),
    label: str = "incumbent",
    context: Sequence[Analysis] = (),
) -> Diagnosis:
    """Diff the capture against the references and ask every rule. Raises DiagnoseError.

    `context` is shown beside them, as far as it measured the same cell in the comparison itself.

    A reference that cannot be read is left out and named in `facts["left_out"]`. `step_us` is the mean wall of a
    profiled decode step on the rank that sets the pace.
    """
    try:
        here = _analyse(capture, label)
    except (TraceError, ValueError, OSError) as error:
        raise DiagnoseError(f"traces of {capture.label}: {error}") from error
    others: list[Analysis] = []
    left_out: list[str] = []
    for reference in references:
        try:
            others.append(_analyse(reference, title(reference)))
        except (TraceError, ValueError, OSError) as error:
            left_out.append(f"{title(reference)}: {error}")
    others += context
    diff = api.compare([here, *others])
    control = None if capture.control_us_per_token is None else capture.control_us_per_token
    findings = tuple(api.find(here, others, control_step_us=control))
    return Diagnosis(
        findings=findings,
        step_us=here.breakdown.wall_ns / 1000,
        tokens_per_step=here.tokens_per_step,
        rows=_rows(here),
        shown=_drawn(diff, [here, *others], findings),
        facts={"diff": diff.to_json(), "left_out": left_out},
    )


def title(capture: Capture) -> str:
    """What a reference is called on screen."""
    engine = str(capture.metadata.get("engine") or capture.label)
    return f"{engine} TP={capture.tp}"


def _analyse(capture: Capture, label: str) -> Analysis:
    stated: dict[str, Any] = {"tp": capture.tp, "batch": capture.batch, "tokens": capture.batch, "engine": label}
    dtype = capture.metadata.get("dtype")
    if dtype:
        stated["dtype"] = str(dtype)
    found = api.analyse(api.load(list(capture.traces), label), phase="decode", **stated)
    return found.with_control(capture.control_us_per_token)


def _rows(analysis: Analysis) -> tuple[dict[str, float], ...]:
    """How often each named row occurs in a mean decode step, for every rank; and `PRODUCTS`, which no name counts."""
    counts = []
    for trace in analysis.traceset:
        steps = analysis.steps.get(trace.rank, ())
        if steps:
            rows = np.concatenate([step.rows for step in steps])
            named = {trace.names[i]: n / len(steps) for i, n in _often(trace.events.name[rows])}
            counts.append({**named, PRODUCTS: _products(trace, rows) / len(steps)})
    return tuple(counts)


def _often(ids: np.ndarray) -> Iterator[tuple[int, int]]:
    found, often = np.unique(ids, return_counts=True)
    return zip(found.tolist(), often.tolist(), strict=True)


def _products(trace: Any, rows: np.ndarray) -> int:
    """Matrix products among these rows: kernels by their class where there are any, else operators by theirs."""
    kernels = rows[trace.events.kind[rows] == Kind.KERNEL]
    class_of = classify.kernel_class if kernels.size else classify.op_class
    return sum(n for i, n in _often(trace.events.name[kernels if kernels.size else rows]) if class_of(trace.names[i]) in ("gemm", "gemv"))


def _drawn(diff: Any, analyses: list[Analysis], findings: Sequence[Any]) -> tuple[Any, ...]:
    from reports import terminal  # rich and jinja: only where something is drawn

    return (terminal.side_by_side(diff, analyses), terminal.findings(findings, limit=SHOWN_FINDINGS))
