"""What a page that follows a running loop says on top of the report: where the run is now.

Pure functions over `run_data.Run`. Not for: serving (the optimizer does), or the report's own numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reports.run_data import Run
from reports.run_page import RunPage

_STAGES = {
    "screen": "screening",
    "decide": "deciding",
    "confirm": "confirming on fresh prompts",
    "calibrate": "measuring the noise of this machine",
    "headline": "measuring the first against the last engine",
    "ablate": "leaving one patch out",
    "canary": "checking the incumbent again",
}


def words(run: Run) -> dict[str, Any]:
    """For the template: `now` (a sentence), `last_utc` (of the last line), `ended`."""
    last = _last(run)
    return {"now": _now(run), "last_utc": str(last.get("t_utc") or ""), "ended": last.get("kind") == "finished"}


def _last(run: Run) -> dict[str, Any]:
    """The last line that the loop wrote; a person's decisions come after its end."""
    return next((line for line in reversed(run.lines) if line.get("kind") != "reviewed"), {})


def _now(run: Run) -> str:
    last = _last(run)
    if not last:
        return "the ledger is still empty"
    kind, data = str(last.get("kind")), last.get("data")
    data = data if isinstance(data, dict) else {}
    number = last.get("attempt")
    attempt = next((a for a in run.attempts if a.number == number), None)
    name = f"attempt {number}" + (f", {attempt.mechanism}" if attempt and attempt.mechanism else "")
    if kind == "finished":
        return f"finished: {data.get('reason') or 'no reason recorded'}"
    if kind == "pair":
        stage = str(data.get("stage"))
        n = sum(p.get("stage") == stage for p in (attempt.pairs if attempt else run.kinds.get("pair", [])))
        return f"{name + ': ' if attempt else ''}{_STAGES.get(stage, stage)}, {n} pair{'s' if n != 1 else ''} so far"
    if kind == "gate" and attempt:
        passed = sum(bool(g.get("passed")) for g in attempt.gates)
        return f"{name}: gates, {passed} passed so far, the last was {data.get('gate')}"
    if kind == "proposed":
        return f"{name}: a patch was proposed, its gates come next"
    if attempt and attempt.outcome == "unfinished":
        return f"{name}: {kind}"
    done = len(run.attempts)
    return {
        "budget": f"{done} attempt{'s' if done != 1 else ''} so far; the next one follows",
        "run_started": "started; the first engine is captured",
        "resumed": "taken up again",
        "captured": "a trace was captured; findings and the next patch follow",
        "calibrated": "the noise is known; the next patch follows",
    }.get(kind, f"after {name} ({kind}); the next attempt follows" if number is not None else f"after {kind}")


def adapt(page: RunPage) -> RunPage:
    """The page's words for a run that may still be working: an open attempt is no stopped one."""
    page.rows = [
        replace(row, outcome="open", reason="being judged, or the run was stopped in the middle of it")
        if row.outcome == "unfinished"
        else row
        for row in page.rows
    ]
    page.warnings = [w for w in page.warnings if not w.startswith("The run has not finished")]
    page.timing = [(k, "not ended" if (k, v) == ("Ended because", "stopped") else v) for k, v in page.timing]
    return page
