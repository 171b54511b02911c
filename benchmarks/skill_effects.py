"""What each CPU skill does alone on this repository's plain engine, at TP=1 and TP=4; prints skills/README.md's table.

    python -m benchmarks.skill_effects [--tp 1,4] [--only SKILL,...] [--pairs 12] [--place runs/effects]
    python -m benchmarks.skill_effects --table        # the table alone, from what was measured

The patch passes the quick gates, then the engine as it is and the patched one are launched in turns, as a run launches them,
a fixed number of times: nothing is decided and nothing stops early, so an effect near nothing gets an interval too.
Decode time of one stream; of skills that answer what prompts cost, time to the first token. What was measured is read, not
repeated. Wants a quiet machine. Not for: accepting (the loop), or other engines (outside_engines.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks import outside_engines as outside
from optimizer import accept, start
from optimizer.candidate import incumbent_name
from optimizer.judge import kept, take_pair
from optimizer.measure import CandidateFailed, InfrastructureError
from optimizer.proposers import skillbook
from optimizer.proposers.skillbook import Skill
from optimizer.run import Run
from optimizer.runrepo import unfrozen
from optimizer.services import Services
from optimizer.types import LaunchSpec, Pair, Stage
from optimizer.view import Quiet
from optimizer.wiring import real

PLACE = outside.REPO / "runs/effects"
OF_PROMPTS = {"prefill-path", "prefill-stall"}


def measure(skill: Skill, tp: int, pairs: int, place: Path) -> dict[str, Any]:
    """Gates, then pairs; what came of it, also where it could not be measured."""
    metric = "ttft" if OF_PROMPTS & set(skill.answers) else "tok/s"
    found: dict[str, Any] = {"skill": skill.name, "tp": tp, "metric": metric}
    run = start.prepare(start.Options(metric=metric, tp=tp, device="cpu", run_dir=place))
    before = run.repo.sources(run.base, run.target.editable)
    said = skillbook.run(skill, unfrozen(before, run.target.frozen), {"bound_us": 1.0, "params": skill.variants()[0], "device": "cpu", "tp": tp})
    if isinstance(said, str):
        return found | {"why": f"declines: {said}"}
    after = {f: text for f, text in said[-1].after.items() if before.get(f) != text}
    commit = run.repo.commit_sources(run.base, after, skill.name, "", {})
    with real(run, Quiet()) as do:
        a, b = run.spec(run.base, incumbent_name(run.base), "incumbent"), run.spec(commit, "skill", "candidate")
        for gate in do.gates("quick", b, a, run.base, commit):
            if not gate.passed:
                return found | {"why": f"gate {gate.gate}: {gate.detail}"}
        try:
            good = _pairs(run, do, a, b, commit, pairs)
        except (CandidateFailed, InfrastructureError) as error:
            return found | {"why": str(error)}
    ratio, ci95 = accept.interval(good)
    return found | {"ratio": ratio, "ci95": ci95, "pairs": len(good), "a_us": [p.a_us_per_token for p in good], "b_us": [p.b_us_per_token for p in good]}


def _pairs(run: Run, do: Services, a: LaunchSpec, b: LaunchSpec, key: str, count: int) -> list[Pair]:
    """The first, not kept, says how long blocks of this engine must be, as a calibration does."""
    first = take_pair(run, do, a, b, Stage.SCREEN, key, None)
    run.ledger.append("calibrated", None, {"token_us": first.a_us_per_token})
    good: list[Pair] = []
    for _ in range(2 * count):
        good += kept([take_pair(run, do, a, b, Stage.SCREEN, key, None)])
        if len(good) == count:
            break
    return good


def engine_sources() -> dict[str, str]:
    """The plain engine's files, by path from the repository's root."""
    files = sorted((outside.REPO / "engine").glob("*.py"))
    return {p.relative_to(outside.REPO).as_posix(): p.read_text("utf-8") for p in files}


def row(skill: Skill, tested: list[str], place: Path, tps: list[int]) -> str:
    """One line of the table: what the skill answers, how, where, and what it measured."""
    how = "codemod" if skill.codemod is not None else "by a person or a model"
    link = f"[{skill.name}]({skill.name}/SKILL.md)"
    parts = [link, ", ".join(skill.answers), ", ".join(skill.devices), how, ", ".join(tested)]
    parts += [effect(read(place, skill.name, tp)) if "cpu" in skill.devices else "" for tp in tps]
    return "| " + " | ".join(parts) + " |"


def read(place: Path, skill: str, tp: int) -> dict[str, Any] | None:
    """What was measured before; None where nothing was."""
    path = place / f"tp{tp}" / f"{skill}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def effect(found: dict[str, Any] | None) -> str:
    """The time ratio with its interval, bold where that excludes 1; or why there is none."""
    if found is None or "ratio" not in found:
        return "" if found is None else found["why"].replace("|", "/")
    low, high = found["ci95"]
    text = f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"
    return (f"**{text}**" if high < 1 or low > 1 else text) + (" to the first token" if found["metric"] == "ttft" else "")


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", default="1,4", help="comma-separated; an empty one gives the table without effects")
    parser.add_argument("--only", default="", help="skills, comma-separated")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--place", type=Path, default=PLACE)
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    tps = [int(tp) for tp in options.tp.split(",") if tp]
    only = set(filter(None, options.only.split(",")))
    skills = skillbook.load_all()
    for tp in [] if options.table else tps:
        for skill in outside.acting(engine_sources()):
            if (only and skill not in only) or read(options.place, skill, tp) is not None:
                continue
            place = options.place / f"tp{tp}" / skill
            shutil.rmtree(place, ignore_errors=True)
            found = measure(skills[skill], tp, options.pairs, place)
            place.with_suffix(".json").write_text(json.dumps(found), "utf-8")
            print(f"TP={tp} {skill}: {effect(found)}", flush=True)
    print_table(options.place, tps)


if __name__ == "__main__":
    main()
