"""Named causes of a slow step, each with an upper bound of what fixing it could save; one rule per file.

`RULES` is the whole list. Every rule answers found, not found or could not look; `find` turns the answers into
findings whose bounds never promise one nanosecond twice (ledger) and respect the observer effect: a saving is
given where it rests on device clocks, on counts with a unit cost measured without the profiler, or on host
times scaled to an unprofiled control; in a perturbed trace without a control it is None and says so.
Not for: drawing, fixing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import ModuleType

from trace_diff.analysis import Analysis
from trace_diff.findings import (
    allocations,
    autograd_recording,
    between_steps,
    comm_wait,
    copies,
    gathered_attention,
    graph_region,
    host_copies,
    host_reads,
    launch_bound,
    overlap,
    prefill_path,
    prefill_stall,
    python_time,
    recompilation,
    roofline_gap,
    sampling_cost,
    slow_transfer,
    slower_kernels,
    split_products,
    step_invariant,
    straggler,
    unfused_chains,
)
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Answer, CouldNotLook, Draft, NotFound
from trace_diff.findings.judge import judge, withheld
from trace_diff.findings.trust import doubts
from trace_diff.types import Finding

RULES: tuple[ModuleType, ...] = (
    comm_wait,
    slow_transfer,
    autograd_recording,
    host_reads,
    allocations,
    host_copies,
    copies,
    unfused_chains,
    split_products,
    slower_kernels,
    roofline_gap,
    step_invariant,
    gathered_attention,
    sampling_cost,
    prefill_path,
    prefill_stall,
    between_steps,
    recompilation,
    overlap,
    straggler,
    launch_bound,
    graph_region,
    python_time,
)

__all__ = ["RULES", "explain", "find"]


def find(analysis: Analysis, references: Seq[Analysis] = ()) -> list[Finding]:
    """All rules' answers: found with a saving (dearest first), found without, not found, could not look."""
    context = Context(analysis, references)
    reasons = doubts(context)
    if reasons:
        return [withheld(rule, reasons) for rule in RULES]
    answers = [(rule, answer) for rule in RULES for answer in _look(rule, context)]
    return judge(context, answers)


def explain(rule: str) -> str:
    """What a rule looks for, its formula and the skills that answer it. Raises KeyError naming the known rules."""
    known = {r.RULE: r for r in RULES}
    found = known.get(rule.split(":")[0])
    if found is None:
        raise KeyError(f"no rule {rule!r}; known are {', '.join(sorted(known))}")
    return f"{(found.__doc__ or '').strip()}\n\nBound: {found.FORMULA}\nSkills: {', '.join(found.SKILLS)}"


def _look(rule: ModuleType, context: Context) -> list[Answer]:
    answer: Answer | list[Draft] = rule.look(context)
    if isinstance(answer, Draft | NotFound | CouldNotLook):
        return [answer]
    return list(answer)
