"""What a 16-bit engine may differ by: measured once a run on the original engine, which is benign by definition.

A deep model in bf16 moves logits by more than the bands that were chosen on a small one. The original engine's own
greedy streams and log-probabilities against the float32 oracle set the run's bands (`oracle.calibrated`); they stand in
the ledger and are the same for every candidate. Not for: float32, whose bands are fixed.
"""

from __future__ import annotations

from typing import Any

from optimizer import gates
from optimizer.candidate import incumbent_name
from optimizer.confine.launch import LaunchError
from optimizer.gates import logprobs
from optimizer.gates.context import Lab, ask
from optimizer.run import Run
from optimizer.services import View
from optimizer.traffic.client import Request
from optimizer.truth.oracle import BANDS, Bands, Oracle, calibrated
from optimizer.types import GateResult, Protocol, RejectReason

# The largest gap of few streams is luck: of 14 with 24 tokens each it was 0.5, 0.9 and 1.2 logits in three runs of one model, and a band of
# twice the smallest parked a patch for one stream in eighty. An attempt is judged by a hundred streams and more.
LENGTHS = (16, 17, 24, 33, 48, 64, 100, 128, 128, 257, 385, 512) * 4
NEW_TOKENS = 48
TABLES = (16, 33, 57, 24, 21, 40, 64, 90) * 4  # prompts whose log-probabilities are compared: a mean over few varies much


def settle(run: Run, oracle: Oracle, prompts: Any, protocol: Protocol, view: View) -> None:
    """Set the oracle's bands: those in the ledger, or measured now on the original engine. Raises LaunchError."""
    want = run.request
    floor = BANDS[want.dtype]
    if want.dtype == "float32":
        return
    known = [line["data"] for line in run.ledger.lines() if line["kind"] == "bands"]
    if known:
        oracle.bands = Bands(known[-1]["reorder"], known[-1]["tolerance"], known[-1]["kl"])
        return
    view.step(f"measure what {want.dtype} moves on the original engine")
    gaps, divergence = _original(run, oracle, prompts, protocol)
    oracle.bands = calibrated(gaps, floor, divergence)
    facts = {"gaps": [round(gap, 4) for gap in gaps], "mean_kl": divergence, "oracle_dtype": oracle.dtype}
    bands = {"reorder": oracle.bands.reorder, "tolerance": oracle.bands.tolerance, "kl": oracle.bands.kl}
    run.ledger.append("bands", None, {**bands, **facts})
    view.note(
        f"{want.dtype}: the original engine's tokens lie up to {max(gaps):.2g} below the {oracle.dtype} oracle's best; "
        f"up to {oracle.bands.reorder:.2g} counts as equal, above {oracle.bands.tolerance:.2g} as wrong"
    )


def _original(run: Run, oracle: Oracle, prompts: Any, protocol: Protocol) -> tuple[list[float], float]:
    """(largest gap of each stream, mean divergence of its log-probabilities) of the run's first commit."""
    spec = run.spec(run.base, incumbent_name(run.base), "original")
    lab = Lab(
        gates.GateContext(
            candidate=spec, incumbent=spec, repo=run.repo.git_dir, base_commit=run.base, candidate_commit=run.base,
            target=run.target, oracle=oracle, prompts=prompts, protocol=protocol, run_dir=run.dir,
        )
    )  # fmt: skip
    try:
        setup = lab.setup()
        drawn = lab.draw("bands", len(LENGTHS), LENGTHS)
        together = ask(lab.server(setup), [Request(ids, NEW_TOKENS) for ids in drawn], 120.0)
        alone = [ask(lab.server(setup), [Request(ids, NEW_TOKENS)])[0] for ids in lab.draw("bands alone", 2, [31, 128])]
        compared = logprobs.against_oracle(lab, setup, "bands", TABLES)
    finally:
        lab.close()
    if isinstance(compared, GateResult):  # it offers none, which is no fault, or nonsense
        if not compared.passed:
            raise LaunchError(RejectReason.BOOT, f"the original engine's log-probabilities: {compared.detail}")
        compared = logprobs.Compared([], 0.0, 0.0, 0)
    return [score.max_gap for score in oracle.score([*together, *alone, *compared.streams])], compared.mean_kl
