"""Chains of small kernels (operators on a CPU) that other engines run as one.

Signature: adjacent items inside one aligned layer, or before and after the layers, that match a family of the
fusion table; longest chain first, each item claimed once. Saving per step <= chain minus the reference's fused
kernel where the aligned group of a reference holds one; else chain minus its dearest member, which reads and
writes what the fused kernel must (its byte bound); plus the launches of the others. Verdict per family: fused in
reference X, path exists but is off (the fused kernel's name occurs elsewhere in this trace), or split everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trace_diff import fusion
from trace_diff.analysis import Analysis
from trace_diff.findings.calls import operators
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, Draft, NotFound
from trace_diff.fusion import Family
from trace_diff.whatif import Edit

RULE = "unfused-chains"
SKILLS = ("fused-kernels", "compile-regions", "direct-kv-write")  # each family names its own
FORMULA = "chain - fused kernel of a reference (else the chain's dearest member) + launches of the others"
_SKIP = frozenset({"view", "metadata", "allocation"})


@dataclass(slots=True)
class _Use:
    """All chains of one family: lists of item positions."""

    family: Family
    chains: list[tuple[int, ...]] = field(default_factory=list)


def look(context: Context) -> list[Draft] | NotFound:
    seq = context.analysis.sequence
    if seq is None:
        return NotFound("no work in the step")
    uses: dict[str, _Use] = {}
    for stretch in _stretches(context):
        for m in fusion.match([(seq.names[i], seq.classes[i]) for i in stretch]):
            use = uses.setdefault(m.family.name, _Use(m.family))
            use.chains.append(tuple(stretch[m.first : m.last + 1]))
    if not uses:
        return NotFound(f"no chain of the fusion table (version {fusion.table().version}) occurs")
    return [_draft(context, u) for u in uses.values()]


def _stretches(context: Context) -> list[list[int]]:
    """Runs of items between two anchors, without views. On a CPU collectives cut them: a process exchanges there."""
    seq, layers = context.analysis.sequence, context.analysis.layers
    assert seq is not None
    cut: set[int] = set()
    for a in layers.anchors if layers is not None else ():
        cut.update(range(a.first, a.last + 1))
    out: list[list[int]] = [[]]
    for i, cls in enumerate(seq.classes):
        if i in cut or (cls == "communication" and not context.on_gpu):
            out.append([])
        elif cls not in _SKIP and not _free_cast(context, i):
            out[-1].append(i)
    return [s for s in out if len(s) > 1]


def _free_cast(context: Context, item: int) -> bool:
    """A `.to()` that had nothing to do: on a CPU it takes well under two microseconds and calls nothing."""
    seq = context.analysis.sequence
    assert seq is not None
    return seq.device == "cpu" and seq.names[item] in ("aten::to", "aten::contiguous") and seq.dur_ns[item] < 2000


def _draft(context: Context, use: _Use) -> Draft:
    seq = context.analysis.sequence
    assert seq is not None
    fused = _fused_us(context, use)
    device: dict[int, float] = {}
    whole = kept = 0.0
    gone: list[int] = []
    for chain in use.chains:
        times = [float(seq.dur_ns[i]) for i in chain]
        dearest = chain[times.index(max(times))]
        target = fused[0] * 1000 if fused else max(times)
        whole += sum(times)
        kept += min(target, sum(times))
        spare = [int(seq.rows[i]) for i in chain if i != dearest]
        gone += spare
        if context.on_gpu:
            device |= dict.fromkeys(spare, 0.0)
            device[int(seq.rows[dearest])] = min(target, float(context.trace.events.dur_ns[seq.rows[dearest]]))
    cuts = context.subtree_cuts(operators(context, gone))
    n = len(use.chains)
    verdict = _verdict(context, use.family, fused)
    return Draft(
        title=f"{use.family.name}: {n} chains of {len(use.chains[0])} a step, {whole / 1e3:.1f} us; {verdict}",
        formula=FORMULA,
        basis=Basis.HOST,
        edit=Edit(host_cuts=cuts, device=device),
        evidence=(
            {
                "what": use.family.name,
                "count": n,
                "items": sum(map(len, use.chains)),
                "us": round(whole / 1000, 3),
                "fused_us": round(kept / 1000, 3),
                "verdict": verdict,
                "chain": [seq.names[i][:80] for i in use.chains[0]],
            },
            *({"what": f"fused path in {engine}", "source": source} for engine, source in use.family.where.items()),
        ),
        skills=use.family.skills,
        notes=(f"conditions: {use.family.conditions}",) if use.family.conditions else (),
        inferred=fused is None,
        suffix=use.family.name.replace(" ", "-").replace("+", "and").lower(),
    )


def _fused_us(context: Context, use: _Use) -> tuple[float, str] | None:
    """(us per chain, words): what a reference needs for the same work; None when none does it in fewer kernels.

    By name where a reference runs a kernel of the family; else by alignment: the group that holds the chains,
    less what this engine runs there besides the chains.
    """
    best: tuple[float, str] | None = None
    for reference in context.references:
        seq = reference.sequence
        if seq is None or seq.device != ("gpu" if context.on_gpu else "cpu"):
            continue
        times = [float(d) for n, d in zip(seq.names, seq.dur_ns, strict=True) if use.family.fused.search(n)]
        if times:
            mean = sum(times) / len(times) / 1000
            found = (mean, f"fused in {reference.label} ({mean:.1f} us)")
        else:
            found = _by_alignment(context, use, reference)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best


def _by_alignment(context: Context, use: _Use, reference: Analysis) -> tuple[float, str] | None:
    seq = context.analysis.sequence
    assert seq is not None
    rows = {int(seq.rows[i]) for i in use.chains[len(use.chains) // 2]}
    for group in context.aligned(reference):
        here, there = group.cells
        if group.anchor or not rows <= set(here.rows) or not there.count:
            continue
        inside = [c for c in use.chains if {int(seq.rows[i]) for i in c} <= set(here.rows)]
        items = sum(map(len, inside))
        rest_count, rest_us = here.count - items, here.us - sum(float(seq.dur_ns[i]) for c in inside for i in c) / 1000
        count, us = there.count - rest_count, there.us - rest_us
        if count >= items:
            return None
        return max(0.0, us) / len(inside), f"{group.sentence()}"
    return None


def _verdict(context: Context, family: Family, fused: tuple[float, str] | None) -> str:
    if fused is not None:
        return fused[1]
    seq = context.analysis.sequence
    assert seq is not None
    if any(family.fused.search(n) for n in set(seq.names)):
        return "path exists in this engine but is not used here"
    if any(family.fused.search(n) for n in context.work_names):
        return "path exists in this engine but is off in this phase"
    return "split everywhere" if context.references else "no reference to compare with"
