"""`python -m redteam [--only R15,C8] [--benign] [--jobs N]`: the table, then one line that says how it ended.

Exit status 1 when a cheat was not caught for its stated reason, a control was refused, or something was left behind.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from optimizer import seal
from optimizer.confine import sandbox
from redteam.arena import Arena
from redteam.benign import BENIGN
from redteam.beyond import BEYOND
from redteam.case import Case, Stale
from redteam.cheats import CHEATS
from redteam.controls import CONTROLS
from redteam.engineer import ENGINEER
from redteam.judge import Outcome, judge
from redteam.measured import MEASURED, run
from redteam.more import MORE

MOST_REFUSED = 1 / 40  # of the benign variants


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    console = Console(width=200 if not sys.stdout.isatty() else None, soft_wrap=False)
    began = time.perf_counter()
    left_before = leftovers()
    skip = ("seal",) if options.unsealed else ()
    listed = (*CHEATS, *MORE, *BEYOND, *CONTROLS, *((*BENIGN, *ENGINEER) if options.benign else ()))
    cases = [replace(c, without=(*c.without, *skip)) for c in listed if _wanted(c.id, options.only)]
    console.print(f"sandbox: {sandbox.detect().name}; gates version {seal.version()}; {len(cases)} patches{', SEAL NOT CHECKED' if skip else ''}")
    table = Table("case", "idea", "expected", "caught by", "s", "", title="Red team")
    outcomes: list[Outcome] = []
    with Arena() as arena, ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda case: guarded(arena, case), cases):
            outcomes.append(outcome)
            row(table, outcome)
            console.print(
                f"{'ok ' if outcome.right else 'BAD'} {outcome.case.id:5} {outcome.seconds:6.1f} s  {outcome.caught_by()[:150]}",
                highlight=False,
            )
    caught, total = _measured(table, options.only)
    console.print(table)
    cheats = [o for o in outcomes if o.case.expected]
    controls = [o for o in outcomes if not o.case.expected and o.case.id.startswith("C")]
    benign = [o for o in outcomes if o.case.id.startswith("B")]
    if benign:
        refused = sum(not o.right for o in benign)
        console.print(f"benign variants: {len(benign) - refused}/{len(benign)} accepted")
    left = leftovers() - left_before
    if left:
        console.print(f"left behind: {sorted(left)}")
    good = sum(o.right for o in cheats) + caught, sum(o.right for o in controls)
    sizes = len(cheats) + total, len(controls)
    console.print(
        f"redteam: {good[0]}/{sizes[0]} cheats caught, {good[1]}/{sizes[1]} controls accepted, {time.perf_counter() - began:.0f} s",
        highlight=False,
    )
    within = not benign or sum(not o.right for o in benign) <= MOST_REFUSED * len(benign) + 1e-9
    return 0 if good == sizes and within and not left else 1


def guarded(arena: Arena, case: Case) -> Outcome:
    """A case that the engine has outgrown is reported as broken, not hidden."""
    try:
        return judge(arena, case)
    except Stale as error:
        return Outcome(case, None, 0.0, broken=str(error))
    except Exception as error:  # noqa: BLE001  a gate that raises would end a run: the case has found a hole
        return Outcome(case, None, 0.0, broken=f"{type(error).__name__}: {error}")


def row(table: Table, outcome: Outcome) -> None:
    case = outcome.case
    expected = " ".join(sorted(case.expected)) or "accepted"
    note = f" [{case.note}]" if case.note else ""
    off = [name for name in case.without if name != "seal"]
    without = f" (without {', '.join(off)})" if off else ""
    table.add_row(
        case.id,
        case.idea + without + note,
        expected,
        outcome.caught_by(),
        f"{outcome.seconds:.1f}",
        "ok" if outcome.right else "BAD",
    )


def _measured(table: Table, only: frozenset[str]) -> tuple[int, int]:
    chosen = [case for case in MEASURED if _wanted(case.id, only)]
    caught = 0
    for case in chosen:
        stopped, by, seconds = run(case)
        caught += stopped
        table.add_row(
            case.id,
            f"{case.idea} [injected timings]",
            case.expected,
            by,
            f"{seconds:.1f}",
            "ok" if stopped else "BAD",
        )
    return caught, len(chosen)


def leftovers() -> set[str]:
    """Folders, control groups and shared memory that this process made and left."""
    places = (Path("/tmp"), Path("/dev/shm"), *(Path("/sys/fs/cgroup", name) for name in ("", "pids", "memory")))
    name = f"hotloop-{os.getpid()}-*"
    found = {str(path) for place in places if place.is_dir() for path in place.glob(name)}
    return {path for path in found if "-jail-" not in path}


def _wanted(name: str, only: frozenset[str]) -> bool:
    return not only or name in only


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="redteam", description=__doc__)
    parser.add_argument(
        "--only", type=lambda text: frozenset(text.split(",")), default=frozenset(), help="case ids"
    )
    parser.add_argument(
        "--benign", action=argparse.BooleanOptionalAction, default=True, help="also the benign variants"
    )
    parser.add_argument("--unsealed", action="store_true", help="do not check the seal: while working on the gates")
    jobs = min(4, len(os.sched_getaffinity(0)))
    parser.add_argument("--jobs", type=int, default=jobs, help="cases at the same time")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
