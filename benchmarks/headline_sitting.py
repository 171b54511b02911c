"""One sitting of the headline: its options, its clock, its record, and the arms that are ours.

Not for: the steps themselves (`headline_steps.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.headline_cells import Job, Terms
from optimizer import fingerprint
from optimizer.environment import query_gpus
from optimizer.recorded import whole_copy
from optimizer.run import load
from optimizer.runrepo import RunRepo
from optimizer.target import load_target
from optimizer.traffic.prompts import PromptSource
from optimizer.types import LaunchSpec
from optimizer.vllm_server import Common

RECORD = "headline.jsonl"


@dataclass(slots=True)
class Sitting:
    """What every step needs. `key` says what results belong together: same weights, jobs, terms, ranks and machine."""

    options: argparse.Namespace
    common: Common
    ours: LaunchSpec
    plain: LaunchSpec
    began: float
    jobs: Sequence[Job]
    prompts: PromptSource
    model_sha256: str
    terms: Terms
    ours_digest: str
    key: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def left_s(self) -> float:
        return self.options.seconds - (time.monotonic() - self.began)

    def open(self) -> None:
        """Read what an earlier command of this sitting found, and say what this one works on."""
        device = self.options.device
        environment = fingerprint.fingerprint(device, self.ours.sandbox)
        about = {
            "model": str(self.common.model), "model_sha256": self.model_sha256, "weights_seed": self._seed(),
            "terms": {name: getattr(self.terms, name) for name in Terms.__slots__},
            "jobs": [{name: getattr(job, name) for name in Job.__slots__} for job in self.jobs],
            "vllm_site": str(self.common.site or ""), "vllm_program": list(self.common.program), "tp": self.common.tp,
        }  # fmt: skip
        self.key = hashlib.sha256(json.dumps([about, environment["hash"]], sort_keys=True).encode()).hexdigest()[:16]
        path = self.options.place / RECORD
        if path.is_file():
            whole = [line for line in path.read_text("utf-8").splitlines() if line.endswith("}")]  # a torn one is dropped
            self.lines = [entry for line in whole if (entry := json.loads(line))["key"] == self.key]
            path.write_text("".join(line + "\n" for line in whole), "utf-8")
        with (self.options.out / RECORD).open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(entry) + "\n" for entry in self.lines)
        ours = {"ours": self.ours.label, "ours_sha256": self.ours_digest, "ours_args": list(self.ours.extra_args)}
        self.emit("sitting", **about, **ours, environment=environment, command=shlex.join(sys.argv))

    def _seed(self) -> int | None:
        """Of the weights where this script wrote them; None for a folder that was given."""
        return self.options.seed if self.common.model.parent == self.options.place.resolve() else None

    def emit(self, kind: str, **data: Any) -> None:
        """One result, on the disk at once, at both places and on the terminal."""
        with self._lock:
            entry = {"kind": kind, "key": self.key, "at_s": round(time.monotonic() - self.began, 1), **data}
            self.lines.append(entry)
            text = json.dumps(entry)
            for place in (self.options.place, self.options.out):
                with (place / RECORD).open("a", encoding="utf-8") as record:
                    record.write(text + "\n")
                    record.flush()
            print(text if len(text) < 600 else text[:600] + " ...", flush=True)

    def of(self, kind: str, **like: Any) -> list[dict[str, Any]]:
        """Results of a kind whose fields have these values, earlier commands of the sitting included."""
        with self._lock:
            return [e for e in self.lines if e["kind"] == kind and all(e.get(k) == v for k, v in like.items())]

    def gpus(self, first: int) -> tuple[int, ...]:
        return gpus_of(self.options, first)


def gpus_of(options: argparse.Namespace, first: int) -> tuple[int, ...]:
    """The GPUs of one engine, one a rank, from `first` on; none on a CPU."""
    return () if options.device == "cpu" else tuple(range(first, first + options.tp))


def check_gpus(options: argparse.Namespace) -> None:
    """Raises SystemExit, with the option's name, for ranks that cannot be placed."""
    if options.tp < 1:
        raise SystemExit(f"--tp {options.tp}: at least one rank is needed")
    firsts = {"--gpu": options.gpu} | ({} if options.vllm_gpu is None else {"--vllm-gpu": options.vllm_gpu})
    if options.vllm_gpu is not None and abs(options.vllm_gpu - options.gpu) < options.tp:
        raise SystemExit(
            f"--vllm-gpu {options.vllm_gpu}: ours has {_words(options.gpu, options.tp)}, vLLM would have "
            f"{_words(options.vllm_gpu, options.tp)}; leave it out, or name a GPU from which --tp {options.tp} are free"
        )
    there = len(query_gpus(None)) if options.device == "cuda" else 0
    for name, first in firsts.items():
        if there and not 0 <= first <= there - options.tp:
            raise SystemExit(f"{name} {first} with --tp {options.tp} means {_words(first, options.tp)}; this machine has {_words(0, there)}")


def _words(first: int, count: int) -> str:
    return f"GPU {first}" if count == 1 else f"GPUs {first} to {first + count - 1}"


def our_arms(options: argparse.Namespace, model: Path) -> tuple[LaunchSpec, LaunchSpec]:
    """(ours, the plain engine): of a run its last accepted and its first engine, of a target folder itself twice."""
    where = options.ours.resolve()
    trees = (options.place / "trees").resolve()
    args: tuple[str, ...] | None = None if options.ours_args is None else tuple(shlex.split(options.ours_args))
    if (where / "run.json").is_file():
        run = load(where)
        target = run.target
        repo = whole_copy(run, (options.place / "ours.git").resolve(), trees)
        final, base = repo.incumbent(), run.base
        args = run.request.engine_args if args is None else args
        label = f"run {run.request.id}, commit {final[:12]}"
    else:
        target = load_target(where if (where / "target.toml").is_file() else where / "engine")
        shutil.rmtree(options.place / "ours.git", ignore_errors=True)
        repo = RunRepo((options.place / "ours.git").resolve(), trees)
        final = base = repo.create(target).commit
        label = f"{target.name}, commit {final[:12]}"
    if options.tp not in target.tp:
        raise SystemExit(f"--tp {options.tp}: {target.name} allows {', '.join(map(str, target.tp))}")
    made = [
        LaunchSpec(
            tree=repo.tree(commit, f"{name}-{commit[:12]}"), target=target, python=Path(sys.executable), model_dir=model,
            tp=options.tp, device=options.device, devices=gpus_of(options, options.gpu), sandbox=options.sandbox,
            label=label if name == "ours" else "the plain engine", extra_args=args or (),
        )
        for name, commit in (("ours", final), ("plain", base))
    ]  # fmt: skip
    return made[0], made[1]


def digest_of(spec: LaunchSpec) -> str:
    """sha256 over the sources of a tree: names and contents."""
    total = hashlib.sha256()
    for path in sorted(spec.tree.rglob("*.py")):
        total.update(f"{path.relative_to(spec.tree)}\0".encode() + path.read_bytes())
    return total.hexdigest()
