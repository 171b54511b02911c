"""Skill folders: read their front matter, load their codemods, run one on source texts.

A folder with a SKILL.md is a skill (Agent Skills format); a codemod.py makes it mechanical. Codemods run in
this process, so only reviewed folders are loaded: the repository's own, and those named with --trust-skills.
Not for: choosing a skill (playbook.py).
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

BUILT_IN = Path(__file__).resolve().parents[2] / "skills"
TOOLS = ("codemod_tools", "gpu_tools")  # modules that codemods may import besides libcst; each only those before it


class SkillError(Exception):
    """A skill folder that breaks the format; the message names folder and field."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One folder. `answers` are finding rules, `params` the values its codemod can be tried with, best first."""

    name: str
    description: str
    path: Path
    text: str  # SKILL.md without the front matter
    answers: tuple[str, ...] = ()
    enablers: tuple[str, ...] = ()  # skills that make this one possible: tried before it, in one series
    metadata: Mapping[str, Any] = field(default_factory=dict)
    codemod: Callable[[dict[str, str], dict[str, Any]], Any] | None = None
    params: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices on which it can act; both where it does not say."""
        return tuple(str(self.metadata.get("devices") or "cpu cuda").split())

    def variants(self) -> list[dict[str, Any]]:
        """Every combination of parameters; the first is the skill's own choice."""
        names = list(self.params)
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*self.params.values())]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What a codemod made of the sources: one patch of a series."""

    after: dict[str, str]  # all sources, changed ones replaced
    mechanism: str
    predicted_us: float | None
    invariants: tuple[str, ...]
    params: dict[str, Any]
    activation: dict[str, Any] | None
    title: str
    also: tuple[str, ...] = ()  # rules or ids of further findings that it answers, where they were found


def load_all(folders: Iterable[Path] = (BUILT_IN,)) -> dict[str, Skill]:
    """Skills by name. Raises SkillError on a broken folder or a name that is there twice."""
    skills: dict[str, Skill] = {}
    for folder in folders:
        if not folder.is_dir():
            raise SkillError(f"{folder}: no such folder of skills")
        for path in sorted(p.parent for p in folder.glob("*/SKILL.md")):
            skill = load(path)
            if skill.name in skills:
                raise SkillError(f"{path}: the name {skill.name!r} is already used by {skills[skill.name].path}")
            skills[skill.name] = skill
    return skills


def load(path: Path) -> Skill:
    """One folder; see the module docstring for the format."""
    text = (path / "SKILL.md").read_text(encoding="utf-8")
    head, body = _front_matter(path, text)
    name, description = head.get("name"), head.get("description")
    if not isinstance(name, str) or name != path.name or not isinstance(description, str) or not description.strip():
        raise SkillError(f"{path}/SKILL.md: `name` must be {path.name!r} and `description` must say what it is for")
    metadata = head.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise SkillError(f"{path}/SKILL.md: `metadata` must be a mapping")
    codemod, params = _load_codemod(path)
    return Skill(
        name=name,
        description=description.strip(),
        path=path,
        text=body,
        answers=_names(metadata.get("answers", "")),
        enablers=_names(metadata.get("enablers", "")),
        metadata=metadata,
        codemod=codemod,
        params=params,
    )


def _names(value: Any) -> tuple[str, ...]:
    """A list of names, written as one or as words."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else tuple(map(str, value))


def _front_matter(path: Path, text: str) -> tuple[dict[str, Any], str]:
    parts = text.split("---\n", 2)
    if len(parts) != 3 or parts[0].strip():
        raise SkillError(f"{path}/SKILL.md: must start with front matter between two lines of ---")
    try:
        head = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise SkillError(f"{path}/SKILL.md: front matter is not YAML: {error}") from error
    if not isinstance(head, dict):
        raise SkillError(f"{path}/SKILL.md: front matter must be a mapping")
    return head, parts[2]


def _load_codemod(path: Path) -> tuple[Callable[..., Any] | None, dict[str, tuple[Any, ...]]]:
    file = path / "codemod.py"
    if not file.is_file():
        return None, {}
    for tools in TOOLS:
        if tools not in sys.modules:
            _load_module(tools, BUILT_IN / f"{tools}.py")
    module = _load_module(f"hotloop_skill_{path.name.replace('-', '_')}", file)
    if not callable(getattr(module, "propose", None)):
        raise SkillError(f"{file}: has no function `propose(sources, finding)`")
    params = getattr(module, "PARAMS", {})
    return module.propose, {name: tuple(values) for name, values in params.items()}


def _load_module(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise SkillError(f"{file}: cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def run(skill: Skill, sources: Mapping[str, str], finding: dict[str, Any]) -> list[Rewrite] | str:
    """The skill's rewrites of `sources` in order, or the reason why there is none. Never raises for odd code."""
    if skill.codemod is None:
        return "not mechanical: SKILL.md only"
    try:
        answer = skill.codemod(dict(sources), dict(finding))
    except Exception as error:  # noqa: BLE001  (foreign code on foreign sources: a crash is a decline with its reason)
        return f"codemod failed: {type(error).__name__}: {error}"
    if answer is None:
        return "the pattern is not there"
    if isinstance(answer, dict) and "declined" in answer:
        return str(answer["declined"])
    rewrites: list[Rewrite] = []
    before = dict(sources)
    for step in answer if isinstance(answer, list) else [answer]:
        after = {**before, **step["sources"]}
        if after == before:
            return "changes nothing"
        rewrites.append(
            Rewrite(
                after=after,
                mechanism=step.get("mechanism", skill.name),
                predicted_us=step.get("predicted_us"),
                invariants=tuple(step.get("invariants", ())),
                params=dict(step.get("params", {})),
                activation=step.get("activation"),
                title=step.get("title", skill.description.split(". ")[0]),
                also=tuple(step.get("also", ())),
            )
        )
        before = after
    return rewrites or "the pattern is not there"
