"""Sources to try codemods on: this engine, a file of transformers, and code that has nothing to do with either."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.proposers import skillbook
from optimizer.proposers.skillbook import Rewrite, Skill


@pytest.fixture(scope="session")
def skills() -> dict[str, Skill]:
    return skillbook.load_all()


@pytest.fixture(scope="session")
def engine_sources(repo: Path) -> dict[str, str]:
    """The engine's files that target.toml calls editable, by path from the repository root: what a run hands over."""
    files = sorted((repo / "engine").glob("**/*.py"))
    return {p.relative_to(repo).as_posix(): p.read_text("utf-8") for p in files}


@pytest.fixture(scope="session")
def qwen3_file() -> dict[str, str]:
    """transformers' Qwen3 model file, as installed; never imported here."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "models/qwen3/modeling_qwen3.py"
    return {"modeling_qwen3.py": path.read_text("utf-8")}


@pytest.fixture(scope="session")
def act(skills: dict[str, Skill]) -> Callable[..., dict[str, str]]:
    """act(sources, *names): the sources after these skills in turn; each must act."""

    def run(sources: dict[str, str], *names: str, **finding: Any) -> dict[str, str]:
        for name in names:
            answer = skillbook.run(skills[name], sources, {"bound_us": 100.0, "params": skills[name].variants()[0], **finding})
            assert not isinstance(answer, str), f"{name} declined: {answer}"
            sources = answer[-1].after
        return sources

    return run


@pytest.fixture(scope="session")
def answer(skills: dict[str, Skill]) -> Callable[[str, dict[str, str]], list[Rewrite] | str]:
    """answer(name, sources): rewrites, or the reason of a decline."""

    def run(name: str, sources: dict[str, str]) -> list[Rewrite] | str:
        return skillbook.run(skills[name], sources, {"bound_us": 100.0, "params": skills[name].variants()[0]})

    return run


@pytest.fixture(scope="session")
def triton_folder() -> str | None:
    """The folder that has Triton, for the path of a fresh process; None where it is installed. Skips where there is none."""
    beside = Path(sys.prefix) / "interpreter"  # the Makefile puts it there beside a torch for CPUs
    if importlib.util.find_spec("triton") is not None:
        return None
    if not (beside / "triton").is_dir():
        pytest.skip("Triton is not installed: kernels cannot be interpreted")
    return str(beside)


@pytest.fixture
def interpreted(triton_folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this test spawns import Triton and interpret its kernels; this one does not."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported
    if triton_folder is not None:
        monkeypatch.syspath_prepend(triton_folder)
