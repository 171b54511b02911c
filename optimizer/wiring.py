"""The real services: engines in their sandbox, the sealed gates, the oracle, the trace diff, the proposer.

Everything heavy is imported here, when a run starts, so that `optimize --help` does not wait for it. Not for:
behaviour of its own; each callable is a few lines around the module that does the work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer import preflight, state
from optimizer.awake import awake
from optimizer.budget import Budget
from optimizer.run import Run
from optimizer.services import Capture, NoProposal, Question, Services, View
from optimizer.types import GateResult, LaunchSpec, Pair, Protocol, Series, Stage


class WeightsChanged(Exception):
    """Size, time or inode of a weight file is not what it was when the run began."""


@contextmanager
def real(run: Run, view: View) -> Iterator[Services]:
    """Services of a run; the oracle's process lives as long as this is open, and its GPUs stay up."""
    from optimizer.confine.launch import compiling
    from optimizer.measure import PROTOCOLS, protocol_for
    from optimizer.patching import apply_edits
    from optimizer.traffic.prompts import PromptSource
    from optimizer.truth import bands
    from optimizer.truth.oracle import Oracle

    want = run.request
    protocol = protocol_for(PROTOCOLS[want.protocol], want.metric, want.device)
    budget = Budget(
        want.limits,
        protocol,
        run.ledger.lines,
        time.monotonic,
        gpus=want.tp if want.device == "cuda" else 0,
        earlier_s=state.wall_s(run.ledger.lines()[:-1]),
    )
    prompts = PromptSource(bytes.fromhex(want.prompt_key), want.model_dir)
    oracle = Oracle(want.model_dir, want.device, engine_dtype=want.dtype, devices=want.devices)
    with awake(want.devices if want.device == "cuda" else None), oracle:
        bands.settle(run, oracle, prompts, protocol, view)
        made = _Real(run, view, protocol, prompts, oracle)
        yield Services(
            protocol=protocol,
            budget=budget,
            view=view,
            capture=made.capture,
            references=made.references,
            diagnose=made.diagnose,
            propose=made.propose,
            apply_edits=apply_edits,
            gates=made.gates,
            run_pair=made.run_pair,
            check_seal=made.check_seal,
            learn=made.learn,
            compiling=compiling,
            bandwidth=made.bandwidth,
        )


@dataclass(slots=True)
class _Real:
    run: Run
    view: View
    protocol: Protocol
    prompts: Any
    oracle: Any
    _proposer: Any = None
    _greeted: bool = False
    _weights: Any = None

    def capture(self, spec: LaunchSpec, out: Path) -> Capture:
        """Raises LaunchError; preflight.Differs on the first launch of the incumbent."""
        from optimizer.capture import capture

        greet = self._greet if spec.label == "incumbent" else lambda metadata: None
        return capture(spec, out, self.protocol.cell, self.prompts, greet)

    def _greet(self, metadata: dict[str, Any]) -> None:
        """The first server of this process says what it is; a difference from the request ends the run."""
        if not self._greeted:
            self.view.show(preflight.table(self.run.request, metadata, self.protocol))
            preflight.check(self.run.request, metadata, self.protocol)
            self._greeted = True

    def references(self, traces: Path, here: Capture) -> list[Capture]:
        """transformers on the same cell: captured once a run, entered in the ledger. A failure is said and kept."""
        from optimizer.references import references

        return references(self.run, self.view, self.protocol, self.prompts, traces)

    def diagnose(self, capture: Capture, references: Any) -> Any:
        from dataclasses import replace

        from optimizer import context
        from optimizer.capturing import BASELINE
        from optimizer.diagnose import diagnose

        want = self.run.request
        label = f"{want.target} {capture.label}"
        if capture.label != BASELINE:
            return diagnose(capture, references, label)
        found = diagnose(capture, references, label, context.stored(want.device, want.tp, capture.batch))
        table = context.published()
        return found if table is None else replace(found, shown=(*found.shown, table))

    def propose(self, question: Question) -> Series | NoProposal:
        from optimizer.proposers import Budget as ProposerBudget
        from optimizer.proposers import Declined, ProposeContext, get
        from optimizer.tryout import try_out

        want = self.run.request
        here = {"device": want.device, "tp": want.tp} if want.agent == "playbook" else {}
        self._proposer = self._proposer or get(want.agent, **here, **want.options)
        context = ProposeContext(
            sources=question.sources,
            findings=question.findings,
            history=question.history,  # pyright: ignore[reportArgumentType] - HistoryItem, built in state.history
            knowledge=_knowledge(self.run),
            budget=ProposerBudget(
                token_us=question.token_us,
                margin=question.margin,
                usd=question.usd_left,
                seconds=question.seconds_left,
            ),
            incumbent=question.incumbent,
            exchanges=self.run.dir / "exchanges",
            attempt=question.attempt,
            frozen=self.run.target.frozen,
            try_out=lambda sources: try_out(self.run, sources),
            stopped=lambda: self.run.stop_requested,
            note=self.view.note,
        )
        answer = self._proposer.propose(context)
        return NoProposal(str(answer), answer.final, answer.usd) if isinstance(answer, Declined) else answer

    def gates(
        self, stage: str, candidate: LaunchSpec, incumbent: LaunchSpec, base: str, commit: str
    ) -> Iterator[GateResult]:
        from optimizer import gates

        context = gates.GateContext(
            candidate=candidate,
            incumbent=incumbent,
            repo=self.run.repo.git_dir,
            base_commit=base,
            candidate_commit=commit,
            target=self.run.target,
            oracle=self.oracle,
            prompts=self.prompts,
            protocol=self.protocol,
            run_dir=self.run.dir,
            accept_numeric_drift=self.run.request.accept_numeric_drift,
        )
        return gates.run(stage, context)

    def run_pair(self, a: LaunchSpec, b: LaunchSpec, stage: Stage, index: int, order: str) -> Pair:
        from optimizer.measure import run_pair
        from optimizer.targets import sized

        protocol = self.protocol
        if stage not in (Stage.HEADLINE, Stage.ABLATE):  # those time the first engine too: its pace sets the size
            protocol = sized(protocol, state.adopted_us(self.run.ledger.lines()))
        return run_pair(
            a, b, protocol=protocol, stage=stage, index=index, order=order, prompts=self.prompts, oracle=self.oracle
        )

    def check_seal(self) -> None:
        """Raises SealBroken or WeightsChanged; the run ends, since nothing judged since can be trusted."""
        from optimizer import seal
        from optimizer.truth import weights

        seal.verify()
        now = weights.fingerprint(self.run.request.model_dir)
        self._weights = self._weights or now
        if now != self._weights:
            raise WeightsChanged(f"the files in {self.run.request.model_dir} changed during the run")

    def bandwidth(self, size: int) -> float:
        """Measured in the oracle's process, on the device that serves. Raises OracleError."""
        tp = self.run.request.tp
        return self.oracle.machine(size // tp)[0] * tp

    def learn(self, number: int | None) -> list[str]:
        from optimizer.knowledge.learning import learn

        return learn(self.run, number)


def _knowledge(run: Run) -> Any:
    from optimizer.knowledge.learning import accepted

    return accepted(run)
