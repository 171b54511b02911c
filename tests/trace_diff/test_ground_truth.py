"""Public and built traces with exact ground truth: our totals agree to the nanosecond."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from trace_diff import summary
from trace_diff.ingest import gather, load
from trace_diff.ingest.schema import WORK_KINDS
from trace_diff.links import links
from trace_diff.types import Kind

_MANIFEST = Path(__file__).resolve().parents[3] / "shared" / "traces" / "manifest.json"
_FILES = json.loads(_MANIFEST.read_text())["files"] if _MANIFEST.is_file() else []
_WITH_TRUTH = [f for f in _FILES if (f.get("ground_truth") or {}).get("busy_us") is not None]
_REST = [f for f in _FILES if f not in _WITH_TRUTH]


def _param(entry: dict):
    return pytest.param(entry, id=entry["file"])


@pytest.mark.parametrize("entry", [_param(f) for f in _WITH_TRUTH] or [pytest.param(None, marks=pytest.mark.skip("no manifest"))])
def test_totals_agree_with_the_ground_truth_exactly(shared, entry):
    truth = entry["ground_truth"]
    trace = load(shared / "traces" / entry["file"])
    got = summary.totals(trace)
    assert got["gpu_busy_ns"] == _ns(truth["busy_us"])
    assert got["gpu_span_ns"] == _ns(truth["span_us"])
    assert got["gpu_idle_ns"] == _ns(truth["idle_us"])
    rows = trace.rows(*WORK_KINDS)
    assert len(rows) == truth["n_gpu"]
    assert len(trace.rows(Kind.KERNEL)) == truth["n_kernel"]
    assert int(trace.events.dur_ns[rows].sum()) == _ns(truth["sum_dur_us"])
    assert len(np.unique(trace.events.stream[rows])) == truth["streams"]
    assert round(100 * got["gpu_idle_ns"] / got["gpu_span_ns"], 2) == pytest.approx(truth["idle_pct"], abs=0.011)
    tied = links(trace)
    assert int(tied.in_graph.sum()) == truth["graph_kernels"]
    assert int((tied.launch < 0).sum()) == truth["no_launch"]
    assert tied.negative == truth["neg_latency"]
    assert len(trace.rows(Kind.SYNC)) == truth["sync_events"]
    assert _overlaps(trace, rows) == truth["same_stream_overlaps"]
    assert (trace.notes.quarantined, trace.notes.lost) == (0, 0)


def _ns(us: float) -> int:
    """The manifest's figures are microseconds with three decimals."""
    return int(Decimal(str(us)) * 1000)


def _overlaps(trace, rows) -> int:
    order = rows[np.argsort(trace.events.track[rows], kind="stable")]
    start, end = trace.events.ts_ns[order], trace.events.ts_ns[order] + trace.events.dur_ns[order]
    same = trace.events.track[order][1:] == trace.events.track[order][:-1]
    return int((same & (start[1:] < end[:-1])).sum())


@pytest.mark.parametrize("entry", [_param(f) for f in _REST] or [pytest.param(None, marks=pytest.mark.skip("no manifest"))])
def test_every_other_file_loads_and_its_steps_sum(shared, entry):
    trace = load(shared / "traces" / entry["file"])
    shown = summary.show(gather([trace], "one"))["ranks"][0]
    if (entry.get("ground_truth") or {}).get("gpu_events") == 0:
        assert len(trace.rows(*WORK_KINDS)) == 0 and shown["gpu_span_ns"] is None
    assert shown["truncated"] == ("truncated" in entry["file"])
    assert shown["lost"] == int("truncated" in entry["file"])
    for step in shown["steps"]:
        assert sum(step["parts"].values()) == step["wall_ns"]
        assert all(ns > 0 for ns in step["parts"].values())
