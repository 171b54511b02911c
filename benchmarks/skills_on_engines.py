"""Try every mechanical skill on engines nobody here wrote, and print a Markdown table for skills/README.md.

Wheels come by name from the package index into a temporary folder (pip download, nothing is installed or run);
transformers' file is the installed one. A patch counts when it parses, its edits are exact and unique, and the
same skill then declines. Not for: semantics (tests/skills) or speed (the loop).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from optimizer.patching import apply_edits, changed_lines, edits_from  # noqa: E402
from optimizer.proposers import skillbook  # noqa: E402

WHEELS = {"nano-vllm-fork": "20260210", "smol-vllm": "0.1.2", "litgpt": "0.5.13", "reasoning-from-scratch": "0.2.0"}


ENGINE_FILES = ("__init__.py", "ch02.py", "qwen3.py", "utils.py")


def sources(name: str, version: str, folder: Path) -> dict[str, str]:
    """Python files of a wheel by path."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"{name}=={version}"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    wheel = next(folder.glob(f"{name.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n).decode("utf-8") for n in archive.namelist() if n.endswith(".py")}


def installed_qwen3() -> dict[str, str]:
    """transformers' Qwen3 model file."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "models/qwen3/modeling_qwen3.py"
    return {"modeling_qwen3.py": file.read_text("utf-8")}


def attempt(skill: skillbook.Skill, before: dict[str, str]) -> str:
    """What the skill did: its title with the size of the patch, or the reason why not."""
    finding = {"bound_us": 1.0, "params": skill.variants()[0], "device": skill.devices[0]}
    answer = skillbook.run(skill, before, finding)
    if isinstance(answer, str):
        return f"declines: {answer}"
    at, lines, files = before, 0, set()
    for step in answer:
        changed = {f: t for f, t in step.after.items() if at.get(f) != t}
        for file, text in changed.items():
            compile(text, file, "exec", dont_inherit=True)
        assert apply_edits(at, edits_from(at, changed)) == step.after
        lines, files, at = lines + changed_lines(at, changed), files | set(changed), step.after
    again = skillbook.run(skill, at, finding)
    once = "" if isinstance(again, str) else " (not idempotent!)"
    return f"**{answer[-1].title}**: {len(files)} files, {lines} lines{once}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engines = {f"{n} {v}": sources(n, v, Path(folder)) for n, v in WHEELS.items()}
        name = "reasoning-from-scratch"  # one engine of the book's several, as docs/examples/outside takes it
        engines[f"{name} {WHEELS[name]}"] = {f: t for f, t in engines[f"{name} {WHEELS[name]}"].items() if f.rpartition("/")[2] in ENGINE_FILES}
    engines[f"transformers {importlib.metadata.version('transformers')} (Qwen3 file)"] = installed_qwen3()
    print("| skill | " + " | ".join(engines) + " |")
    print("|---" * (len(engines) + 1) + "|")
    for skill in skillbook.load_all().values():
        if skill.codemod is not None:
            cells = [attempt(skill, dict(code)).replace("|", "/") for code in engines.values()]
            print(f"| {skill.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
