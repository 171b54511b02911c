"""Contradictions in a knowledge file that is mostly prose: the MetaInfer `inference_blueprint.json` shape.

Statements are drawn from the text by pattern (prose_words.py: what is demanded, what is forbidden, numbers and how they are rounded,
counts, references, comparisons, pseudocode) and compared with each other. It finds kinds of contradictions, not
meanings: what it reports a person has to read. Not for: our own entries, which say these things in fields
(check.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.knowledge import prose_words as words
from optimizer.knowledge.check import Kind, Problem
from optimizer.knowledge.loosening import loosens
from optimizer.knowledge.metainfer import FAILURES, PERFORMANCE, find, parse_audit

Path = tuple[str, ...]

@dataclass(frozen=True, slots=True)
class _Said:
    """One statement: `term` is demanded or forbidden at a place, perhaps for one phase only."""

    term: str
    demanded: bool
    phase: str
    path: Path


def check(data: Mapping[str, Any]) -> list[Problem]:
    """Every contradiction that the patterns find, each once."""
    lines = list(_sentences(data))
    found = [
        *_demands(lines, data),
        *_constants(lines, data),
        *_roundings(lines, data),
        *_allowances(lines),
        *_owners(lines),
        *_layouts(lines),
        *_references(lines, data),
        *_targets(data),
        *_counts(lines, data),
        *_comparisons(data),
        *_loosened(lines),
        *_patch_sizes(lines),
        *_disowned(lines),
        *_changing(lines),
        *_code(data),
        *_audits(data),
    ]
    return list(dict.fromkeys(found))


# -- reading ---------------------------------------------------------------------------------------------------


def _walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _walk(value, (*path, str(key)))
    elif isinstance(node, list):
        for n, value in enumerate(node):
            yield from _walk(value, (*path, str(n)))
    else:
        yield path, node


def _sentences(data: Any) -> Iterator[tuple[Path, str]]:
    """Every sentence of prose with its place; lines of pseudocode are no prose."""
    for path, value in _walk(data):
        if isinstance(value, str) and "pseudocode" not in path:
            for sentence in re.split(r"(?<=[.;!?])\s+|[。；\n]", value):
                if sentence.strip():
                    yield path, sentence.strip()


def _pseudocode(data: Any) -> Iterator[tuple[Path, Mapping[str, Any], list[str]]]:
    """(path, node, lines) of every node with pseudocode."""

    def visit(node: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any], list[str]]]:
        if isinstance(node, Mapping):
            if isinstance(node.get("pseudocode"), list):
                yield path, node, [str(x) for x in node["pseudocode"]]
            for key, value in node.items():
                yield from visit(value, (*path, str(key)))
        elif isinstance(node, list):
            for n, value in enumerate(node):
                yield from visit(value, (*path, str(n)))

    return visit(data, ())


def _at(path: Path) -> str:
    return ".".join(path[-3:])


def _phase(text: str) -> str:
    found = [p for p in words.PHASES if p in text.lower()]
    return found[0] if len(found) == 1 else ""


# -- demanded and forbidden ------------------------------------------------------------------------------------


def _demands(lines: list[tuple[Path, str]], data: Any) -> Iterator[Problem]:
    said = [s for path, text in lines for s in _statements(path, text)]
    keyword_only = {m for path, text in lines if words.KEYWORD_ONLY.search(text) for m in words.terms(text)}
    for path, node, code in _pseudocode(data):
        where = _phase(".".join(path) + " " + str(node.get("phase", "")))
        for line in code:
            said += [_Said(name, True, where, path) for name in re.findall(r"\b(\w+_\w*)\s*\(", line)]
            said += [_Said(name, True, where, path) for name, pattern in words.CONCEPTS.items() if pattern.search(line)]
            for name in sorted(keyword_only):
                call = re.search(rf"\b{re.escape(name)}\((.*)\)", line)
                if call and sum("=" not in a for a in call[1].split(",") if a.strip()) >= 2:
                    yield Problem(Kind.DEMANDS_WHAT_IS_FORBIDDEN, (_at(path),), f"calls {name} by position, which another rule allows by keyword only")
    by_term: dict[str, list[_Said]] = defaultdict(list)
    for one in said:
        by_term[one.term].append(one)
    for term, every in by_term.items():
        for no in (s for s in every if not s.demanded):
            for yes in (s for s in every if s.demanded):
                if yes.path != no.path and (not no.phase or not yes.phase or no.phase == yes.phase):
                    yield Problem(Kind.DEMANDS_WHAT_IS_FORBIDDEN, (_at(yes.path), _at(no.path)), f"{term}: demanded here, forbidden there")
                    break


def _statements(path: Path, text: str) -> Iterator[_Said]:
    if reserved := words.only_in(text):
        for name, phase in reserved:
            yield _Said(name, False, next(p for p in words.PHASES if p != phase), path)
            yield _Said(name, True, phase, path)
        return
    phase = _phase(text)
    forbid = words.FORBID.search(text)
    before, after = (text[: forbid.start()], text[forbid.end() :]) if forbid else (text, "")
    if forbid is not None and (words.PASSIVE.search(before) or not words.terms(after)):  # "x is forbidden"
        before, after = "", before
    for term in words.terms(after):
        yield _Said(term, False, phase, path)
    if words.DEMAND.search(before):
        for term in words.terms(before):
            yield _Said(term, True, phase, path)


# -- numbers ---------------------------------------------------------------------------------------------------


def _model(path: Path, text: str) -> str:
    found = re.search(r"qwen|deepseek|llama", ".".join(path) + " " + text, re.I)
    return found[0].lower() if found else ""


def _constants(lines: list[tuple[Path, str]], data: Any) -> Iterator[Problem]:
    values: dict[tuple[str, str], dict[str, Path]] = defaultdict(dict)
    for path, text in lines:
        for name, value in words.constants(text):
            values[_model(path, text), name].setdefault(value, path)
    for path, value in _walk(data):
        if type(value) is int and path and words.NAME_OF_CONSTANT.match(path[-1]):
            values[_model(path, ""), path[-1]].setdefault(str(value), path)
    for (_, name), seen in values.items():
        if len(seen) > 1:
            yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"{name} is {' and '.join(seen)}")


def _roundings(lines: list[tuple[Path, str]], data: Any) -> Iterator[Problem]:
    seen: dict[str, dict[str, Path]] = defaultdict(dict)
    code = [(path, line) for path, _, every in _pseudocode(data) for line in every]
    for path, text in [*lines, *code]:
        for name, way in words.roundings(text):
            seen[name].setdefault(way, path)
    for name, ways in seen.items():
        if len(ways) > 1:
            where = tuple(_at(ways[way]) for way in ("down", "up"))
            yield Problem(Kind.CONSTANT_DISAGREES, where, f"{name} is rounded down and up")


def _allowances(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    seen: dict[int, Path] = {}
    for path, text in lines:
        for count in words.reads(text):
            seen.setdefault(count, path)
    if len(seen) > 1:
        yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"host reads per step: {' and '.join(map(str, sorted(seen)))} allowed")


def _owners(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    owner: dict[str, dict[str, Path]] = defaultdict(dict)
    for path, text in lines:
        which = words.owner(text) if words.WEIGHT.search(text) else ""
        for term in words.terms(text) if which else ():
            owner[term].setdefault(which, path)
    for term, seen in owner.items():
        if len(seen) > 1:
            yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"{term}: weight of the own layer, and of the next")


def _layouts(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    seen: dict[str, Path] = {}
    for path, text in lines:
        for word in words.layouts(text):
            seen.setdefault(word, path)
    if len(seen) > 1:
        yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), "the KV cache is contiguous in one place and paged in another")


def _counts(lines: list[tuple[Path, str]], data: Any) -> Iterator[Problem]:
    scripts = {v for path, v in _walk(data) if path and path[-1] == "file" and "scripts" in path}
    modes = len((find(data, FAILURES) or {}).get("entries", []))
    for path, text in lines:
        for claimed in ("".join(groups) for groups in words.SCRIPTS.findall(text)):
            if scripts and int(claimed) != len(scripts):
                yield Problem(Kind.COUNT_DISAGREES, (_at(path),), f"says {claimed} scripts; {len(scripts)} are registered")
        for claimed in ("".join(groups) for groups in words.MODES.findall(text)):
            if modes and int(claimed) != modes:
                yield Problem(Kind.COUNT_DISAGREES, (_at(path),), f"says {claimed} failure modes; the library has {modes}")


def _patch_sizes(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    seen: dict[tuple[str, str], Path] = {}
    for path, text in lines:
        for size in words.patch_sizes(text):
            seen.setdefault(size, path)
    if len(seen) > 1:
        sizes = " and ".join(f"+{a}/-{b}" for a, b in seen)
        yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"the patch has {sizes} lines")


# -- references and comparisons --------------------------------------------------------------------------------


def _references(lines: list[tuple[Path, str]], data: Any) -> Iterator[Problem]:
    known = {m[1].upper() for key in (find(data, PERFORMANCE) or {}) if (m := re.match(r"^([OoPp]\d+)_", key))}
    if not known:
        return
    for path, text in lines:
        if path[: len(PERFORMANCE)] == PERFORMANCE:
            continue
        named = set(re.findall(r"\b([OP]\d)\b", text)) - known
        if named:
            yield Problem(Kind.UNKNOWN_REFERENCE, (_at(path),), f"names {', '.join(sorted(named))}; the rules are {', '.join(sorted(known))}")


def _targets(data: Any) -> Iterator[Problem]:
    """Throughput targets of one phase for different numbers of GPUs."""
    playbook = find(data, ("framework_layer", "todo_generation_playbook")) or {}
    for name, phase in playbook.items():
        seen: dict[str, Path] = {}
        for path, text in _sentences(phase):
            for setup in sorted(words.setups(text)) if _is_target(path, text) else ():
                seen.setdefault(setup, (name, *path))
        if len(seen) > 1:
            yield Problem(Kind.CONSTANT_NEEDS_NARROWER_SCOPE, tuple(map(_at, seen.values())), f"throughput targets for {' and '.join(seen)} in one phase")


def _is_target(path: Path, text: str) -> bool:
    return words.SPEED.search(text) is not None


def _comparisons(data: Any) -> Iterator[Problem]:
    """Speeds of different setups in one text, as if they were of one."""
    for path, text in _walk(data):
        found = words.setups(text) if isinstance(text, str) and len(words.SPEED.findall(text)) >= 2 else set()
        if len(found) >= 2:
            yield Problem(Kind.COMPARES_UNLIKE, (_at(path),), f"compares speeds of {' and '.join(sorted(found))}")


def _loosened(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    for path, text in lines:
        if said := loosens(text):
            yield Problem(Kind.LOOSENS_A_GATE, (_at(path),), f"{said!r}: knowledge never loosens a gate")


def _disowned(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    disowned = {name: path for path, text in lines if words.DISOWNED.search(text) for name in words.names(text)}
    for path, text in lines:
        for name in set(words.names(text)) & set(disowned):
            if disowned[name] != path and not words.DISOWNED.search(text):
                yield Problem(Kind.DISOWNED_EVIDENCE, (_at(path), _at(disowned[name])), f"rests on {name}, which is called untraceable there")


def _changing(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    """A constant for a quantity that changes while the engine runs."""
    for path, text in lines:
        if words.fixes_a_changing_count(text):
            yield Problem(Kind.CONSTANT_NEEDS_NARROWER_SCOPE, (_at(path),), "a constant for a count that changes: nothing can be refused any more")


# -- pseudocode and audits -------------------------------------------------------------------------------------


def _code(data: Any) -> Iterator[Problem]:
    for path, _, code in _pseudocode(data):
        copies = {m[2]: m[1] for line in code if (m := re.match(r"\s*(\w+)\s*=\s*(\w+)\.contiguous\(\)", line))}
        calls = [line for line in code if re.match(r"\s*[\w.]+\(", line) and not line.lstrip().startswith("return")]  # nothing keeps what they return
        inside = {name: f"{name}.contiguous()" for line in calls for name in re.findall(r"\b(\w+)\.contiguous\(\)", line)}
        for original, copy in {**inside, **copies}.items():
            if copy == original:
                continue
            in_place = any(re.search(rf"\(.*\b{re.escape(copy)}", line) for line in calls)
            gives_back = any(re.match(rf"\s*return\b.*\b{original}\b", line) for line in code)
            if in_place and gives_back:
                yield Problem(Kind.FAULTY_CODE, (_at(path),), f"changes {copy} in place, which may be a copy, and returns {original}")


def _audits(data: Any) -> Iterator[Problem]:
    rules: Iterable[tuple[str, Any]] = (find(data, PERFORMANCE) or {}).items()
    for key, node in rules:
        audit = parse_audit(str(node.get("audit_check", ""))) if isinstance(node, Mapping) else None
        if audit is None or audit.most is None:
            continue
        for path, held, code in _pseudocode(data):
            file = str(held.get("file", ""))
            hits = sum(len(re.findall(audit.pattern, line)) for line in code)
            mine = any(file.endswith(name.rpartition("/")[2]) for name in audit.files) if file else False
            if mine and not audit.least <= hits <= audit.most:
                yield Problem(Kind.AUDIT_FAILS_ON_ITS_EVIDENCE, (key, _at(path)), f"{audit.pattern!r} is there {hits} times in its own reference")
            if file and not mine and audit.most == 0 and hits:
                yield Problem(Kind.AUDIT_MISSES_FILES, (key, _at(path)), f"{audit.pattern!r} is also in {file}, which the audit does not read")
