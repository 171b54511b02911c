"""Holistic Trace Analysis as a second opinion: equal where its arithmetic is exact, and why we differ where it is not."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from trace_diff import critical_path, device, host, summary
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


def test_the_critical_path_of_a_step_that_launches_kernel_by_kernel_is_the_hosts(shared):
    trace = load(shared / "baselines" / "h200_tp1" / "metainfer_generated_eager.json.gz")
    found = critical_path.critical_path(trace, critical_path.pick(trace, "decode"))
    assert found.bound_by["cpu_bound"] > 0.9 * found.length_us, "as ours: the host is the slower side"
    assert {"name", "bound_by", "us", "count"} == set(found.rows[0])


@pytest.mark.parametrize(
    ("name", "index", "why"),
    [
        ("h200_tp1/vllm_graph_bs1_12tok.json.gz", None, "replays a graph"),
        ("h200_tp1/vllm_graph_bs1_12tok.json.gz", 99, "no step 99"),
        ("cpu_vllm/eager_tp1_rank0.pt.trace.json.gz", None, "no device work"),
    ],
)
def test_where_htas_path_would_be_wrong_it_is_refused_with_the_reason(shared, name, index, why):
    """In a graph replay HTA reads 4.9 ms of device work as one delay between two kernels."""
    trace = load(shared / "baselines" / name)
    with pytest.raises(critical_path.NoCriticalPath, match=why.replace("no device", "launches no device")):
        critical_path.critical_path(trace, critical_path.pick(trace, "decode", index))
