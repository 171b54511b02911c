"""The engine of the transfer experiment: right under the oracle, still right after the skills that act on it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import knowledge_transfer as transfer
from optimizer import seal, start, target_init
from optimizer.confine.launch import launch
from optimizer.gates import streams
from optimizer.knowledge import learning
from optimizer.knowledge.blueprint import Blueprint, Status
from optimizer.proposers import skillbook
from optimizer.target import load_target
from optimizer.traffic.client import Request
from optimizer.truth.oracle import Oracle
from optimizer.types import LaunchSpec

MODEL = transfer.MODEL
EDITABLE = ("generate.py", "net.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return transfer.engine(tmp_path_factory.mktemp("second") / "engine")


def test_it_is_served_right_and_refuses_what_it_cannot_serve(place: Path) -> None:
    assert target_init.check(place) == []
    spec = LaunchSpec(tree=place, target=load_target(place), python=Path(sys.executable), model_dir=MODEL, tp=1)
    with launch(spec) as server:
        asked = [Request(tuple(range(7, 7 + n)), 12) for n in (1, 16, 17, 90)]
        found = server.client.complete(asked, 60)
        drawn = server.client.complete([Request(tuple(range(7, 16)), 8, temperature=1.0, seed=s) for s in (1, 1, 2)], 60)
        least = server.client.complete([Request(tuple(range(7, 16)), 8, min_tokens=8, ignore_eos=False)], 60)
        assert server.client.post("/v1/completions", b'{"prompt": [1], "max_tokens": 5000}').status == 400
    assert all(streams.account(s, 12) is None for s in found) and len(least[0].token_ids) == 8
    assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids
    with Oracle(MODEL, "cpu", "float32") as oracle:
        assert all(score.ok and score.band == "equal" for score in oracle.score(found))


def tokens(place: Path, sources: dict[str, str], monkeypatch, tmp_path: Path) -> list[int]:
    """Greedy tokens of the engine with these sources, in this process."""
    folder = tmp_path / str(abs(hash(tuple(sources.values()))))
    shutil.copytree(place, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in sources.items():
        (folder / name).write_text(text)
    for name in ("generate", "net", "loop"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import generate  # type: ignore[import-not-found]

        engine = generate.Engine(MODEL, "cpu", 256, str(tmp_path))
        ids = list(range(7, 40))
        known, fresh, out = 0, ids, []
        for _ in range(24):
            token = int(engine.forward(fresh, known).argmax())
            known, fresh = known + len(fresh), [token]
            out.append(token)
    for name in ("generate", "net", "loop"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return out


def test_three_skills_act_on_it_and_change_no_token(place: Path, monkeypatch, tmp_path: Path) -> None:
    """Two that answer its dearest finding, and the one that pays: else nothing could be learned from knowing which."""
    sources = {name: (place / name).read_text() for name in EDITABLE}
    plain = tokens(place, sources, monkeypatch, tmp_path)
    known = skillbook.load_all()
    for name in ("direct-kv-write", "preallocate-decode-buffers", "inference-mode"):
        answer = skillbook.run(known[name], sources, {"bound_us": 1.0, "params": known[name].variants()[0], "device": "cpu"})
        assert not isinstance(answer, str), answer
        assert tokens(place, {n: answer[-1].after[n] for n in EDITABLE}, monkeypatch, tmp_path) == plain, name


def test_what_another_run_taught_is_accepted_for_exactly_this_engine(place: Path, monkeypatch, tmp_path: Path, repo: Path) -> None:
    monkeypatch.setattr(seal, "verify", lambda: None)  # whether this checkout is sealed is another test's business
    given = start.Options(target_dir=place, model=MODEL, tp=1, device="cpu", run_dir=tmp_path / "probe", seed=0)
    record = repo / "reports" / "gallery" / "h200-tp1"
    names = transfer.accept(record, tmp_path / "knowledge", given)
    assert len(names) == 8
    other = start.prepare(start.Options(target_dir=place, model=MODEL, tp=1, device="cpu", run_dir=tmp_path / "other", knowledge=tmp_path / "knowledge"))
    assert sorted(e.id for e in learning.accepted(other)) == sorted(names)
    own = start.prepare(start.Options(tp=1, device="cpu", run_dir=tmp_path / "own", knowledge=tmp_path / "knowledge"))
    assert learning.accepted(own) == []  # an entry is never read wider than it was accepted
    assert {e.status for e in Blueprint.load(tmp_path / "knowledge").entries()} == {Status.ACCEPTED}
