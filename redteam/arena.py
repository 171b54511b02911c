"""A scratch run for the red team: the engine's snapshot, a commit for each case, and its gate context.

Not for: the cases (`cases/`) or the table (`__main__.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from optimizer.gates import GateContext
from optimizer.gates.context import Lab
from optimizer.runrepo import RunRepo
from optimizer.target import load_target
from optimizer.targets import PROTOCOLS
from optimizer.traffic.prompts import PromptSource
from optimizer.truth.oracle import Oracle
from optimizer.types import LaunchSpec, Target

REPO = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 60.0
MODEL = REPO / "engine" / "tiny_qwen3"


class Arena:
    """One scratch folder, one oracle, many candidates. A context manager: nothing is left afterwards."""

    def __init__(
        self, target_dir: Path = REPO / "engine", model_dir: Path = MODEL, python: Path = Path(sys.executable)
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"hotloop-{os.getpid()}-redteam-"))
        self.target: Target = replace(load_target(target_dir), start_timeout_s=START_TIMEOUT_S)
        self.model_dir, self.python = model_dir, python
        self.repo = RunRepo(self.folder / "repo.git", self.folder / "trees")
        self.base = self.repo.create(self.target).commit
        self.prompts = PromptSource(secrets.token_bytes(32), model_dir)
        self.oracle = Oracle(model_dir)
        self._lock = threading.Lock()

    def __enter__(self) -> Arena:
        """What all cases share is made once, before several of them run at the same time."""
        lab = Lab(self.context(self.base, 1))
        for which in ("secret", "perturbed"):
            lab.model_dir(which)
        return self

    def __exit__(self, *_: object) -> None:
        self.oracle.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def sources(self) -> dict[str, str]:
        """Every Python file of the starting engine."""
        return self.repo.sources(self.base, ("**/*.py",))

    def commit(self, changed: Mapping[str, str | None], title: str) -> str:
        with self._lock:
            return self.repo.commit_sources(self.base, changed, title, "", {})

    def spec(self, commit: str, tp: int, label: str = "candidate", sandbox: str = "auto") -> LaunchSpec:
        with self._lock:
            tree = self.repo.tree(commit, f"{label}-{commit[:12]}")
        return LaunchSpec(tree, self.target, self.python, self.model_dir, tp, label=label, sandbox=sandbox)

    def context(self, commit: str, tp: int, base: str | None = None) -> GateContext:
        base = base or self.base
        return GateContext(
            candidate=self.spec(commit, tp),
            incumbent=self.spec(base, tp, "incumbent"),
            repo=self.repo.git_dir,
            base_commit=base,
            candidate_commit=commit,
            target=self.target,
            oracle=self.oracle,
            prompts=self.prompts,
            protocol=PROTOCOLS["full"],
            run_dir=self.folder,
        )

    def drop(self, commit: str) -> None:
        with self._lock:
            self.repo.drop_tree(f"candidate-{commit[:12]}")
