"""The GPU skills' Triton kernels compute what the operators that they stand for compute: run by Triton's interpreter, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SKILLS = ("merge-projections", "cuda-graph-capture", "fused-kernels", "fused-kernels", "fused-kernels", "skinny-gemm")
KINDS = ("one row, ", "2 rows", "17 rows", "gated", "attention over [1]", "attention over [5, 70, 300]", "sum and norm: ", "silu", "queries of 3 tokens", "cached keys of 33 tokens, 6", "cached values of 33 tokens, 16", "one sequence of 257")


@pytest.fixture(scope="module")
def found(engine_sources, act, tmp_path_factory, triton_folder) -> dict[str, list[float]]:
    tree = tmp_path_factory.mktemp("tree")
    for file, text in act(engine_sources, *SKILLS).items():
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text, "utf-8")
    script = Path(__file__).with_name("kernel_cases.py")
    env = os.environ | {"TRITON_INTERPRET": "1"} | ({"PYTHONPATH": triton_folder} if triton_folder else {})
    done = subprocess.run([sys.executable, str(script), str(tree)], capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_kernel_gives_what_the_operators_give(found) -> None:
    assert not [kind for kind in KINDS if not any(case.startswith(kind) for case in found)]
    for case, (difference, largest) in found.items():
        assert difference <= 2e-3 * largest, case  # half precision: a last place of the largest is 1e-3 of it
        assert largest > 0.1 or case == "counts that are left"
