"""From rules' answers to findings: order, shared account, observer effect, units.

Order of claims: causes with the largest saving of their own first, then rules about the rest. Units: a
finding's bound is wall microseconds per output token (per step in prefill: per request). Not for: rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trace_diff.analysis import Observer
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Answer, Basis, CouldNotLook, Draft, NotFound
from trace_diff.findings.ledger import Ledger
from trace_diff.types import Finding, Kind, Phase, Status

MOSTLY = 0.9  # of a saving on device clocks: then the profiler did not stretch it
MOST_ROWS, MOST_SITES = 500, 5  # of an edit, to look up call sites
SMALLEST_NS = 500.0  # of one step: below this a cost is not worth a line


@dataclass(frozen=True, slots=True)
class _Claim:
    rule: ModuleType
    draft: Draft
    alone_ns: float
    claimed_ns: float
    device_ns: float  # the part of alone_ns that rests on device clocks


def judge(context: Context, answers: Seq[tuple[ModuleType, Answer]]) -> list[Finding]:
    """Findings in reading order: given savings first, dearest first; then by traced time; then the rest."""
    ledger = Ledger(context)
    drafts = [(r, a, ledger.alone(a)) for r, a in answers if isinstance(a, Draft)]
    drafts.sort(key=lambda x: (x[1].rest is not None, x[1].counted_under is not None, -x[2]))
    claims = [_claim(ledger, r, d, alone) for r, d, alone in drafts]
    kept = [c for c in claims if c.alone_ns >= SMALLEST_NS or c.draft.counted_under]
    found = _within_the_step(context, ledger, kept)
    traced = {id(f): c.claimed_ns for f, c in zip(found, kept, strict=True)}
    found.sort(key=lambda f: (f.bound_us is None, -(f.bound_us or 0.0), -traced[id(f)]))
    small = [
        _plain(c.rule, Status.NOT_FOUND, f"{c.draft.title}: hidden, worth less than {SMALLEST_NS / 1000:g} us", c.draft.evidence)
        for c in claims
        if c.alone_ns < SMALLEST_NS and not c.draft.counted_under
    ]
    absent = [
        _plain(r, Status.NOT_FOUND, a.why, evidence=a.evidence) for r, a in answers if isinstance(a, NotFound)
    ]
    blind = [_blind(r, a) for r, a in answers if isinstance(a, CouldNotLook)]
    return [*found, *small, *absent, *blind]


def _within_the_step(context: Context, ledger: Ledger, claims: list[_Claim]) -> list[Finding]:
    """Findings in the order of their claims. Scaled by different means, they must not add up to more than the step without the profiler."""
    control = context.analysis.observer.control_us
    left = math.inf if control is None else max(0.0, control - ledger.floor / 1000)
    units = context.analysis.units_per_step
    found = []
    for claim in claims:
        found.append(_found(context, claim, left / units))
        left = max(0.0, left - (found[-1].bound_us or 0.0) * units)
    return found


def _claim(ledger: Ledger, rule: ModuleType, draft: Draft, alone: float) -> _Claim:
    if draft.counted_under or not _every_step(draft):
        return _Claim(rule, draft, alone, 0.0, 0.0)
    return _Claim(rule, draft, alone, ledger.claim(draft), ledger.device_part(draft))


def _every_step(draft: Draft) -> bool:
    return draft.seen_in is None or draft.seen_in[0] == draft.seen_in[1]


def scale(observer: Observer, basis: Basis) -> float | None:
    """What a traced saving is worth without the profiler; None when nothing says so."""
    if basis is not Basis.HOST:
        return 1.0
    if observer.control_us is None:
        return None
    return min(1.0, observer.control_us / observer.traced_us)


def _found(context: Context, claim: _Claim, most_us: float) -> Finding:
    """The claim as a finding that bounds no more than `most_us` per unit."""
    draft, observer = claim.draft, context.analysis.observer
    units = context.analysis.units_per_step
    basis = Basis.DEVICE if claim.device_ns >= MOSTLY * max(claim.alone_ns, 1.0) else draft.basis
    factor = scale(observer, basis)
    notes = list(draft.notes)
    bound: float | None = None
    if draft.counted_under:
        notes.append(f"its time is counted under {draft.counted_under}")
    elif not _every_step(draft):
        seen, total = draft.seen_in or (0, 0)
        notes.append(f"{'one-time' if seen == 1 else 'occasional'}: in {seen} of {total} steps, not a cost per step")
    elif factor is not None:
        bound = claim.claimed_ns * factor / 1000 / units
    elif claim.device_ns >= SMALLEST_NS:
        bound = min(claim.claimed_ns, claim.device_ns) / 1000 / units
        notes.append("the saving is of device time only")
    if bound is not None and bound > most_us:
        bound = most_us
        notes.append("dearer findings leave no more of the step without the profiler")
    notes += _observer_notes(observer, basis)
    if claim.alone_ns - claim.claimed_ns > 0.02 * claim.alone_ns and bound is not None:
        notes.append(f"{claim.alone_ns / 1000:.1f} us per step on its own; the rest is claimed by dearer findings")
    evidence = (
        *([{"what": "traced per step", "us": round(claim.alone_ns / 1000, 3)}] if _every_step(draft) else []),
        *draft.evidence,
        *_call_sites(context, draft),
    )
    return Finding(
        id=claim.rule.RULE + (f":{draft.suffix}" if draft.suffix else ""),
        rule=claim.rule.RULE,
        status=Status.FOUND,
        title=draft.title,
        bound_us=bound,
        per="token" if context.analysis.phase == Phase.DECODE else "request",
        formula=draft.formula,
        evidence=evidence,
        skills=draft.skills,
        inferred=draft.inferred,
        notes=tuple(notes),
    )


def _call_sites(context: Context, draft: Draft) -> list[dict[str, Any]]:
    """Python lines that cause the edit's host rows, dearest first; nothing for traces without stacks."""
    if draft.edit is None or not len(context.trace.rows(Kind.PYTHON)):
        return []
    time: dict[str, float] = {}
    for row, ns in sorted(draft.edit.host_cuts.items(), key=lambda x: -x[1])[:MOST_ROWS]:
        site = context.site(row)
        if site is not None:
            time[site] = time.get(site, 0.0) + ns
    top = sorted(time.items(), key=lambda x: -x[1])[:MOST_SITES]
    return [{"what": "call site", "site": site, "us": round(ns / 1000, 3)} for site, ns in top]


