"""The bundled traces are whole, say where they came from, and can be read; published rows stay context."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reports import baselines
from trace_diff import ingest, windows

INDEX = baselines.load_index(check=False)


def test_every_file_is_the_one_that_the_index_describes() -> None:
    for trace in baselines.load_index():
        assert trace.licence and trace.version and trace.provenance["environment"]
        for entry in trace.provenance["files"]:
            assert len(entry["parent_sha256"]) == 64 and entry["command"]


def test_the_bundle_stays_small() -> None:
    assert sum(p.stat().st_size for t in INDEX for p in t.paths) < 10_500_000


@pytest.mark.parametrize("trace", INDEX, ids=[t.id for t in INDEX])
def test_a_bundled_trace_holds_complete_steps_of_its_phases(trace: baselines.BaselineTrace) -> None:
    found = ingest.load_many(trace.paths)
    assert sorted(found.traces) == list(range(trace.tp))
    for rank in found:
        assert not rank.notes.truncated
        phases = {str(s.phase) for s in windows.steps(rank) if s.complete}
        assert phases == set(trace.phases)


def test_an_edited_file_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(baselines.ROOT, tmp_path / "b")
    victim = tmp_path / "b" / INDEX[0].paths[0].relative_to(baselines.ROOT)
    victim.write_bytes(victim.read_bytes() + b"\0")
    with pytest.raises(baselines.BaselineError, match=victim.name):
        baselines.load_index(tmp_path / "b")
    victim.unlink()
    with pytest.raises(baselines.BaselineError, match="missing"):
        baselines.get(INDEX[0].id, tmp_path / "b")


def test_an_unknown_id_names_the_valid_ones() -> None:
    with pytest.raises(baselines.BaselineError, match="h200-vllm-graph"):
        baselines.get("nope")


def test_published_rows_are_labelled_with_source_and_hardware() -> None:
    rows = {r.id: r for r in baselines.published()}
    assert all(r.source and r.hardware for r in rows.values())
    assert rows["readme5-vllm-graph"].tok_s == 172.7
    assert rows["readme5-generated"].values["self_cuda_ms"] == 207.1
    assert "never a threshold" in json.loads((baselines.ROOT / "published.json").read_text())["label"]


def test_clean_step_times_are_those_of_the_figures(shared: Path) -> None:
    figures = json.loads((shared / "baselines/h200_tp1/figures.json").read_text())
    by_id = {t.id: t for t in INDEX}
    graph = figures["vllm_0_25_1_graph_by_batch_and_context"]["bs1_decode_ms_per_step"]
    assert by_id["h200-vllm-graph"].control_us == round(graph * 1000)
    wall = figures["metainfer_engines_interleaved_12_tokens_quiet_host"]["generated"][1]
    assert by_id["h200-metainfer-generated"].control_us == round(wall / 12 * 1000)
