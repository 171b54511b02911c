"""`optimize admit`: a person looked at a parked patch and lets it be judged; the run tries it again when it is resumed.

It passes the same gates and the same decision as any other patch; only what it was parked for does not stop it a
second time. Not for: knowledge entries (queue.py), or trying the patch (propose.py takes it up).
"""

from __future__ import annotations

from optimizer import state
from optimizer.run import Run, RunError
from optimizer.types import Verdict


def admit(run: Run, number: int, reviewer: str, reason: str) -> str:
    """Enter the decision. Returns what the patch was parked for. Raises RunError when there is nothing to admit."""
    attempts = {attempt.number: attempt for attempt in state.attempts(run.ledger.lines())}
    parked = [n for n, attempt in attempts.items() if attempt.verdict is Verdict.PARKED]
    if number not in parked:
        there = ", ".join(map(str, parked)) or "none"
        raise RunError(f"attempt {number} of run {run.request.id} is not parked; parked: {there}")
    if not reason.strip():
        raise RunError("an admission needs a reason")
    admitted = [x for x in run.ledger.lines() if x["kind"] == "reviewed" and x["attempt"] == number]
    if any(line["data"].get("decision") == "admit" for line in admitted):
        raise RunError(f"attempt {number} of run {run.request.id} was admitted already; `optimize resume` tries it again")
    end = attempts[number].end
    assert end is not None
    run.ledger.append("reviewed", number, {"decision": "admit", "reviewer": reviewer, "reason": reason})
    return str(end["data"]["detail"])
