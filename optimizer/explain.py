"""Does a fresh trace of the candidate show why it is faster? If it does not, a person has to look.

Traces may reject or park a candidate, they never help it: the verdict on speed was given without them. Not for:
timing, or drawing the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from optimizer.candidate import Candidate
from optimizer.capturing import capture_tree
from optimizer.judge import failures
from optimizer.run import Run
from optimizer.services import Diagnosis, Services, Stop
from optimizer.types import RejectReason, StageResult, Verdict
from trace_diff.types import Finding, Status


@dataclass(frozen=True, slots=True)
class Explanation:
    """Predicted, traced and measured saving of an accepted series, all per token of the target cell."""

    traced_us: float | None  # difference of the mean step wall in profiled windows
    row_shrank: bool  # the finding that the patch cites lost bound
    rows: dict[str, tuple[float | None, float | None]]  # finding id -> bound before, after
    activation: str | None  # what the patch said must appear or vanish, and did not


def explain(run: Run, do: Services, candidate: Candidate, result: StageResult, before: Diagnosis) -> Explanation:
    """Capture the candidate and compare with the incumbent's diagnosis. Raises Stop (parked) when unexplained."""
    with failures(run, "trace"):
        capture = capture_tree(run, do, candidate.end.spec, candidate.end.commit, str(candidate.number), candidate.number)
        after = do.diagnose(capture, ())
    found = compare(candidate, before, after)
    if candidate.admitted:
        return found
    if found.activation:
        raise Stop(Verdict.PARKED, "trace", RejectReason.NOT_ACTIVATED, found.activation)
    if not found.row_shrank and not (found.traced_us and found.traced_us > 0):
        why = f"{1 / result.ratio - 1:+.1%} was measured, but neither the step nor the cited rows shrank in the trace"
        raise Stop(Verdict.PARKED, "trace", RejectReason.NOT_ACTIVATED, why)
    return found


def compare(candidate: Candidate, before: Diagnosis, after: Diagnosis) -> Explanation:
    """Pure: what changed between two diagnoses for the findings that the series cites."""
    cited = {name for member in candidate.members for name in member.patch.finding_ids}
    old, new = _bounds(before.findings), _bounds(after.findings)
    rows = {name: (old.get(name), new.get(name, 0.0)) for name in sorted(cited)}
    shrank = any(a is not None and (b or 0.0) < a for a, b in rows.values())
    traced = None
    if before.step_us is not None and after.step_us is not None:
        traced = before.step_us / before.tokens_per_step - after.step_us / after.tokens_per_step
    return Explanation(traced, shrank, rows, "; ".join(_not_activated(candidate, before, after)) or None)


def _not_activated(candidate: Candidate, before: Diagnosis, after: Diagnosis) -> Iterator[str]:
    """What the patches said must appear in, or vanish from, every decode step, and did not."""
    if before.rows is None or after.rows is None:
        return
    for member in candidate.members:
        said = member.patch.activation or {}
        for want in said.get("appear", ()):
            if not _on(want, [_count(rows, want["row"]) > 0 for rows in after.rows]):
                yield f"{member.patch.mechanism}: {want['row']} does not appear in the trace"
        for want in said.get("vanish", ()):
            old = [_count(rows, want["row"]) for rows in before.rows]
            new = [_count(rows, want["row"]) for rows in after.rows]
            if want.get("fewer") and not _on(want, [b < a for a, b in zip(old, new, strict=False)]):
                yield f"{member.patch.mechanism}: {want['row']} {_per_step(old)} before, {_per_step(new)} after, not fewer"
            elif not want.get("fewer") and not _on(want, [b == 0 for b in new]):
                yield f"{member.patch.mechanism}: {want['row']} is still there, {_per_step(new)}"


def _on(want: Mapping[str, Any], ranks: list[bool]) -> bool:
    return bool(ranks) and (any(ranks) if want.get("ranks") == "any" else all(ranks))


def _count(rows: Mapping[str, float], pattern: str) -> float:
    return sum(often for name, often in rows.items() if fnmatchcase(name, pattern))


def _per_step(counts: list[float]) -> str:
    return f"{max(counts, default=0.0):g} a step"


def _bounds(findings: tuple[Finding, ...]) -> Mapping[str, float | None]:
    return {f.id: f.bound_us for f in findings if f.status is Status.FOUND}


def as_data(found: Explanation) -> dict[str, Any]:
    """Its fields in an `accepted` line."""
    return {
        "traced_us": found.traced_us,
        "row_shrank": found.row_shrank,
        "rows": {name: list(pair) for name, pair in found.rows.items()},
    }
