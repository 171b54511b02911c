"""Options, help and exit codes of the `trace-diff` command line. Not for: running anything (`trace_cli`)."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

EXIT = {
    0: "done (explain: the finding is there)",
    1: "--fail-if-slower: a comparable reference is faster by more than allowed",
    2: "wrong command line",
    3: "a file cannot be read, written or trusted",
    4: "nothing to look at: no complete step of the phase, nothing comparable, or the evidence is missing",
    5: "capture refused: the named check failed",
    6: "explain: the rule looked and found nothing",
}
COMMANDS = ("diff", "show", "explain", "critical-path", "export", "cut", "capture", "demo")


def _percent(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%?\s*", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: give a percentage such as 3%")
    return float(match[1]) / 100


def _control(text: str) -> tuple[str, float]:
    label, _, value = text.rpartition("=")
    try:
        return label, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give LABEL=MICROSECONDS, or MICROSECONDS for the first") from None


def parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code}  {words}" for code, words in EXIT.items())
    top = argparse.ArgumentParser(
        prog="trace-diff",
        description="Compare torch.profiler traces of inference engines, and say what costs time.",
        epilog=f"Without a command name, arguments are those of diff: trace-diff A B [C...].\n\nexit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(metavar="COMMAND", title="commands")
    _add_diff(commands)
    _add_show(commands)
    _add_explain(commands)
    _add_critical_path(commands)
    _add_export(commands)
    _add_cut(commands)
    _add_capture(commands)
    _add_demo(commands)
    return top


def _inputs(p: argparse.ArgumentParser, many: str = "+") -> None:
    p.add_argument("traces", nargs=many, metavar="TRACE", help="trace file, folder of ranks, or baseline:ID; the first is 'here'")
    p.add_argument("--label", action="append", default=[], help="name of a trace, in order; repeat")
    p.add_argument("--phase", choices=("decode", "prefill"), default="decode")
    p.add_argument("--control-us", action="append", default=[], type=_control, metavar="[LABEL=]US",
                   help="wall of one step of this cell without the profiler; repeat")  # fmt: skip


def _add_diff(commands: Any) -> None:
    p = commands.add_parser("diff", help="compare traces side by side (the default)")
    _inputs(p)
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--markdown", action="store_true", help="print Markdown")
    p.add_argument("--html", type=Path, metavar="OUT", help="write one self-contained page")
    p.add_argument("--map", type=Path, metavar="TRACE", help="eager stack trace of the first engine: Python lines for kernels inside its graphs")
    p.add_argument("--layers", action="store_true", help="print the layer drill-down too")
    p.add_argument("--fail-if-slower", type=_percent, metavar="3%", help="exit 1 when a comparable reference's step is faster by more")
    p.set_defaults(command="diff")


def _add_show(commands: Any) -> None:
    p = commands.add_parser("show", help="what traces hold: ranks, spans, steps")
    p.add_argument("traces", nargs="+", metavar="TRACE")
    p.add_argument("--json", action="store_true")
    p.set_defaults(command="show")


def _add_explain(commands: Any) -> None:
    p = commands.add_parser("explain", help="one finding: its rule, or its answer for traces")
    p.add_argument("finding", help="id of a finding or name of a rule; 'list' lists them")
    _inputs(p, "*")
    p.set_defaults(command="explain")


def _add_critical_path(commands: Any) -> None:
    p = commands.add_parser("critical-path", help="the critical path of one step, as Holistic Trace Analysis finds it (extra hta)")
    p.add_argument("trace", metavar="TRACE", help="trace file, or baseline:ID")
    p.add_argument("--step", type=int, help="number of the step, as show has it; default: a typical one of the phase")
    p.add_argument("--phase", choices=("decode", "prefill"), default="decode")
    p.add_argument("--json", action="store_true")
    p.set_defaults(command="critical-path")


def _add_export(commands: Any) -> None:
    p = commands.add_parser("export", help="all engines in one timeline for Perfetto, aligned on a step")
    _inputs(p)
    p.add_argument("--perfetto", action="store_true", help="Chrome trace JSON for ui.perfetto.dev (the only format)")
    p.add_argument("-o", "--out", type=Path, default=Path("trace-diff.json.gz"))
    p.set_defaults(command="export")


def _add_cut(commands: Any) -> None:
    p = commands.add_parser("cut", help="a few steps out of a large trace")
    p.add_argument("trace", type=Path)
    p.add_argument("-o", "--out", type=Path, required=True)
    p.add_argument("--prefill", type=int, default=1, help="prefill steps right before (default 1)")
    p.add_argument("--decode", type=int, default=4, help="neighbouring decode steps (default 4)")
    p.add_argument("--control-step-us", type=float, help="kept in the file: step wall without the profiler")
    p.set_defaults(command="cut")


def _add_capture(commands: Any) -> None:
    p = commands.add_parser("capture", help="trace a running vLLM, SGLang or other server")
    p.add_argument("url", help="http://HOST:PORT or unix:///PATH")
    p.add_argument("--trace-dir", type=Path, required=True, help="where the server writes its traces")
    p.add_argument("-o", "--out", type=Path, default=Path("captured"))
    p.add_argument("--phase", action="append", choices=("prefill", "decode"), help="repeat; default both")
    p.add_argument("--prompt-tokens", type=int, default=128)
    p.add_argument("--new-tokens", type=int, default=16)
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--ranks", type=int, help="expected trace files; default: what the server says, else 1")
    p.add_argument("--cpu", action="store_true", help="no device events expected")
    p.add_argument("--vocab", type=int, help="prompts are random token ids below this; default: what the server says, else 1000")
    p.add_argument("--with-stack", action="store_true", help="ask the server for Python stacks")
    p.add_argument("--max-steps", type=int, default=200)
    p.add_argument("--max-mb", type=float, default=400.0)
    p.add_argument("--max-minutes", type=float, default=5.0)
    p.set_defaults(command="capture")


def _add_demo(commands: Any) -> None:
    p = commands.add_parser("demo", help="the bundled H200 comparison, and why autograd was the cost")
    p.add_argument("--html", type=Path, metavar="OUT")
    p.set_defaults(command="demo")
