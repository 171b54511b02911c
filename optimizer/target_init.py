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
serve = ["{{python}}", "-I", "-B", "{{launcher}}", {module},
         {flags}]
editable = [{editable}]
frozen = [{frozen}]
devices = ["cpu", "cuda"]
tp = [1]
dtype = {{ cpu = "float32", cuda = "bfloat16" }}
start_timeout_s = 120
"""

_FLAGS = {"--model": "{model_dir}", "--tp": "{tp}", "--device": "{device}", "--uds": "{socket}", "--trace-dir": "{trace_dir}"}
FILL_IN = "FILL-IN"  # a value that only its author knows


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
        flags=", ".join(f"{json.dumps(flag)}, {json.dumps(value)}" for flag, value in _flags(directory.parent if package else directory, module).items()),
        editable=json.dumps(f"{prefix}**/*.py"),
        frozen=json.dumps(f"{prefix}{FILE}"),
    )
    path.write_text(text, "utf-8")
    return path


def _flags(root: Path, module: str) -> dict[str, str]:
    """Our flags that the module's argparse knows, all of them where it has none, and those that it requires."""
    known = _argparse(root, module)
    if not known:
        return _FLAGS
    ours = {flag: value for flag, value in _FLAGS.items() if flag in known}
    return ours | {flag: FILL_IN for flag, required in known.items() if required and flag not in ours}


def _argparse(root: Path, module: str) -> dict[str, bool]:
    """Options that the module's `add_argument` calls name, and whether each is required; {} where that cannot be told.

    Read, not run: a parser that takes unknown options, or is built elsewhere, gives {}.
    """
    place = root.joinpath(*module.split(".")).with_suffix(".py")
    try:
        tree = ast.parse(place.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    names = {n.func.attr for n in calls if isinstance(n.func, ast.Attribute)}
    if "parse_args" not in names or names & {"parse_known_args", "add_subparsers", "add_cli_args"}:
        return {}
    parsers = {
        target.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and ast.unparse(n.value.func).endswith("ArgumentParser")
        for target in n.targets
        if isinstance(target, ast.Name)
    }
    handed_on = (a for n in ast.walk(tree) if isinstance(n, ast.Call) for a in [*n.args, *(k.value for k in n.keywords)])
    if not parsers or any(isinstance(a, ast.Name) and a.id in parsers for a in handed_on):
        return {}  # somebody else adds options to it
    added = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "add_argument"]
    if len(added) != sum(n in added for n in (call.func for call in calls)):
        return {}  # under another name
    found: dict[str, bool] = {}
    for call in (n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "add_argument"):
        required = any(k.arg == "required" and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)
        for value in (a.value for a in call.args if isinstance(a, ast.Constant)):
            if isinstance(value, str) and value.startswith("--"):
                found[value] = required
    return found


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
    return problems + (_arguments(target, module) if module is not None else [])


def _arguments(target: Target, module: str) -> list[str]:
    """Options that the module would refuse, or miss."""
    problems = [f"serve: {FILL_IN} stands for a value that only you know" for arg in target.serve if arg == FILL_IN]
    known = _argparse(target.root, module)
    if not known:
        return problems
    given = [arg.partition("=")[0] for arg in target.serve[target.serve.index(module) + 1 :] if arg.startswith("--")]
    problems += [f"serve passes {flag}, which {module} does not know (it has {', '.join(known)})" for flag in given if flag not in known]
    return problems + [f"serve does not pass {flag}, which {module} requires" for flag, needed in known.items() if needed and flag not in given]


def _module(target: Target) -> str | None:
    """The module that the launcher is told to run, when the launcher is used."""
    for at, arg in enumerate(target.serve[:-1]):
        if arg == "{launcher}":
            return target.serve[at + 1]
    return None


def _exists(root: Path, module: str) -> bool:
    place = root.joinpath(*module.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
