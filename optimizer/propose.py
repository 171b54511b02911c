"""Ask the proposer for a series, or take up the one whose attempt was left open.

The answer is on disk before its `proposed` lines are in the ledger, so a killed run never asks twice for what it
has. Not for: choosing a patch (proposers/), or applying it (candidate.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from optimizer import state
from optimizer.candidate import keys, patch_sha
from optimizer.run import Run
from optimizer.serial import build, plain, write_json
from optimizer.services import Diagnosis, NoProposal, Proposal, Question, Services
from optimizer.types import Series


def propose(run: Run, do: Services, diagnosis: Diagnosis) -> Proposal | NoProposal:
    """The open attempt, or a new one with its `proposed` lines (one per patch) written."""
    lines = run.ledger.lines()
    opened = state.open_attempt(lines)
    number = opened.number if opened else next_number(lines)
    place = run.attempt_dir(number) / "patch.json"
    admits = state.waiting(lines) if opened is None else _admits(opened)
    if admits is not None and not place.is_file():
        write_json(place, _read(run.attempt_dir(admits) / "patch.json"))
    if place.is_file():
        series = _read(place)
    else:
        do.view.step(f"attempt {number}: ask the {run.request.agent} proposer")
        answer = do.propose(_question(run, do, diagnosis, number))
        if isinstance(answer, NoProposal):
            run.ledger.append("budget", None, {**do.budget.facts(), "usd": answer.usd, "declined": answer.why})
            return answer
        series = answer
        write_json(place, series)
    _enter(run, do, number, series, admits)
    return Proposal(number, series, admits is not None)


def _read(place: Path) -> Series:
    return build(Series, json.loads(place.read_text("utf-8")))


def _admits(opened: state.Attempt) -> int | None:
    return opened.data("proposed")[0].get("admits")


def next_number(lines: list[dict]) -> int:
    return 1 + max((line["attempt"] for line in lines if line["attempt"] is not None), default=0)


def _question(run: Run, do: Services, diagnosis: Diagnosis, number: int) -> Question:
    lines = run.ledger.lines()
    incumbent = run.repo.incumbent()
    calibration = state.calibration(lines)
    limit = run.request.limits.usd
    return Question(
        sources=run.repo.sources(incumbent, run.target.editable),
        findings=diagnosis.findings,
        history=state.history(lines),
        incumbent=incumbent,
        attempt=number,
        token_us=state.token_us(lines),
        margin=calibration.margin if calibration else 0.0,
        usd_left=None if limit is None else limit - state.usd(lines),
        seconds_left=do.budget.left_s(),
    )


def _enter(run: Run, do: Services, number: int, series: Series, admits: int | None) -> None:
    """Write the `proposed` lines that are not there yet."""
    lines = run.ledger.lines()
    there = [line for line in lines if line["kind"] == "proposed" and line["attempt"] == number]
    sources = run.repo.sources(run.repo.incumbent(), run.target.editable)
    for at, (patch, key) in enumerate(zip(series.patches, keys(do, sources, series), strict=True)):
        if at < len(there):
            continue
        last = at == len(series.patches) - 1
        data = {
            "patch_sha": patch_sha(patch),
            "ast_hash": key,
            "finding_ids": list(patch.finding_ids),
            "mechanism": patch.mechanism,
            "predicted_us": patch.predicted_us,
            "per": patch.per,
            "proposer": series.proposer,
            "usd": series.usd if last else 0.0,
            "title": patch.title,
            "params": plain(patch.params),
            "member": at,
            "of": len(series.patches),
            "token_us": state.token_us(lines),
            "admits": admits,
        }
        run.ledger.append("proposed", number, data)
