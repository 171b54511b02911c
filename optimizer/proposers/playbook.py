"""The offline proposer: of what skills can do about the findings, that which answers most of the step's time.

Deterministic: the same findings, sources, history and knowledge give the same series. Accepted knowledge
changes the order, the parameters and what is skipped. Not for: loading skills (skillbook.py) or timing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.knowledge.blueprint import Entry
from optimizer.patching import apply_edits, ast_hash, changed_lines, edits_from
from optimizer.types import Patch, RejectReason, Series
from trace_diff.types import Finding, Status

from . import skillbook
from .base import MAX_FILES, MAX_LINES, Declined, HistoryItem, ProposeContext, Refusal
from .skillbook import Rewrite, Skill

NO_EFFECT = {RejectReason.NO_GAIN.value, RejectReason.GUARD.value, RejectReason.NOT_ACTIVATED.value}
NOT_ITS_FAULT = {RejectReason.NO_BUDGET.value, RejectReason.INFRASTRUCTURE.value}
AGAIN_WHEN_FASTER = 0.8  # an effect too small to see may show once the rest of the step has shrunk to this


class Playbook:
    """See the module docstring. `folders`: further reviewed skill folders, after the built-in ones. `only`: names of
    the skills to use; all where it is empty. `device`: skills made for others only are left out. Raises ValueError for a
    name that is not there."""

    name = "playbook"

    def __init__(
        self,
        folders: Iterable[Path | str] = (),
        built_in: Path | None = skillbook.BUILT_IN,
        only: Iterable[str] = (),
        device: str | None = None,
        tp: int | None = None,
    ) -> None:
        known = skillbook.load_all([*([built_in] if built_in else []), *map(Path, folders)])
        names = tuple(only) or tuple(known)
        if unknown := sorted(set(names) - known.keys()):
            raise ValueError(f"unknown skills {', '.join(unknown)}; known: {', '.join(known)}")
        self.here = {"device": device, "tp": tp}  # codemods with a form for each read it
        fits = {name for name, skill in known.items() if device is None or device in skill.devices}
        self.skills = {name: skill for name, skill in known.items() if name in names and name in fits}

    def propose(self, ctx: ProposeContext) -> Series | Declined:
        """The series that answers most, what is proven before what is only bounded; or every reason why there is none."""
        refusals: list[Refusal] = []
        best: tuple[float, Series | None] = -math.inf, None
        for finding, skill, entry in self._candidates(ctx):
            answer = self._try(ctx, finding, skill, entry)
            if isinstance(answer, str):
                refusals.append(Refusal(finding.id, skill.name, answer))
            elif entry is not None:
                return answer[1]
            elif answer[0] > best[0]:
                best = answer
        return best[1] or Declined(self.name, tuple(refusals), "" if refusals else "no finding that a skill answers")

    def _candidates(self, ctx: ProposeContext) -> Iterator[tuple[Finding, Skill, Entry | None]]:
        """Pairs to try, best first: proven savings before bounds, then dearest finding, then the rule's order."""
        pairs = []
        for place, finding in enumerate(ctx.findings):  # as given: dearest first, unbounded ones by their cost
            if finding.status is not Status.FOUND:
                continue
            for order, skill in enumerate(self._answering(finding)):
                entry = _entry_for(ctx.knowledge, skill)
                proven = entry.expected_saving_us(ctx.budget.token_us) if entry else None
                reach = _reach(ctx, finding, skill)
                bound = reach if isinstance(reach, float | int) else -1.0
                saving = min(proven, bound) if proven is not None and bound >= 0 else proven
                key = (saving is None, -(saving or 0.0), -bound, place, order)
                pairs.append((key, finding, skill, entry))
        pairs.sort(key=lambda p: p[0])
        return ((finding, skill, entry) for _, finding, skill, entry in pairs)

    def _answering(self, finding: Finding) -> list[Skill]:
        named = [self.skills[s] for s in finding.skills if s in self.skills]
        volunteers = [s for s in self.skills.values() if s not in named and {finding.rule, finding.id} & set(s.answers)]
        return [*named, *volunteers]

    def _try(self, ctx: ProposeContext, finding: Finding, skill: Skill, entry: Entry | None) -> tuple[float, Series] | str:
        """A series and what it is worth, or why there is none."""
        reach = _reach(ctx, finding, skill)
        if isinstance(reach, str):
            return reach
        finding = dataclasses.replace(finding, bound_us=reach)
        if entry is not None and not entry.helps:
            return f"accepted knowledge says that it does not help here ({entry.id}: {entry.why})"
        why = "the pattern is not there"
        for params in _variants(skill, entry):
            if blocked := _blocked(ctx, finding, skill.name, params):
                why = blocked
                continue
            rewrites = self._rewrites(ctx, skill, {**_as_dict(finding), "params": params, **self.here})
            if isinstance(rewrites, str):
                return rewrites
            series = _series(ctx, finding, rewrites, params)
            if isinstance(series, Series):
                worth = _worth(ctx, finding, series)
                return _too_little(ctx, finding, worth) or (worth, series)
            why = series
        return why

    def _rewrites(self, ctx: ProposeContext, skill: Skill, finding: dict[str, Any]) -> list[Rewrite] | str:
        """The skill's rewrites, after those of its enablers that act here; an enabler alone is not worth a series."""
        sources, before = ctx.open(), []
        for name in (n for n in skill.enablers if n in self.skills):
            enabler = self.skills[name]
            params = _variants(enabler, _entry_for(ctx.knowledge, enabler))[0]
            answer = skillbook.run(enabler, sources, {**finding, "params": params})
            if not isinstance(answer, str):
                before += [dataclasses.replace(r, predicted_us=0.0, also=()) for r in answer]
                sources = answer[-1].after
        answer = skillbook.run(skill, sources, finding)
        if isinstance(answer, str):
            return answer
        return [dataclasses.replace(r, after={**ctx.sources, **r.after}) for r in (*before, *answer)]


