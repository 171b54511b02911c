"""Holistic Trace Analysis as a second opinion: equal where its arithmetic is exact, and why we differ where it is not."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from trace_diff import device, host, summary
from trace_diff.ingest import load

pytest.importorskip("hta", reason="the extra 'hta' is not installed")


def _hta(path: Path) -> tuple[dict, dict]:
    """(temporal breakdown, time per kernel type), in microseconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            from hta.trace_analysis import TraceAnalysis

            analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir="/", include_last_profiler_step=True)
            temporal = analysis.get_temporal_breakdown(visualize=False).iloc[0].to_dict()
            kinds = analysis.get_gpu_kernel_breakdown(visualize=False)[0]
        finally:
            logging.disable(logging.NOTSET)
    return temporal, dict(zip(kinds["kernel_type"], kinds["sum"], strict=True))


@pytest.mark.parametrize("name", ["rank0of128_sampled", "gpu_user_annotation_steps"])
def test_traces_of_whole_microseconds_agree_exactly(shared, name):
    path = shared / "traces" / f"{name}.json.gz"
    trace = load(path)
    ours = summary.totals(trace)
    temporal, kinds = _hta(path)
    assert ours["gpu_idle_ns"] == temporal["idle_time(us)"] * 1000
    assert ours["gpu_span_ns"] == temporal["kernel_time(us)"] * 1000
    lane = device.lanes(trace)
    whole = device.account(trace, int(lane.start[0]), int(lane.end.max()), host.side(trace))
    assert whole.parts.get("comm.unsplit", 0) == kinds.get("COMMUNICATION", 0) * 1000, "exposed communication"


def test_nanosecond_kernels_differ_because_hta_floors_them_to_microseconds(shared):
    """Every kernel loses up to a microsecond at each end: 25.5 us of idle time become 458."""
    path = shared / "traces" / "mi_vllm_decode_fullgraph_1step.json.gz"
    ours = summary.totals(load(path))
    temporal, _ = _hta(path)
    assert ours["gpu_idle_ns"] == 25_473
    lost = temporal["idle_time(us)"] * 1000 - ours["gpu_idle_ns"]
    assert 300_000 < lost < 434 * 2_000, "434 device rows, two ends each"