def _observer_notes(observer: Observer, basis: Basis) -> list[str]:
    if basis is Basis.COUNTS:
        return ["count times a unit cost that was measured without the profiler"]
    if basis is Basis.DEVICE:
        return []
    if observer.ratio is None:
        return ["perturbed: no control without the profiler, so no saving is given for host time"]
    if observer.perturbed:
        return [f"perturbed: traced steps take {observer.ratio:.2f} x the control; the saving is scaled to it"]
    return []


def _plain(rule: ModuleType, status: Status, title: str, evidence: tuple[dict[str, object], ...] = ()) -> Finding:
    return Finding(id=rule.RULE, rule=rule.RULE, status=status, title=title, evidence=evidence)


def withheld(rule: ModuleType, reasons: tuple[str, ...]) -> Finding:
    """A rule's answer on a trace that is too damaged to judge."""
    return _blind(rule, CouldNotLook(reasons, ("the trace is damaged: verdicts are withheld",)))


def _blind(rule: ModuleType, answer: CouldNotLook) -> Finding:
    return Finding(
        id=rule.RULE,
        rule=rule.RULE,
        status=Status.COULD_NOT_LOOK,
        title=f"could not look: {', '.join(answer.missing)}",
        missing=answer.missing,
        notes=answer.notes,
    )
