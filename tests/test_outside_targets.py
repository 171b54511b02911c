"""Setting up engines nobody here wrote as targets: what needs no network, and what the thin servers share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from optimizer import target_init
from optimizer.runrepo import matches
from optimizer.target import load_target

OUTSIDE = Path(__file__).resolve().parents[1] / "docs/examples/outside"


@pytest.fixture(scope="module")
def fetch():
    spec = importlib.util.spec_from_file_location("outside_fetch", OUTSIDE / "fetch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_target_of_transformers_lacks_nothing_and_opens_the_model_only(fetch, tmp_path: Path) -> None:
    place = fetch.fetch("transformers", tmp_path / "target")
    assert target_init.check(place) == []
    target = load_target(place)
    files = [p.name for p in place.glob("*.py")]
    assert sorted(f for f in files if matches(f, target.editable) and not matches(f, target.frozen)) == ["modeling.py"]
    text = (place / "modeling.py").read_text()
    compile(text, "modeling.py", "exec", dont_inherit=True)
    assert "\nfrom ." not in text  # no relative import is left
    with pytest.raises(ValueError, match="exists"):
        fetch.fetch("transformers", place)
    with pytest.raises(ValueError, match="known: reasoning-from-scratch"):
        fetch.fetch("vllm", tmp_path / "other")


def test_every_engine_is_pinned_by_hash_and_its_server_is_frozen(fetch) -> None:
    assert set(fetch.WHEELS) | {"transformers"} == set(fetch.NAMES)
    for name in fetch.NAMES:
        text = (OUTSIDE / name / "target.toml").read_text()
        assert all(f'"{file}"' in text.split("frozen")[1].split("\n")[0] for file in ("serve.py", "loop.py", "generate.py"))
    for wheel in fetch.WHEELS.values():
        assert len(wheel.sha256) == 64 and wheel.version and wheel.files


def test_sampling_of_an_engine_that_has_none_keeps_to_top_k_and_top_p() -> None:
    torch = pytest.importorskip("torch")
    source = (OUTSIDE / "reasoning-from-scratch/generate.py").read_text()
    space: dict = {"torch": torch}
    exec(compile(source[source.index("def draw(") :], "generate.py", "exec", dont_inherit=True), space)
    random = torch.Generator().manual_seed(1)
    scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert int(space["draw"](scores, {"temperature": 0}, random)) == 1
    for body, allowed in (({"top_k": 2}, {1, 2}), ({"top_p": 0.5}, {1}), ({"top_p": 0.7}, {1, 2}), ({"top_k": 0, "top_p": 1}, {0, 1, 2, 3})):
        drawn = {int(space["draw"](scores.clone(), {"temperature": 1.0, **body}, random)) for _ in range(200)}
        assert drawn <= allowed and len(drawn) == len(allowed)
