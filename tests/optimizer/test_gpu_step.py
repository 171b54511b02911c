"""Benchmark of a step's graphs: what each kernel adds where launches overlap, and engines of several trees side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_step


def test_a_kernel_adds_what_the_last_end_moves_by() -> None:
    kernels = [
        ("norm", 0.0, 4.0),
        ("product", 1.0, 11.0),  # set up while the norm runs
        ("small", 10.0, 10.5),  # ends within another: adds nothing
        ("norm", 12.0, 14.0),  # the gap before it counts
    ]
    assert gpu_step.added(reversed(kernels)) == {"product": (1, 7.0), "norm": (2, 7.0), "small": (1, 0.0)}
    assert sum(us for _, us in gpu_step.added(kernels).values()) == 14.0


def test_engines_of_two_trees_do_not_share_modules(tmp_path: Path) -> None:
    before = {name: module for name, module in sys.modules.items() if name == "engine" or name.startswith("engine.")}
    try:
        for name in ("one", "two"):
            (tmp_path / name / "engine").mkdir(parents=True)
            (tmp_path / name / "engine/__init__.py").write_text("")
            (tmp_path / name / "engine/config.py").write_text(f"NAME = {name!r}\n")
            (tmp_path / name / "engine/worker.py").write_text("from engine.config import NAME\n\ndef name(): return NAME\n")
        (one,), (two,) = (gpu_step.modules(tmp_path / name, "worker") for name in ("one", "two"))
        assert (one.name(), two.name()) == ("one", "two")
        with pytest.raises(ImportError):
            gpu_step.modules(tmp_path / "one", "decode_graphs")
        assert str(tmp_path / "one") not in sys.path
    finally:
        for name in [n for n in sys.modules if n == "engine" or n.startswith("engine.")]:
            del sys.modules[name]
        sys.modules.update(before)


def test_trees_share_the_weights_that_they_have_in_common() -> None:
    one, two = (gpu_step.Made(SimpleNamespace(model=torch.nn.Sequential(torch.nn.Linear(4, n), torch.nn.Linear(3, 2))), None, None) for n in (3, 5))
    assert gpu_step.with_weights_of(one, two) is two
    first, second = (dict(made.runner.model.named_parameters()) for made in (one, two))
    assert first["1.weight"].data_ptr() == second["1.weight"].data_ptr() and first["1.bias"].data_ptr() == second["1.bias"].data_ptr()
    assert second["0.weight"].shape == (5, 4), "another shape stays its own"


def test_a_folder_that_is_no_tree_gets_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_step", str(tmp_path / "out"), str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        gpu_step.main()
    assert "none has no engine/decode_graphs.py" in capsys.readouterr().err and not (tmp_path / "out").exists()
