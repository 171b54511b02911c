"""One token, N engines: spans stay on the axis, waiting is told from transfer, causes of idle time are those of the account."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import build_run
import build_trace
import numpy as np
import pytest

from reports import palette, timeline
from trace_diff import api, perfetto
from trace_diff.analysis import Analysis


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> list[Analysis]:
    folder = tmp_path_factory.mktemp("gpu")
    eager = build_trace.write(folder / "eager.json", build_trace.events())
    graph = build_trace.write(folder / "graph.json", build_trace.events(graph=True))
    return [api.analyse(api.load(eager, "eager")), api.analyse(api.load(graph, "graph"))]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(4):
        build_run.write_trace(folder / f"rank{rank}.json.gz", rank, comm_us=8000, autograd=False)
    return api.analyse(api.load(folder, "four ranks"))


def test_innermost_event_owns_each_bin() -> None:
    start, end = np.array([0, 10, 12, 50]), np.array([40, 30, 20, 60])
    edges = np.arange(0, 71, 10)
    assert timeline.innermost(start, end, edges).tolist() == [0, 2, 1, 0, -1, 3, -1]


def test_spans_lie_inside_the_step_and_do_not_overlap(gpu: list[Analysis]) -> None:
    view = timeline.build(gpu)
    assert view is not None and [e.title.split(":")[0] for e in view.engines] == ["eager", "graph"]
    for engine in view.engines:
        for lane in engine.lanes:
            spans = sorted(lane.spans, key=lambda s: s.start_us)
            assert spans and spans[0].start_us >= 0
            assert spans[-1].start_us + spans[-1].dur_us <= view.end_us
            for a, b in itertools.pairwise(spans):
                assert a.start_us + a.dur_us <= b.start_us + 0.002


def test_device_lane_holds_all_kernel_time_of_the_step(gpu: list[Analysis]) -> None:
    view = timeline.build(gpu)
    assert view is not None
    for engine, analysis in zip(view.engines, gpu, strict=True):
        step = timeline.step_of(analysis, 0)
        assert step is not None
        lane = next(x for x in engine.lanes if x.device)
        trace = analysis.traceset.traces[0]
        own = step.rows[np.isin(trace.events.kind[step.rows], (1, 2, 3))]
        ends = trace.events.ts_ns[own] + trace.events.dur_ns[own]
        inside = np.minimum(ends, step.end_ns) - np.maximum(trace.events.ts_ns[own], step.start_ns)
        assert sum(s.dur_us for s in lane.spans) == pytest.approx(np.maximum(inside, 0).sum() / 1000, rel=0.02)


def test_idle_causes_are_those_of_the_account(gpu: list[Analysis]) -> None:
    view = timeline.build(gpu)
    assert view is not None
    idle = {s.category for s in next(x for x in view.engines[0].lanes if x.device).idle}
    causes = {p for p in gpu[0].breakdown.parts if p.startswith("idle.")}
    assert idle and idle <= causes


def test_a_graph_replay_is_marked_once(gpu: list[Analysis]) -> None:
    view = timeline.build(gpu)
    assert view is not None
    eager, graph = (next(x for x in e.lanes if x.device) for e in view.engines)
    assert not eager.replays and len(graph.replays) == 1
    assert "21 kernels" in graph.replays[0].text


def test_waiting_for_the_late_rank_has_its_own_shade(ranks: Analysis) -> None:
    view = timeline.build([ranks])
    assert view is not None
    waits = [sum(s.dur_us for s in lane.spans if s.category == timeline.WAIT) for lane in view.engines[0].lanes]
    assert waits[2] < 5, "rank 2 is the late one: it waits for nobody"
    assert all(1900 < w < 2100 for w in (waits[0], waits[1], waits[3])), "4 layers x 500 us"
    assert palette.colour(timeline.WAIT) != palette.colour("communication")


def test_a_lane_never_holds_more_spans_than_its_share(gpu: list[Analysis], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_ALL_SPANS", 10)
    view = timeline.build(gpu)
    assert view is not None
    assert all(len(lane.spans) <= 2 * 151 for e in view.engines for lane in e.lanes)


def test_perfetto_export_aligns_the_steps_of_all_engines(gpu: list[Analysis], tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    perfetto.export(gpu, out)
    data = json.loads(out.read_text())["traceEvents"]
    zero = next(e["ts"] for e in data if e["name"] == "the aligned step starts")
    names = {e["pid"]: e["args"]["name"] for e in data if e["name"] == "process_name"}
    assert sorted(names.values()) == ["eager: GPU", "eager: host", "graph: GPU", "graph: host"]
    for analysis in gpu:
        host = next(p for p, n in names.items() if n == f"{analysis.label}: host")
        starts = [e["ts"] for e in data if e["ph"] == "X" and e["pid"] == host and e["cat"] == "step"]
        assert min(abs(s - zero) for s in starts) < 15, "a step of every engine starts at the common zero"
    assert all(e["ts"] >= 0 for e in data if "ts" in e)
    perfetto.export(gpu, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == out.read_bytes()
