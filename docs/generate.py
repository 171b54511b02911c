"""Writes what the documentation takes from the code: `python -m docs.generate` (`--check` only says what is old).

A page per finding rule from its docstring, the index of rules, and the blocks between `<!-- generated: NAME -->` and
`<!-- end -->` in hand-written pages. A test runs the check. Not for: words that are nowhere in the code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.S)
# Checks that are made elsewhere than in a gate of their own.
_ELSEWHERE = (
    ("G04", "optimizer/confine/sandbox.py", "what a candidate may reach"),
    ("G10", "optimizer/measure.py", "the very streams that were timed are checked by the oracle"),
    ("G16", "optimizer/traffic/client.py", "the clock is outside the candidate"),
    ("G22", "optimizer/accept.py", "whether a gain is real"),
    ("G23", "optimizer/accept.py", "the reported gain comes from fresh prompts"),
    ("G24", "optimizer/traffic/prompts.py", "prompts are secret and fresh"),
    ("G25", "optimizer/ablate.py", "each accepted patch is left out once at the end"),
    ("G26", "optimizer/review/queue.py", "a person decides what becomes knowledge"),
    ("G28", "optimizer/explain.py", "a gain that the trace does not explain waits for a person"),
)


def docstring(path: Path) -> str:
    """A module's docstring without importing it."""
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def sentence(path: Path) -> str:
    """Its first line, which is one sentence by our house style."""
    return docstring(path).partition("\n")[0]


