"""Holistic Trace Analysis in a process of its own: `python -m trace_diff.hta_worker TRACE ANNOTATION` prints JSON.

Apart, because it is slow to import, prints what it likes and fails with any exception on traces it was not made for.
Not for: deciding what may be asked of it (critical_path).
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any


def rows(path: str, annotation: str) -> list[dict[str, Any]]:
    """Time on the critical path under the annotation, by name and by what binds it; whole microseconds, as HTA has them.

    Raises SystemExit with a line of words where HTA finds no path.
    """
    from hta.trace_analysis import TraceAnalysis  # pyright: ignore[reportMissingImports]  (an extra)

    found = TraceAnalysis(trace_files={0: path}, trace_dir="/").critical_path_analysis(0, annotation, 0)
    if found is None or not found[1]:
        raise SystemExit("it found no path through the step")
    table = found[0].get_critical_path_breakdown()
    if table is None:
        raise SystemExit("it found no path through the step")
    table = table[table["duration"] > 0]
    sums = table.groupby(["bound_by", "s_name"], dropna=False)["duration"].agg(["sum", "count"]).reset_index()
    return [
        {"bound_by": str(b) or "dependency", "name": str(n), "us": float(us), "count": int(count)}
        for b, n, us, count in sums.itertuples(index=False)
    ]


def main(path: str, annotation: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.stdout.write("\nRESULT " + json.dumps(rows(path, annotation)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
