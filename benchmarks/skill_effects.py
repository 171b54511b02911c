"""Run each CPU skill alone on this repository's plain engine, at TP=1 and TP=4, and print skills/README.md's table.

    python -m benchmarks.skill_effects [--tp 1,4] [--only SKILL,...] [--minutes 12] [--place runs/effects]
    python -m benchmarks.skill_effects --table        # the table alone, from what has run

Each is one attempt of the real loop (gates, then launches in interleaved pairs, quick protocol) with `--skills SKILL`, so
every ratio is against the engine as it is, with the interval of the last stage that it reached. Pairs whose run has
finished are read, not repeated. Wants a quiet machine. Not for: other engines (outside_engines.py).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks import outside_engines as outside
from optimizer.proposers import skillbook
from optimizer.proposers.skillbook import Skill

PLACE = outside.REPO / "runs/effects"


def engine_sources() -> dict[str, str]:
    """The plain engine's files, by path from the repository's root."""
    files = sorted((outside.REPO / "engine").glob("*.py"))
    return {p.relative_to(outside.REPO).as_posix(): p.read_text("utf-8") for p in files}


def row(skill: Skill, tested: list[str], place: Path, tps: list[int]) -> str:
    """One line of the table: what the skill answers, how, where, and what it measured."""
    how = "codemod" if skill.codemod is not None else "by a person or a model"
    link = f"[{skill.name}]({skill.name}/SKILL.md)"
    parts = [link, ", ".join(skill.answers), ", ".join(skill.devices), how, ", ".join(tested)]
    parts += [effect(outside.outcome(place / f"tp{tp}" / skill.name)) if "cpu" in skill.devices else "" for tp in tps]
    return "| " + " | ".join(parts) + " |"


def effect(found: dict[str, Any] | None) -> str:
    """The time ratio with its interval and what became of it; empty where nothing was measured."""
    if found is None or found["ratio"] is None:
        return "" if found is None else found["verdict"] + (f" ({found['failed']})" if found["failed"] else "")
    _, ratio, _, _, _ = outside.cells(found)
    return f"{ratio} {found['verdict']}"


def tested_on(skill: Skill, engines: dict[str, dict[str, str]]) -> list[str]:
    """Names of the engines on whose sources the codemod acts."""
    if skill.codemod is None:
        return []
    device = "cpu" if "cpu" in skill.devices else "cuda"
    finding = {"bound_us": 1.0, "params": skill.variants()[0], "device": device}
    return [name for name, code in engines.items() if not isinstance(skillbook.run(skill, code, finding), str)]


def print_table(place: Path, tps: list[int]) -> None:
    fetch = outside.fetcher()
    targets = {n: outside.target_of(fetch, n) for n in fetch.NAMES}
    engines = {"this engine": engine_sources()} | {n: outside.editable(d) for n, d in targets.items()}
    head = ["skill", "answers", "devices", "mechanical", "acts on", *(f"alone on a CPU, TP={tp}: time ratio, 95 %" for tp in tps)]
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for skill in skillbook.load_all().values():
        print(row(skill, tested_on(skill, engines), place, tps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", default="1,4", help="comma-separated; an empty one gives the table without effects")
    parser.add_argument("--only", default="", help="skills, comma-separated")
    parser.add_argument("--minutes", type=float, default=12.0, help="budget of one run")
    parser.add_argument("--place", type=Path, default=PLACE)
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    tps = [int(tp) for tp in options.tp.split(",") if tp]
    only = set(filter(None, options.only.split(",")))
    for tp in [] if options.table else tps:
        for skill in outside.acting(engine_sources()):
            place = options.place / f"tp{tp}" / skill
            if (only and skill not in only) or outside.outcome(place) is not None:
                continue
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            outside.optimize(None, skill, place, options.minutes, tp)
            print(f"TP={tp} {skill}: {' | '.join(outside.cells(outside.outcome(place)))}", flush=True)
    print_table(options.place, tps)


if __name__ == "__main__":
    main()
