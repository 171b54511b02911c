"""The tools that a model or a coding agent gets: read-only looks at the case, a dry run, and one way to submit.

One implementation serves the Claude proposer and the MCP server. Nothing here runs the benchmark, writes outside
memory, or knows gates' data. Not for: talking to anyone (claude.py, mcp_server.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optimizer.patching import (
    EditMismatch,
    apply_edits,
    ast_hash,
    changed_lines,
    edits_from,
    functions,
    replace_function,
)
from optimizer.runrepo import matches
from optimizer.types import Edit, Patch, Series
from trace_diff.types import Finding, Status

from . import skillbook
from .base import MAX_FILES, MAX_LINES, ProposeContext

MAX_HITS, MAX_ROWS, MAX_CHARS = 80, 25, 24_000


class ToolError(Exception):
    """An answer that tells the caller what was wrong with the call; nothing was changed."""


@dataclass(slots=True)
class Toolbox:
    """Tools over one context. `try_out(sources)` starts the engine briefly and returns what went wrong, or None."""

    ctx: ProposeContext
    skills: Mapping[str, skillbook.Skill]
    proposer: str
    submitted: Series | None = None
    failed_edits: int = 0
    _tools: dict[str, Callable[..., str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tools = {name: getattr(self, name) for name in SCHEMAS}

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool by name. Raises ToolError with a message for the caller."""
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(f"no tool {name!r}; there are: {', '.join(self._tools)}")
        wanted = set(SCHEMAS[name]["properties"])
        if unknown := set(arguments) - wanted:
            raise ToolError(f"{name} does not take {', '.join(sorted(unknown))}")
        if missing := set(SCHEMAS[name]["required"]) - set(arguments):
            raise ToolError(f"{name} needs {', '.join(sorted(missing))}")
        try:
            return tool(**arguments)[:MAX_CHARS]
        except (TypeError, AttributeError, KeyError) as error:
            raise ToolError(f"{name}: arguments are not of the declared types: {error}") from error

    # -- looking ---------------------------------------------------------------------------------------------

    def list_findings(self) -> str:
        """Found ones in the order given, dearest first; then, in one line, what was looked for and not found."""
        rows = [_row(f) for f in self.ctx.findings if f.status is Status.FOUND]
        other = [f"{f.id} ({f.status.value})" for f in self.ctx.findings if f.status is not Status.FOUND]
        budget = self.ctx.budget
        now = None if budget.token_us is None else round(budget.token_us, 1)
        head = {"incumbent_us_per_token": now, "smallest_gain_that_counts": round(budget.margin, 4), "findings": rows[:MAX_ROWS]}
        return json.dumps({**head, "not_found": other}, indent=1)

    def explain(self, finding_id: str) -> str:
        f = self._finding(finding_id)
        evidence = [dict(row) for row in f.evidence[:MAX_ROWS]]
        detail = {**_row(f), "formula": f.formula, "evidence": evidence, "notes": f.notes, "inferred": f.inferred, "missing": f.missing}
        return json.dumps(detail, indent=1, default=str)

    def read_code(self, file: str, first_line: int, last_line: int) -> str:
        lines = self._file(file).splitlines()
        last = last_line or len(lines)
        numbered = (f"{n:5d}  {line}" for n, line in enumerate(lines, 1) if first_line <= n <= last)
        return "\n".join(numbered) or f"{file} has {len(lines)} lines"

    def search_code(self, pattern: str) -> str:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ToolError(f"not a regular expression: {error}") from error
        hits = [
            f"{file}:{n}: {line.strip()[:160]}"
            for file, text in sorted(self.ctx.sources.items())
            for n, line in enumerate(text.splitlines(), 1)
            if wanted.search(line)
        ]
        return "\n".join(hits[:MAX_HITS]) + (f"\n({len(hits) - MAX_HITS} more)" if len(hits) > MAX_HITS else "") or "no match"

    def list_skills(self) -> str:
        rows = [
            {"name": s.name, "description": s.description, "answers": list(s.answers), "mechanical": s.codemod is not None}
            for s in self.skills.values()
        ]
        return json.dumps(rows, indent=1)

    def read_skill(self, name: str) -> str:
        if name not in self.skills:
            raise ToolError(f"no skill {name!r}; there are: {', '.join(sorted(self.skills))}")
        return self.skills[name].text

    def knowledge(self) -> str:
        keep = {
            *("id", "mechanism", "title", "rule", "why", "helps", "role", "gain", "detection", "preconditions", "pitfalls"),
            *("failed_variants", "remaining_gaps", "conflicts_with", "params", "source_refs"),
        }
        rows = [e.model_dump(mode="json", include=keep, exclude_defaults=True) for e in self.ctx.knowledge]
        for row in rows:
            if "source_refs" in row:
                row["ask_first"] = "does the path that source_refs names exist here, and if so, why is it off?"
        return json.dumps(rows, indent=1) if rows else "no accepted entry speaks about exactly this engine, model and machine"

    def history(self) -> str:
        lines = [json.dumps(_attempt(dict(h)), sort_keys=True) for h in self.ctx.history]
        return "\n".join(lines[-40:]) or "no attempt so far"

    # -- doing -----------------------------------------------------------------------------------------------

    def dry_run(self, edits: list[dict[str, str]], functions: list[dict[str, str]]) -> str:
        """Applies, parses, passes the source rules, starts: what the first gates will see, without spending alpha."""
        after = self._after(dict(self.ctx.sources), edits, functions)
        changed = {f: t for f, t in after.items() if self.ctx.sources.get(f) != t}
        notes = [f"{len(changed)} files, {changed_lines(self.ctx.sources, changed)} changed lines"]
        notes += self._objections(dict(self.ctx.sources), after)
        if len(notes) == 1 and self.ctx.try_out is not None:
            wrong = self.ctx.try_out(after)
            notes.append(f"does not run: {wrong}" if wrong else "starts and answers a short request on a CPU")
        return "\n".join(notes if len(notes) > 1 else [*notes, "applies and parses"])

    def submit_patch(self, patches: list[dict[str, Any]]) -> str:
        """Hand a series in; the last call of a conversation. Checked as dry_run does; kept whole or not at all."""
        if not patches:
            raise ToolError("a series needs at least one patch")
        made: list[Patch] = []
        sources = dict(self.ctx.sources)
        for number, raw in enumerate(patches, 1):
            after = self._after(sources, raw["edits"], raw["functions"])
            if problems := self._objections(sources, after):
                raise ToolError(f"patch {number}: " + "; ".join(problems))
            made.append(self._patch(raw, sources, after))
            sources = after
        tried = {h["ast_hash"]: h for h in self.ctx.history if "ast_hash" in h}
        if earlier := tried.get(ast_hash(sources)):
            raise ToolError(f"attempt {earlier.get('attempt')} was this very program ({earlier.get('verdict')}); change something")
        self.submitted = Series(tuple(made), self.proposer)
        return f"submitted {len(made)} patch(es); the verdict comes with the next attempt's history"

    def _patch(self, raw: Mapping[str, Any], before: dict[str, str], after: dict[str, str]) -> Patch:
        ids = tuple(raw["finding_ids"])
        found = [self._finding(i) for i in ids]
        if not found:
            raise ToolError("a patch cites at least one finding")
        bounds = [f.bound_us for f in found if f.bound_us is not None and f.per == raw["per"]]
        predicted = float(raw["predicted_us"])
        if bounds and predicted > sum(bounds):
            raise ToolError(f"predicted {predicted:g} us is above the bound of {sum(bounds):g} us of {', '.join(ids)}")
        changed = {f: t for f, t in after.items() if before.get(f) != t}
        return Patch(
            edits=edits_from(before, changed),
            finding_ids=ids,
            mechanism=re.sub(r"[^a-z0-9-]+", "-", str(raw["mechanism"]).lower()).strip("-")[:60] or "unnamed",
            predicted_us=predicted,
            per=str(raw["per"]),
            title=str(raw["title"])[:120],
            invariants=tuple(map(str, raw["invariants"])),
            risk=str(raw["risk"])[:500],
        )

    def _after(self, sources: dict[str, str], edits: list[dict[str, str]], new: list[dict[str, str]]) -> dict[str, str]:
        """Sources after edits and whole-function replacements. Raises ToolError with the nearest region."""
        try:
            after = apply_edits(sources, [Edit(e["file"], e["old"], e["new"]) for e in edits])
            for item in new:
                after = apply_edits(after, replace_function(after, item["file"], item["name"], item["source"]))
        except (EditMismatch, ValueError) as error:
            self.failed_edits += 1
            hint = ""
            if self.failed_edits >= 2:
                names = {e["file"]: functions(sources[e["file"]]) for e in edits if e.get("file") in sources}
                hint = f"\nReplace whole functions instead (`functions`, by qualified name): {json.dumps(names)}"
            raise ToolError(f"{error}{hint}") from error
        return after

    def _objections(self, before: dict[str, str], after: dict[str, str]) -> list[str]:
        """What the envelope and the source rules will say."""
        from ..gates.policy import new_findings

        changed = {f: t for f, t in after.items() if before.get(f) != t}
        lines = changed_lines(before, changed)
        found = ["changes nothing"] if not changed else []
        if len(changed) > MAX_FILES or lines > MAX_LINES:
            found.append(f"{len(changed)} files and {lines} changed lines: a patch may have {MAX_FILES} and {MAX_LINES}; make it a series")
        for file, text in changed.items():
            if matches(file, self.ctx.frozen):
                found.append(f"{file} is frozen")
                continue
            if not file.endswith(".py"):
                found.append(f"{file}: only .py files may be added or changed")
                continue
            try:
                compile(text, file, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                found.append(f"{file}: {error}")
        if not found:
            found += [f"{f}:{p.line}: {p.what}: {p.why} ({p.action})" for f, p in new_findings({f: before.get(f, "") for f in changed}, changed)]
        return found

    def _finding(self, name: str) -> Finding:
        for f in self.ctx.findings:
            if f.id == name:
                return f
        raise ToolError(f"no finding {name!r}; there are: {', '.join(f.id for f in self.ctx.findings if f.status is Status.FOUND)}")

    def _file(self, file: str) -> str:
        if file not in self.ctx.sources:
            raise ToolError(f"no file {file!r}; there are: {', '.join(sorted(self.ctx.sources))}")
        return self.ctx.sources[file]


def _row(f: Finding) -> dict[str, Any]:
    bound = None if f.bound_us is None else round(f.bound_us, 1)
    return {"id": f.id, "title": f.title, "bound_us": bound, "per": f.per, "skills": list(f.skills)}


def _attempt(item: dict[str, Any]) -> dict[str, Any]:
    keep = ("attempt", "verdict", "reason", "stage", "detail", "mechanism", "finding_ids", "predicted_us", "measured_ratio_ci95")
    return {k: item[k] for k in keep if item.get(k) not in (None, "")}


def finish(series: Series, usd: float, exchange: str | None) -> Series:
    """The series with what it cost and where the conversation is."""
    return replace(series, usd=usd, exchange=exchange)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_EDITS = {
    "type": "array",
    "description": "exact search and replace; each `old` must be in its file exactly once; empty `old` creates the file",
    "items": _object(file=_text("path as listed"), old=_text("text as it is now"), new=_text("text to put there")),
}
_FUNCTIONS = {
    "type": "array",
    "description": "whole functions to replace, after the edits; usually empty",
    "items": _object(file=_text("path as listed"), name=_text("qualified name: Class.method or function"), source=_text("the whole definition")),
}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_PATCH = _object(
    edits=_EDITS,
    functions=_FUNCTIONS,
    finding_ids={**_STRINGS, "description": "findings that the patch answers"},
    mechanism=_text("a short slug: the skill's name where one is followed"),
    title=_text("one line for the commit"),
    predicted_us={"type": "number", "description": "wall microseconds saved on the slowest rank, at most the findings' bound"},
    per={"type": "string", "enum": ["token", "request"]},
    risk=_text("what could go wrong"),
    invariants={**_STRINGS, "description": "what must stay true"},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "list_findings": _object(),
    "explain": _object(finding_id=_text("an id of list_findings")),
    "read_code": _object(file=_text("path as listed"), first_line={"type": "integer"}, last_line={"type": "integer", "description": "0: to the end"}),
    "search_code": _object(pattern=_text("Python regular expression, matched line by line")),
    "list_skills": _object(),
    "read_skill": _object(name=_text("a skill's name")),
    "knowledge": _object(),
    "history": _object(),
    "dry_run": _object(edits=_EDITS, functions=_FUNCTIONS),
    "submit_patch": _object(patches={"type": "array", "items": _PATCH, "description": "usually one; several where only the end pays"}),
}
DESCRIPTIONS = {
    "list_findings": "What costs time in the incumbent's decode step, dearest first, with an upper bound of what a fix could save.",
    "explain": "One finding in full: formula, evidence rows with counts and call sites, what the reference engine does.",
    "read_code": "Lines of a source file, numbered.",
    "search_code": "Search all editable source files.",
    "list_skills": "Known optimisations, what they answer, whether a codemod exists.",
    "read_skill": "Signature, preconditions, steps, pitfalls and audit of one skill.",
    "knowledge": "What a person accepted as known about exactly this engine, model and machine.",
    "history": "Earlier attempts of this run, one line each, with verdict and measured interval.",
    "dry_run": "Check an edit without submitting it: applies, parses, passes source rules, starts. Not timed.",
    "submit_patch": "Submit the patch (or series). It is then judged and measured; you see the verdict in `history`.",
}
