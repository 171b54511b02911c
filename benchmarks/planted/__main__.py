"""Run the bench: `python -m benchmarks.planted [--quick]`; prints a table and, last, one JSON line."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.planted.bench import Outcome, score, summary
from benchmarks.planted.variants import CONTROLS, QUICK, VARIANTS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a subset that takes a few seconds")
    parser.add_argument("--only", help="variants whose name contains this text")
    options = parser.parse_args(argv)
    chosen = [v for v in (*VARIANTS, *CONTROLS) if not options.quick or v.name in QUICK]
    chosen = [v for v in chosen if not options.only or options.only in v.name]
    outcomes = []
    print(f"{'variant':55s} {'ranked first':32s} {'cost us':>9s} {'said us':>9s} {'error':>6s}")
    for variant in chosen:
        outcomes.append(score(variant))
        print(line(outcomes[-1]), flush=True)
    print(json.dumps(summary(outcomes), sort_keys=True))
    return 0 if all(o.hit for o in outcomes) else 1


def line(o: Outcome) -> str:
    """One row of the table; a star marks a miss."""
    said = "" if o.predicted_us is None else f"{o.predicted_us:9.1f}"
    error = "" if o.error is None else f"{o.error:6.0%}"
    cost = f"{o.cost_us:9.1f}" if o.rule else ""
    return f"{'  ' if o.hit else '* '}{o.name:53s} {o.first or '-':32s} {cost:>9s} {said:>9s} {error:>6s}"


if __name__ == "__main__":
    sys.exit(main())
