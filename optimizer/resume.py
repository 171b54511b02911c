"""Take up a run that was stopped or killed: repair, look at what it was doing, say so in the ledger.

Not for: going on with it (loop.py does, by the ledger alone).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optimizer import state
from optimizer.run import MODEL_CONFIG, Limits, Run, RunError, config_folder
from optimizer.services import Stop
from optimizer.truth import weights
from optimizer.types import Verdict
from optimizer.verdicts import close, follow


def weights_there(run: Run) -> str | None:
    """See that the run's weights are there; random ones are drawn from its seed again. Returns a note where they were.

    Raises RunError where they cannot be had, or are others than the run's.
    """
    want = run.request
    note = None
    if want.weights_seed is not None and not any(want.model_dir.glob("*.safetensors")):
        try:
            weights.write_random(config_folder(run.dir / MODEL_CONFIG, run.dir), want.model_dir, want.weights_seed)
        except OSError as error:
            raise RunError(f"the weights of run {want.id} are not in {want.model_dir} and cannot be written there: {error}") from error
        note = f"the weights were not there; drawn again from seed {want.weights_seed}"
    if weights.digest(want.model_dir) != want.weights_sha256:
        raise RunError(f"the weights in {want.model_dir} are not those of run {want.id}")
    return note


def reopen(run: Run, environment: dict[str, Any], limits: Limits | None = None, give_up: str | None = None) -> list[str]:
    """Drop a torn line, enter a killed pair as interrupted, set the present environment. Returns notes for a person.

    `limits` replaces those of the request that are given. `give_up`: why a person ends the open attempt without a verdict
    of its own. Raises LedgerBroken, LedgerBusy, and RunError when there is nothing to give up.
    """
    notes = run.ledger.verify()
    opened = state.open_attempt(run.ledger.lines())
    if give_up is not None and not give_up.strip():
        raise RunError("--give-up: an empty reason")
    if give_up is not None and opened is None:
        raise RunError(f"--give-up: no attempt of run {run.request.id} is open")
    run.ledger.context.env_hash = environment.get("hash")
    run.ledger.context.incumbent_commit = state.incumbent(run.ledger.lines(), run.base)
    run.repo.drop_unfinished_trees()
    flight = run.pair_interrupted()
    if flight is not None:
        notes.append(f"pair {flight['index'] + 1} of {flight['stage']} was interrupted; it does not count")
    if limits is not None:
        given = {k: getattr(limits, k) for k in Limits.__slots__ if getattr(limits, k) is not None}
        run.request = replace(run.request, limits=replace(run.request.limits, **given))
    data = {
        "environment": environment,
        "limits": {k: getattr(run.request.limits, k) for k in Limits.__slots__},
        "open_attempt": opened.number if opened else None,
    }
    before = [x["data"].get("limits") for x in run.ledger.lines() if x["kind"] == "resumed"]
    data["resumption"] = len(before) + 1
    run.ledger.append("resumed", None, data)
    follow(run)
    if opened and give_up is not None:
        at = next((x["data"]["stage"] for x in reversed(run.ledger.lines()) if x["attempt"] == opened.number and "stage" in x["data"]), "quick")
        close(run, opened.number, Stop(Verdict.UNDECIDED, at, None, f"given up by a person: {give_up.strip()}"))
        notes.append(f"attempt {opened.number} was open and is given up")
    elif opened:
        notes.append(f"attempt {opened.number} was open and goes on")
    return notes
