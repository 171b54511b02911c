"""What an attempt leaves behind: a commit and an `accepted` line, or a verdict with its reason; then knowledge.

Not for: the user's own tree (apply.py), nor the judgement itself.
"""

from __future__ import annotations

from typing import Any

from optimizer import accept as judgement
from optimizer import state
from optimizer.candidate import Candidate, incumbent_name
from optimizer.explain import Explanation, as_data
from optimizer.judge import calibration_of, pairs_of
from optimizer.run import Run
from optimizer.serial import plain, write_json
from optimizer.services import Services, Stop
from optimizer.types import Stage, StageResult, Verdict

_LINE = {Verdict.REJECT: "rejected", Verdict.UNDECIDED: "undecided", Verdict.PARKED: "parked"}


def accept(run: Run, candidate: Candidate, result: StageResult, found: Explanation) -> Verdict:
    """Commit the series with its full trailers, enter it, and move the incumbent."""
    confirmed = _lines(run, candidate.number, "confirmed")[0]
    ratio, ci95 = judgement.interval(pairs_of(run, Stage.CONFIRM, candidate.end.key), calibration_of(run))
    parent = run.repo.incumbent()
    commits: list[str] = []
    for at, member in enumerate(candidate.members):
        trailers = {
            "Attempt": candidate.number,
            "Finding": ", ".join(member.patch.finding_ids),
            "Mechanism": member.patch.mechanism,
            "Predicted-us": f"{member.patch.predicted_us:g} per {member.patch.per}",
            "Measured-ratio-ci95": f"{ratio:.4f} [{ci95[0]:.4f}, {ci95[1]:.4f}]"
            + (f" for the series of {len(candidate.members)}" if len(candidate.members) > 1 else ""),
            "Gates-digest": run.ledger.context.gates_digest or "",
            "Ledger-hash": confirmed["hash"],
        }
        if len(candidate.members) > 1:
            trailers["Series"] = f"{at + 1}/{len(candidate.members)}"
        parent = run.repo.rewrite(member.commit, parent, trailers)
        commits.append(parent)
    data = {
        "commit": parent,
        "commits": commits,
        "ratio": ratio,
        "ci95": list(ci95),
        "predicted_us": candidate.predicted_us,
        "measured_us": confirmed["data"].get("measured_us"),
        "per": candidate.end.patch.per,
        "mechanism": candidate.end.patch.mechanism,
        "finding_ids": list(candidate.end.patch.finding_ids),
        "pairs": result.pairs,
        **as_data(found),
    }
    run.ledger.append("accepted", candidate.number, plain(data))
    follow(run)
    return Verdict.ACCEPT


def follow(run: Run) -> None:
    """Make the repository and the ledger's context agree with what the ledger says was accepted last."""
    commit = state.incumbent(run.ledger.lines(), run.base)
    run.repo.set_incumbent(commit)
    run.ledger.context.incumbent_commit = commit


def close(run: Run, number: int, stop: Stop) -> Verdict:
    """Enter a verdict that is not an acceptance."""
    data = {"stage": stop.stage, "reason": stop.reason.value if stop.reason else None, "detail": stop.detail}
    run.ledger.append(_LINE[stop.verdict], number, data)
    return stop.verdict


def finish_attempt(run: Run, do: Services, number: int) -> None:
    """Knowledge of the attempt is proposed to a person; its trees go; the budget so far is entered."""
    ids = learn(do, number)
    if ids:
        run.ledger.append("knowledge_proposed", number, {"entries": ids})
    _file_away(run, number)
    keep = {incumbent_name(run.repo.incumbent()), incumbent_name(run.base)}
    for place in run.repo.worktrees.glob("[!.]*"):
        if place.name not in keep:
            run.repo.drop_tree(place.name)
    run.ledger.append("budget", number, {**do.budget.facts(), "attempt_s": round(_seconds(run, number), 1)})


def learn(do: Services, number: int | None) -> list[str]:
    """Ids of the entries that were proposed; a lesson that cannot be written down is no reason to lose a run."""
    try:
        return do.learn(number)
    except (ValueError, OSError) as error:
        do.view.note(f"no knowledge entry was proposed: {error}")
        return []


def _file_away(run: Run, number: int) -> None:
    """Gate results and server logs into the attempt's own folder."""
    place = run.attempt_dir(number)
    write_json(place / "gates.json", [line["data"] for line in _lines(run, number, "gate")])
    for log in sorted((run.dir / "gates").glob("server-*.log")):
        log.replace(place / "server.log")  # of a series the end's, which was the last to run


def _seconds(run: Run, number: int) -> float:
    """What the attempt cost: its gates, pairs and captures."""
    return state.device_s(line for line in run.ledger.lines() if line["attempt"] == number)


def finish_ended(run: Run, do: Services) -> None:
    """What a killed run had not come to after its last verdict."""
    ended = [a for a in state.attempts(run.ledger.lines()) if a.end is not None]
    if ended and not ended[-1].data("budget"):
        finish_attempt(run, do, ended[-1].number)


def _lines(run: Run, number: int, kind: str) -> list[dict[str, Any]]:
    return [line for line in run.ledger.lines() if line["kind"] == kind and line["attempt"] == number]
