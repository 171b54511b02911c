"""Run every (skill, engine) pair on engines nobody here wrote through the real loop, and print a Markdown table.

    python -m benchmarks.outside_engines [--only ENGINE:SKILL,...] [--minutes 15] [--place runs/outside]

Each engine is fetched by version and hash (docs/examples/outside/fetch.py) and judged as any target: `optimize
--target-dir ... --tp 1 --skills SKILL --attempts 1 --guard-margin peak_memory_bytes=0.05`, all gates, launches in interleaved
pairs, quick protocol. The margin is stated because weights that are laid out or stacked anew leave a mapped file for memory
of the process, 2 to 3 % of these small engines. Pairs whose run has finished are read, not repeated, so the command can be stopped and started again. Wants a quiet machine: an
effect below what its noise resolves is printed as undecided. Not for: skills on this repository's engine
(skill_effects.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimizer.ledger import Ledger
from optimizer.proposers import skillbook
from optimizer.runrepo import matches
from optimizer.target import load_target

REPO = Path(__file__).resolve().parents[1]
MODEL = REPO / "engine/tiny_qwen3"
PLACE = REPO / "runs/outside"
MEMORY = "peak_memory_bytes=0.05"


def fetcher() -> Any:
    """The set-up script as a module."""
    spec = importlib.util.spec_from_file_location("outside_fetch", REPO / "docs/examples/outside/fetch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def target_of(fetch: Any, engine: str, place: Path = PLACE) -> Path:
    """The engine's target folder, set up when it is not there yet."""
    target = place / engine / "target"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        fetch.fetch(engine, target)
    return target


def editable(target_dir: Path) -> dict[str, str]:
    """What a patch may change in a target, by path."""
    target = load_target(target_dir)
    files = {p.relative_to(target_dir).as_posix(): p for p in sorted(target_dir.rglob("*.py"))}
    return {f: p.read_text("utf-8") for f, p in files.items() if matches(f, target.editable) and not matches(f, target.frozen)}


def acting(sources: dict[str, str]) -> Iterator[str]:
    """Names of the CPU skills that have a patch for these sources."""
    for skill in skillbook.load_all().values():
        if skill.codemod is None or "cpu" not in skill.devices:
            continue
        said = skillbook.run(skill, sources, {"bound_us": 1.0, "params": skill.variants()[0], "device": "cpu"})
        if not isinstance(said, str):
            yield skill.name


def optimize(target_dir: Path | None, skill: str, place: Path, minutes: float, tp: int = 1, model: Path = MODEL) -> None:
    """One attempt with one skill; the run's folder is `place`. What it prints goes to a log beside it."""
    command = [sys.executable, "-m", "optimizer.cli", "--target", "tok/s", "--tp", str(tp), "--model", str(model), "--device", "cpu"]
    command += ["--skills", skill, "--attempts", "1", "--budget-minutes", str(minutes), "--runs", str(place.parent), "--run-dir", str(place)]
    command += ["--target-dir", str(target_dir), "--guard-margin", MEMORY] if target_dir else []
    with place.with_suffix(".log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=log, cwd=REPO, check=False)


def outcome(place: Path) -> dict[str, Any] | None:
    """What a finished run's ledger says about its one attempt; None while it has not finished."""
    if not (place / "ledger.jsonl").is_file():
        return None
    lines = Ledger(place / "ledger.jsonl").lines()
    if not any(x["kind"] == "finished" for x in lines):
        return None
    found: dict[str, Any] = {"gates": 0, "failed": "", "verdict": "nothing tried", "ratio": None, "ci95": None, "pairs": 0, "why": ""}
    for line in lines:
        data = line["data"]
        if line["kind"] == "gate" and data["gate"] != "all":
            found["gates"] += bool(data["passed"])
            found["failed"] = found["failed"] or ("" if data["passed"] else data["gate"])
        elif line["kind"] in ("screened", "decided", "confirmed") and line["attempt"] is not None:  # not the ablation's
            found |= {"ratio": data.get("ratio"), "ci95": data.get("ci95"), "pairs": data.get("pairs")}
        elif line["kind"] in ("accepted", "rejected", "undecided", "parked"):
            found |= {"verdict": line["kind"], "why": str(data.get("detail") or data.get("reason") or "")}
            found |= {k: data[k] for k in ("ratio", "ci95") if data.get(k) is not None}
        elif line["kind"] == "calibrated":
            found["mde"] = data.get("mde")
        elif line["kind"] == "finished" and found["verdict"] == "nothing tried":
            found["why"] = str(data.get("reason", ""))
    return found


def cells(found: dict[str, Any] | None) -> list[str]:
    """Gates, time ratio with interval, pairs, smallest effect, verdict: the right part of a table's row."""
    if found is None:
        return ["", "", "", "", "not finished"]
    passed = f"{found['gates']} passed" + (f", {found['failed']} failed" if found["failed"] else "")
    ratio = "" if found["ratio"] is None else f"{found['ratio']:.3f}"
    ratio += f" [{found['ci95'][0]:.3f}, {found['ci95'][1]:.3f}]" if found["ratio"] is not None and found["ci95"] and found["ci95"][0] is not None else ""
    least = "" if not found.get("mde") else f"{found['mde']:.0%}"
    verdict = found["verdict"] + ("" if found["verdict"] == "accepted" or not found["why"] else f": {found['why'][:90]}")
    return [passed, ratio, str(found["pairs"] or ""), least, verdict.replace("|", "/")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ENGINE or ENGINE:SKILL, comma-separated")
    parser.add_argument("--minutes", type=float, default=15.0, help="budget of one run")
    parser.add_argument("--place", type=Path, default=PLACE)
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    fetch = fetcher()
    print("| engine | skill | gates | time ratio, 95 % | pairs | detectable | verdict |\n|---|---|---|---|---|---|---|")
    for engine in fetch.NAMES:
        place = options.place / engine
        if only and not any(name.partition(":")[0] == engine for name in only):
            continue
        target = target_of(fetch, engine, options.place)
        for skill in acting(editable(target)):
            if only and engine not in only and f"{engine}:{skill}" not in only:
                continue
            run = place / skill
            if outcome(run) is None:
                shutil.rmtree(run, ignore_errors=True)
                optimize(target, skill, run, options.minutes)
            print(f"| {engine} {fetch.version(engine)} | {skill} | " + " | ".join(cells(outcome(run))) + " |", flush=True)


if __name__ == "__main__":
    main()