def _reach(ctx: ProposeContext, finding: Finding, skill: Skill) -> float | str | None:
    """What the skill could save of the finding at most, in the finding's unit, or why nothing.

    A rule may name a skill that helps with it in passing (a host read can make the other ranks wait): then what the
    skill itself answers must have been found too, and bounds it.
    """
    if not skill.answers or {finding.rule, finding.id} & set(skill.answers):
        return finding.bound_us
    own = [f for f in ctx.findings if f.status is Status.FOUND and {f.rule, f.id} & set(skill.answers)]
    if not own:
        return f"what it answers itself ({', '.join(skill.answers)}) was not found"
    bounds = [f.bound_us for f in own if f.bound_us is not None and f.per == finding.per]
    if not bounds or finding.bound_us is None:  # one without time of its own borrows none: what lends it is a candidate itself
        return finding.bound_us
    return min(finding.bound_us, max(bounds))


def _worth(ctx: ProposeContext, finding: Finding, series: Series) -> float:
    """Bounds of all findings that the series answers; `finding` is its first, bound to what the skill reaches of it."""
    cited = {name for patch in series.patches for name in patch.finding_ids} - {finding.id}
    return (-1.0 if finding.bound_us is None else finding.bound_us) + sum(f.bound_us or 0.0 for f in ctx.findings if f.id in cited)


def _too_little(ctx: ProposeContext, finding: Finding, bound: float) -> str | None:
    """Why all that a series answers is not worth an attempt, or None."""
    token_us = ctx.budget.token_us
    if finding.per != "token" or finding.bound_us is None or not token_us or bound / token_us >= ctx.budget.margin:
        return None
    return f"its bound of {bound:.1f} us is {bound / token_us:.2%} of a token, below the margin of {ctx.budget.margin:.2%}"


def _variants(skill: Skill, entry: Entry | None) -> list[dict[str, Any]]:
    """Parameter sets in the order of trying; those of an accepted entry come first."""
    variants = skill.variants()
    if entry is not None and entry.params:
        first = {**variants[0], **entry.params}
        variants = [first, *(v for v in variants if v != first)]
    return variants


def _entry_for(knowledge: Sequence[Entry], skill: Skill) -> Entry | None:
    """The accepted entry about this skill; one that says it helps nothing outweighs one that says it does."""
    about = [e for e in knowledge if e.mechanism == skill.name]
    return min(about, key=lambda e: (e.helps, e.id)) if about else None


