"""Contradictions in a knowledge file that is mostly prose: the MetaInfer `inference_blueprint.json` shape.

Statements are drawn from the text by pattern (what is demanded, what is forbidden, numbers and how they are rounded,
counts, references, comparisons, pseudocode) and compared with each other. It finds kinds of contradictions, not
meanings: what it reports a person has to read. Not for: our own entries, which say these things in fields
(blueprint_check.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.knowledge.check import Kind, Problem
from optimizer.knowledge.metainfer import FAILURES, PERFORMANCE, find, parse_audit

Path = tuple[str, ...]
_FORBID = re.compile(r"\b(forbid\w*|must not|never|do not|don't|avoid\w*|banned|not allowed|prohibit\w*|instead of|rather than|, not)\b|禁止|不得|不要|不允许", re.I)
_DEMAND = re.compile(r"\b(use|uses|prefer\w*|recommend\w*|must|should|mandatory|require\w*|allocate\w*|apply|capture\w*|goes through)\b|必须|使用|建议|强制", re.I)
_CODE = re.compile(r"`([^`]+)`|\b([A-Za-z]\w*_\w*)\b")
_ONLY_IN = re.compile(r"`?\b(\w+_\w*)\b`?\s+(?:belongs |stays )?only (?:in|for|to) (decode|prefill)", re.I)
_CONCEPTS = {
    "CUDA graphs": re.compile(r"cuda[ _-]?graphs?", re.I),
    "allocating the whole cache": re.compile(r"(full|whole|complete)[ -](max_blocks )?(kv )?(cache )?allocation|\((?:self\.)?max_blocks\b", re.I),
}
_PHASES = ("prefill", "decode")
_CONSTANT = re.compile(r"\b([a-z]+(?:_[a-z0-9]+)+)\b\s*(?:==|=|:|is|为)\s*(\d[\d,]*)(?![\d.]*\s*(?:tok|ms|us|%))")
_FORMULA = re.compile(r"\b([a-z]+(?:_[a-z0-9]+)+)\s*=\s*([^;\n]*(?://|ceil|-\(-)[^;\n]*)")
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*tok/s", re.I)
_SETUP = re.compile(r"single[ -]GPU|one GPU|1 GPU|TP ?= ?\d+|\d+ GPUs", re.I)
_WORDS = {"no": 0, "none": 0, "zero": 0, "0": 0, "one": 1, "single": 1, "1": 1}
_READS = re.compile(r"\b(no|none|zero|0|one|single|1)\b[^.;]{0,40}\b(item|host read)s?\b", re.I)
_PATCH = re.compile(r"\+(\d+)\s*/\s*[-−–](\d+)")
_DISOWNED = re.compile(r"\b(untraceable|not traceable|disown\w*|cannot be (?:reproduced|traced))\b", re.I)
_NAMES = re.compile(r"\b(ROUND_\w+|[\w/]+\.(?:md|json)|[0-9a-f]{7,40})\b")


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
        *_constants(lines),
        *_allowances(lines),
        *_owners(lines),
        *_layouts(lines),
        *_references(lines, data),
        *_targets(data),
        *_counts(lines, data),
        *_comparisons(lines),
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
    found = [p for p in _PHASES if p in text.lower()]
    return found[0] if len(found) == 1 else ""


# -- demanded and forbidden ------------------------------------------------------------------------------------


def _demands(lines: list[tuple[Path, str]], data: Any) -> Iterator[Problem]:
    said = [s for path, text in lines for s in _statements(path, text)]
    keyword_only = {m for path, text in lines if re.search(r"\bkeyword", text, re.I) for m in _terms(text)}
    for path, node, code in _pseudocode(data):
        where = _phase(".".join(path) + " " + str(node.get("phase", "")))
        for line in code:
            said += [_Said(name, True, where, path) for name in re.findall(r"\b(\w+_\w*)\s*\(", line)]
            said += [_Said(name, True, where, path) for name, pattern in _CONCEPTS.items() if pattern.search(line)]
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


def _terms(text: str) -> list[str]:
    return [(a or b).rstrip("()") for a, b in _CODE.findall(text)] + [n for n, p in _CONCEPTS.items() if p.search(text)]


def _statements(path: Path, text: str) -> Iterator[_Said]:
    for name, phase in _ONLY_IN.findall(text):
        other = next(p for p in _PHASES if p != phase.lower())
        yield _Said(name, False, other, path)
        yield _Said(name, True, phase.lower(), path)
        return
    phase = _phase(text)
    forbid = _FORBID.search(text)
    before, after = (text[: forbid.start()], text[forbid.end() :]) if forbid else (text, "")
    passive = forbid is not None and re.search(r"\b(is|are|was)\s+(strictly )?$", before, re.I) is not None  # "x is forbidden"
    if passive:
        before, after = "", before
    for term in _terms(after):
        yield _Said(term, False, phase, path)
    if _DEMAND.search(before):
        for term in _terms(before):
            yield _Said(term, True, phase, path)


# -- numbers ---------------------------------------------------------------------------------------------------


def _model(path: Path, text: str) -> str:
    found = re.search(r"qwen|deepseek|llama", ".".join(path) + " " + text, re.I)
    return found[0].lower() if found else ""


def _constants(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    values: dict[tuple[str, str], dict[str, Path]] = defaultdict(dict)
    rounding: dict[str, dict[str, Path]] = defaultdict(dict)
    for path, text in lines:
        for name, value in _CONSTANT.findall(text):
            values[_model(path, text), name].setdefault(value.replace(",", ""), path)
        for name, formula in _FORMULA.findall(text):
            up = re.search(r"ceil|-\(-|- 1\)\s*//", formula)
            rounding[name].setdefault("up" if up else "down", path)
    for (_, name), seen in values.items():
        if len(seen) > 1:
            yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"{name} is {' and '.join(seen)}")
    for name, seen in rounding.items():
        if len(seen) > 1:
            yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"{name} is rounded {' and '.join(seen)}")


def _allowances(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    seen: dict[int, Path] = {}
    for path, text in lines:
        for word, _ in _READS.findall(text):
            seen.setdefault(_WORDS[word.lower()], path)
    if len(seen) > 1:
        yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"host reads per step: {' and '.join(map(str, sorted(seen)))} allowed")


def _owners(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    owner: dict[str, dict[str, Path]] = defaultdict(dict)
    for path, text in lines:
        which = "next" if re.search(r"next layer", text, re.I) else "own" if re.search(r"(own|same) layer", text, re.I) else ""
        for term in _terms(text) if which and "weight" in text else ():
            owner[term].setdefault(which, path)
    for term, seen in owner.items():
        if len(seen) > 1:
            yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), f"{term}: weight of the own layer, and of the next")


def _layouts(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    seen: dict[str, Path] = {}
    for path, text in lines:
        if re.search(r"kv[ -]?cache", text, re.I):
            for word in ("contiguous", "paged"):
                if re.search(rf"\b(is|as|stays)\s+(a\s+)?{word}\b", text, re.I):
                    seen.setdefault(word, path)
    if len(seen) > 1:
        yield Problem(Kind.CONSTANT_DISAGREES, tuple(map(_at, seen.values())), "the KV cache is contiguous in one place and paged in another")


def _counts(lines: list[tuple[Path, str]], data: Any) -> Iterator[Problem]:
    scripts = {v for path, v in _walk(data) if path and path[-1] == "file" and "scripts" in path}
    modes = len((find(data, FAILURES) or {}).get("entries", []))
    for path, text in lines:
        for claimed in re.findall(r"\b(\d+)\s+(?:test |gate )?scripts\b", text):
            if scripts and int(claimed) != len(scripts):
                yield Problem(Kind.COUNT_DISAGREES, (_at(path),), f"says {claimed} scripts; {len(scripts)} are registered")
        for claimed in re.findall(r"\b\d+\s*/\s*(\d+)\s+(?:FM|failure modes)\b", text):
            if modes and int(claimed) != modes:
                yield Problem(Kind.COUNT_DISAGREES, (_at(path),), f"says {claimed} failure modes; the library has {modes}")


def _patch_sizes(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    seen: dict[tuple[str, str], Path] = {}
    for path, text in lines:
        for size in _PATCH.findall(text):
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
            for setup in _SETUP.findall(text) if _SPEED.search(text) else ():
                seen.setdefault(setup.lower().replace(" ", ""), (name, *path))
        if len(seen) > 1:
            yield Problem(Kind.CONSTANT_NEEDS_NARROWER_SCOPE, tuple(map(_at, seen.values())), f"throughput targets for {' and '.join(seen)} in one phase")


def _comparisons(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    for path, text in lines:
        setups = {s.lower().replace(" ", "") for s in _SETUP.findall(text)}
        if len(_SPEED.findall(text)) >= 2 and len(setups) >= 2:
            yield Problem(Kind.COMPARES_UNLIKE, (_at(path),), f"compares speeds of {' and '.join(sorted(setups))}")


def _disowned(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    disowned = {name: path for path, text in lines if _DISOWNED.search(text) for name in _NAMES.findall(text)}
    for path, text in lines:
        for name in set(_NAMES.findall(text)) & set(disowned):
            if disowned[name] != path and not _DISOWNED.search(text):
                yield Problem(Kind.DISOWNED_EVIDENCE, (_at(path), _at(disowned[name])), f"rests on {name}, which is called untraceable there")


def _changing(lines: list[tuple[Path, str]]) -> Iterator[Problem]:
    """A constant for a quantity that changes while the engine runs."""
    for path, text in lines:
        if re.search(r"\bconstant\b|\bfixed number\b|常量", text, re.I) and re.search(r"\b(num_)?(free|available|remaining)[ _-]?(block|page|slot)s?", text, re.I):
            yield Problem(Kind.CONSTANT_NEEDS_NARROWER_SCOPE, (_at(path),), "a constant for a count that changes: nothing can be refused any more")


# -- pseudocode and audits -------------------------------------------------------------------------------------


def _code(data: Any) -> Iterator[Problem]:
    for path, _, code in _pseudocode(data):
        copies = {m[2]: m[1] for line in code if (m := re.match(r"\s*(\w+)\s*=\s*(\w+)\.contiguous\(\)", line))}
        for original, copy in copies.items():
            if copy == original:
                continue
            in_place = any(re.search(rf"\b\w+\(.*\b{copy}\b.*\)", line) and "=" not in line for line in code)
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