def findings() -> dict[Path, str]:
    """The index of the rules, and a page for each."""
    from trace_diff.findings import RULES

    pages: dict[Path, str] = {}
    rows = []
    for module in sorted(RULES, key=lambda m: m.RULE):
        words = (module.__doc__ or "").strip()
        first, _, rest = words.partition("\n")
        skills = ", ".join(f"`{s}`" for s in module.SKILLS) or "none"
        pages[DOCS / "findings" / f"{module.RULE}.md"] = (
            f"# {module.RULE}\n\n{first}\n\n{rest.strip()}\n\n- **Bound:** {module.FORMULA}\n- **Answered by:** {skills}\n"
            f"- **Code:** [`trace_diff/findings/{Path(str(module.__file__)).name}`](../../trace_diff/findings/{Path(str(module.__file__)).name})\n"
            f"- **For a trace of yours:** `trace-diff explain {module.RULE} TRACE`\n\n[All rules](../findings.md)\n"
        )
        rows.append(f"| [{module.RULE}](findings/{module.RULE}.md) | {first} | {skills} |")
    intro = docstring(ROOT / "trace_diff" / "findings" / "__init__.py").partition("\n\n")[2].partition("Not for:")[0].strip()
    pages[DOCS / "findings.md"] = (
        "# Findings\n\nWritten by `python -m docs.generate` from the rules' docstrings; change those, not this page.\n\n"
        f"{intro}\n\n| Rule | What it looks for | Answered by the skills |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    return pages


def command_list() -> str:
    """Every command of both programs with its options, as `--help` has them."""
    import argparse

    import typer.main

    from optimizer.cli import app
    from reports.trace_options import parser

    parts = ["# Commands\n\nWritten by `python -m docs.generate` from the command lines themselves."]

    def visit(command: Any, name: str) -> None:
        rows = [(", ".join(o for o in p.opts if o.startswith("-")) or p.name, getattr(p, "help", "") or "") for p in command.params]
        parts.append(_command(name, str(command.help or ""), [r for r in rows if r[0] != "--help"]))
        for child, value in sorted(getattr(command, "commands", {}).items()):
            visit(value, f"{name} {child}")

    visit(typer.main.get_command(app), "optimize")
    top = parser()
    parts.append(_command("trace-diff", (top.description or "").split("\n\n")[0], []))
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for child, value in action.choices.items():
                rows = [(", ".join(a.option_strings) or str(a.dest), str(a.help or "")) for a in value._actions if a.dest != "help"]
                parts.append(_command(f"trace-diff {child}", helps.get(child, ""), rows))
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    """One paragraph; a placeholder such as <id> is no tag."""
    return " ".join(text.split()).replace("<", "&lt;")


def _command(name: str, words: str, rows: Sequence[tuple[str, str]]) -> str:
    text = f"## {name}\n\n{_prose(words)}"
    listed = "\n".join(f"- `{option}`" + (f": {_prose(about.replace('%%', '%'))}" if about else "") for option, about in rows)
    return text + (f"\n\n{listed}" if listed else "")


def gates() -> str:
    """Every gate in the order in which it runs, then the modules' own words."""
    from optimizer import gates as sealed

    order = [*(("quick", g) for g in sealed.QUICK), *(("full", g) for g in sealed.FULL)]
    rows = ["| Stage | Gate | Check | Function |", "|---|---|---|---|"]
    modules: dict[str, list[str]] = {}
    for stage, gate in order:
        module = gate.run.__module__.rpartition(".")[2]
        modules.setdefault(module, []).append(gate.check)
        rows.append(f"| {stage} | `{gate.name}` | {gate.check} | [`{module}.{gate.run.__name__}`](../optimizer/gates/{module}.py) |")
    parts = ["\n".join(rows)]
    for module in modules:
        parts.append(f"### {module}\n\n{docstring(ROOT / 'optimizer' / 'gates' / f'{module}.py')}")
    parts.append("### Checked elsewhere\n\n| Check | Where | What |\n|---|---|---|\n" + "\n".join(
        f"| {number} | [`{path}`](../{path}) | {what} |" for number, path, what in _ELSEWHERE))  # fmt: skip
    return "\n\n".join(parts)


def looks() -> str:
    """The pre-registered looks of both protocols."""
    from optimizer import rules
    from optimizer.measure import PROTOCOLS

    rows = ["| Protocol | Stage | After pairs | Passes when | Fails early when |", "|---|---|---|---|---|"]
    for name, rule in rules.RULES.items():
        sizes = rules.sizes_of(PROTOCOLS[name])
        for stage, seen in rule.looks.items():
            for look in seen:
                against = "the margin" if look.against_margin else "no change"
                passes = f"p < {look.alpha:g} against {against}" + (", and every pair lies above it" if look.all_clear else "")
                fails = [f"slower with p < {look.slower_alpha:g}"] if look.slower_alpha is not None else []
                if look.futile_below is not None:
                    fails.append("the mean gain is negative" if look.futile_below == 0 else f"the mean gain is below {look.futile_below:g} margins")
                rows.append(f"| `{name}` | {stage.value} | {look.n or sizes[stage]} | {passes} | {' or '.join(fails) or 'never'} |")
    return "\n".join(rows)


def reasons() -> str:
    """What can end an attempt: the comments of RejectReason."""
    text = (ROOT / "optimizer" / "types.py").read_text("utf-8")
    body = text[text.index("class RejectReason") :]
    body = body[: body.index("@dataclass")]
    rows = [f"| `{value}` | {why or ''} |" for value, why in re.findall(r'^    \w+ = "(\w+)"(?:\s+# (.*))?$', body, re.M)]
    return "| Reason | Meaning |\n|---|---|\n" + "\n".join(rows)


def problems() -> str:
    """What the validator of the blueprint finds."""
    from optimizer.knowledge.check import BLOCKING, Kind

    rows = [f"| `{kind.value}` | {'blocks acceptance' if kind in BLOCKING else 'is shown'} |" for kind in Kind]
    return "| Problem | Effect |\n|---|---|\n" + "\n".join(rows)


def entry_fields() -> str:
    """Fields of a knowledge entry."""
    from optimizer.knowledge.blueprint import Entry, Evidence, Gains, Scope

    lines = []
    for name, model in (("entry", Entry), ("scope", Scope), ("gain", Gains), ("evidence", Evidence)):
        lines.append(f"- **{name}**: " + ", ".join(f"`{field}`" for field in model.model_fields))
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "gates": gates,
    "looks": looks,
    "reasons": reasons,
    "problems": problems,
    "entry-fields": entry_fields,
}


def pages() -> dict[Path, str]:
    """Every page that the code decides on, as it should be. Raises KeyError for a block that nobody writes."""
    wanted = {**findings(), DOCS / "commands.md": command_list()}
    for path in sorted(DOCS.glob("*.md")):
        if path in wanted:
            continue
        text = path.read_text("utf-8")
        new = _BLOCK.sub(lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[3]}", text)
        if new != text or _BLOCK.search(text):
            wanted[path] = new
    return wanted


def outdated() -> list[str]:
    """Pages that differ from what the code says, and pages of rules that are gone."""
    wanted = pages()
    old = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
    old += [path for path in (DOCS / "findings").glob("*.md") if path not in wanted]
    return sorted(str(path.relative_to(ROOT)) for path in old)


def write() -> list[str]:
    """Bring every page up to date; returns those that changed."""
    changed = outdated()
    wanted = pages()
    for name in changed:
        path = ROOT / name
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], "utf-8")
        else:
            path.unlink()
    return changed


def main() -> int:
    check = "--check" in sys.argv[1:]
    names = outdated() if check else write()
    sys.stdout.write("".join(f"{name} {'is old' if check else 'written'}\n" for name in names))
    return 1 if check and names else 0


if __name__ == "__main__":
    sys.exit(main())
