"""`optimize init` and `optimize check`: draft a target.toml for someone's own engine, and say what it still lacks.

Not for: judging an engine's output or speed; `check` looks at files and, when asked to start it, at its endpoints.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from optimizer.runrepo import SnapshotError, matches, snapshot_files
from optimizer.target import FILE, TargetError, load_target
from optimizer.types import Target

_DRAFT = """\
# Drafted by `optimize init`. `optimize check {directory}` says what is still missing.
schema = 1
name = {name}
root = {root}   # paths below are relative to this; the snapshot holds only the folder this file is in
# The command that starts the engine. It must serve the vLLM subset of HTTP on the Unix socket {{socket}} (see
# docs/first-hour.md), read its weights from {{model_dir}}, and write one Kineto trace per rank to {{trace_dir}} on /stop_profile.
serve = ["{{python}}", "-I", "-B", "{{launcher}}", {module}, "--model", "{{model_dir}}", "--tp", "{{tp}}",
         "--device", "{{device}}", "--uds", "{{socket}}", "--trace-dir", "{{trace_dir}}"]
editable = [{editable}]
frozen = [{frozen}]
devices = ["cpu", "cuda"]
tp = [1]
dtype = {{ cpu = "float32", cuda = "bfloat16" }}
start_timeout_s = 120
"""


def draft(directory: Path) -> Path:
    """Write `directory/target.toml` with what can be guessed. Raises TargetError when there is one already."""
    directory = Path(directory).resolve()
    if not directory.is_dir():
        raise TargetError(f"no such folder: {directory}")
    path = directory / FILE
    if path.exists():
        raise TargetError(f"{path} exists already; `optimize check {directory}` looks at it")
    package = (directory / "__init__.py").is_file()
    prefix = f"{directory.name}/" if package else ""
    module = _entry(directory, package)
    text = _DRAFT.format(
        directory=directory,
        name=json.dumps(directory.name),
        root=json.dumps(".." if package else "."),
        module=json.dumps(module),
        editable=json.dumps(f"{prefix}**/*.py"),
        frozen=json.dumps(f"{prefix}{FILE}"),
    )
    path.write_text(text, "utf-8")
    return path


def _entry(directory: Path, package: bool) -> str:
    """The module that looks most like the server's entry point."""
    names = ("serve", "server", "api_server", "main", "app", "__main__")
    found = next((name for name in names if (directory / f"{name}.py").is_file()), "serve")
    return f"{directory.name}.{found}" if package else found


def check(directory: Path) -> list[str]:
    """What keeps this target from being optimised, one line each; empty when nothing was found.

    Raises TargetError when target.toml itself cannot be read.
    """
    target = load_target(directory)
    return [*_files(target), *_command(target)]


def _files(target: Target) -> list[str]:
    try:
        files, left_out = snapshot_files(target)
    except SnapshotError as error:
        return [str(error)]
    names = [path for path, _ in files]
    problems = [
        f"editable: {glob!r} matches no file" for glob in target.editable if not any(matches(n, (glob,)) for n in names)
    ]
    problems += [
        f"frozen: {glob!r} matches no file" for glob in target.frozen if not any(matches(n, (glob,)) for n in names)
    ]
    problems += [f"{path}: too large for a snapshot; weights belong in a model folder" for path in left_out]
    for name in names:
        if matches(name, target.editable) and name.endswith(".py"):
            try:
                ast.parse((target.root / name).read_text("utf-8"))
            except (SyntaxError, ValueError) as error:
                problems.append(f"{name}: does not parse: {error}")
    own = (target.directory / FILE).relative_to(target.root).as_posix()
    if matches(own, target.editable):
        problems.append(f"editable covers {own}; a patch must not be able to change it")
    return problems


def _command(target: Target) -> list[str]:
    text = " ".join(target.serve)
    problems = [
        f"serve does not use {{{name}}}: {why}"
        for name, why in (
            ("model_dir", "the engine would not see which weights to load"),
            ("socket", "the client could not reach it"),
            ("trace_dir", "no trace could be read"),
        )
        if f"{{{name}}}" not in text
    ]
    if len(target.tp) > 1 and "{tp}" not in text:
        problems.append("serve does not use {tp} although tp allows several sizes")
    if len(target.devices) > 1 and "{device}" not in text:
        problems.append("serve does not use {device} although devices allows several")
    module = _module(target)
    if module is not None and not _exists(target.root, module):
        problems.append(f"serve starts module {module!r}, which is not under {target.root}")
    return problems


def _module(target: Target) -> str | None:
    """The module that the launcher is told to run, when the launcher is used."""
    for at, arg in enumerate(target.serve[:-1]):
        if arg == "{launcher}":
            return target.serve[at + 1]
    return None


def _exists(root: Path, module: str) -> bool:
    place = root.joinpath(*module.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