def _blocked(ctx: ProposeContext, finding: Finding, mechanism: str, params: Mapping[str, Any]) -> str | None:
    """Why history forbids this mechanism for this finding, or None."""
    faultless = 0
    for item in ctx.history:
        if item.get("mechanism") != mechanism or finding.id not in item.get("finding_ids", ()):
            continue
        if any(item.get("params", {}).get(name) != value for name, value in params.items()):
            continue
        verdict, reason = item.get("verdict"), item.get("reason") or ""
        where = f"attempt {item.get('attempt', '?')}"
        if verdict == "parked":
            return f"{where} is parked and waits for a person"
        if reason in NOT_ITS_FAULT:
            faultless += 1
            if faultless >= 2:
                return f"{where}: stopped twice by {reason}"
        elif (verdict == "undecided" or reason in NO_EFFECT) and not _much_faster_since(ctx, item):
            return f"{where}: {verdict} ({reason or 'no effect resolved'}), and the step is not much faster since"
        elif verdict == "reject" and reason not in NO_EFFECT:
            return f"{where}: rejected for {reason or 'an unknown reason'}"
    return None


def _much_faster_since(ctx: ProposeContext, item: HistoryItem) -> bool:
    then, now = item.get("token_us"), ctx.budget.token_us
    return bool(then and now and now <= AGAIN_WHEN_FASTER * then)


def _series(ctx: ProposeContext, finding: Finding, rewrites: list[Rewrite], params: Mapping[str, Any]) -> Series | str:
    """Patches of the rewrites, or why they cannot be offered."""
    tried = {h["ast_hash"]: h for h in ctx.history if "ast_hash" in h and h.get("reason") not in NOT_ITS_FAULT}
    if earlier := tried.get(ast_hash(rewrites[-1].after)):
        return f"attempt {earlier.get('attempt', '?')} was this very program ({earlier.get('verdict')})"
    patches: list[Patch] = []
    before = dict(ctx.sources)
    for rewrite in rewrites:
        changed = {f: t for f, t in rewrite.after.items() if before.get(f) != t}
        lines = changed_lines(before, changed)
        if len(changed) > MAX_FILES or lines > MAX_LINES:
            return f"{len(changed)} files and {lines} lines: over the envelope of {MAX_FILES} and {MAX_LINES}"
        for file, text in changed.items():
            if file.endswith(".py"):
                try:
                    compile(text, file, "exec", dont_inherit=True)
                except SyntaxError as error:
                    return f"codemod made {file} line {error.lineno} unparsable: {error.msg}"
        edits = edits_from(before, changed)
        assert apply_edits(before, edits) == rewrite.after  # what is offered is what the codemod made
        patches.append(_patch(ctx, finding, rewrite, edits, params, last=rewrite is rewrites[-1]))
        before = dict(rewrite.after)
    return Series(tuple(patches), Playbook.name)


def _patch(
    ctx: ProposeContext, finding: Finding, rewrite: Rewrite, edits: Any, params: Mapping[str, Any], last: bool
) -> Patch:
    """What it may save: of its finding, and all of those that it answers in passing. Findings share no time, so these add."""
    bound = finding.bound_us if finding.bound_us is not None else 0.0
    predicted = rewrite.predicted_us if rewrite.predicted_us is not None else (bound if last else 0.0)
    predicted = max(0.0, min(predicted, bound))
    others = [f for f in ctx.findings if _answered_too(f, finding, rewrite)]
    return Patch(
        edits=edits,
        finding_ids=(finding.id, *(f.id for f in others)),
        mechanism=rewrite.mechanism,
        predicted_us=predicted + sum(f.bound_us or 0.0 for f in others),
        per=finding.per,
        title=rewrite.title,
        invariants=rewrite.invariants,
        params={**params, **rewrite.params},
        activation=rewrite.activation,
    )


def _answered_too(other: Finding, finding: Finding, rewrite: Rewrite) -> bool:
    named = other.status is Status.FOUND and bool({other.rule, other.id} & set(rewrite.also))
    return named and other.id != finding.id and other.per == finding.per and other.bound_us is not None


def _as_dict(finding: Finding) -> dict[str, Any]:
    return {**dataclasses.asdict(finding), "status": finding.status.value}
