"""`trace-diff`: the command line over trace_diff. Parses, calls, prints; starts fast and never imports torch.

    trace-diff A B [C...]        side-by-side table and findings; the first is "here"
    trace-diff show FILE...      what one engine's traces hold
    trace-diff explain FINDING   one rule, or its answer for traces
    trace-diff critical-path, export, cut, capture, demo

A and B are files, folders (one file per rank) or `baseline:ID` for a bundled trace. Exit codes are in trace_options.EXIT.
Not for: analysis (trace_diff) or drawing (the other modules here).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.trace_options import COMMANDS, parser

if TYPE_CHECKING:
    from trace_diff.analysis import Analysis
    from trace_diff.ingest import TraceSet

class Stop(Exception):
    """Ends the program with one clear line."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code. The console script passes it to sys.exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] not in COMMANDS and args[0] not in ("-h", "--help"):
        args.insert(0, "diff")
    try:
        options = parser().parse_args(args)
        if not hasattr(options, "command"):
            parser().print_help()
            return 2
        return _RUN[options.command](options)
    except Stop as stop:
        _say(f"trace-diff: {stop}")
        return stop.code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away: nothing to tell
        return 0
    except KeyboardInterrupt:
        return 130


def _known_errors() -> tuple[type[Exception], ...]:
    from reports.baselines import BaselineError
    from trace_diff.cut import CutError
    from trace_diff.ingest import TraceError

    return (TraceError, CutError, BaselineError, OSError, UnicodeError)


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip() + "\n")


def _out(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


# -- loading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Input:
    """One engine's traces, and what is known beside them."""

    traces: TraceSet
    control_us: float | None = None  # wall of one step of `phase` without the profiler
    phase: str = "decode"
    stated: dict[str, Any] = field(default_factory=dict)  # fields of the measured cell


def _load(spec: str, label: str | None = None) -> _Input:
    """A file, a folder of ranks (with `capture.json`, if `capture` wrote it), or `baseline:ID`."""
    from trace_diff import ingest

    if spec.startswith("baseline:"):
        from reports import baselines

        found = baselines.get(spec.removeprefix("baseline:"))
        stated = {"tp": found.tp} | ({"batch": found.batch, "tokens": found.batch} if found.batch else {})
        return _Input(ingest.load_many(found.paths, label or found.label), found.control_us, "decode", stated)
    path = Path(spec)
    if not path.exists():
        raise Stop(3, f"{spec}: no such file or folder")
    name = label or (path.name if path.is_dir() else path.name.split(".")[0])
    traces = ingest.load_many([path], name, progress=_progress(spec))
    return _captured(path / "capture.json", traces) if path.is_dir() else _Input(traces)


def _captured(record: Path, traces: TraceSet) -> _Input:
    try:
        data = json.loads(record.read_text("utf-8"))
    except FileNotFoundError:
        return _Input(traces)
    except json.JSONDecodeError as error:
        raise Stop(3, f"{record}: byte {error.pos}: {error.msg}") from None
    if not isinstance(data, dict) or not isinstance(data.get("workload", {}), dict):
        raise Stop(3, f"{record}: not a record of trace-diff capture")
    work = data.get("workload", {})
    stated = {"batch": work.get("batch"), "tp": len(data.get("files", ())) or None, "context": work.get("prompt_tokens")}
    if data.get("phase") == "decode" and stated["context"]:
        stated["context"] += work.get("new_tokens", 0) // 2  # the mean while it grows
    return _Input(traces, data.get("control_us"), data.get("phase", ""), {k: v for k, v in stated.items() if v})


def _progress(name: str) -> Any:
    """A counter on a terminal, for files that take a while; silent otherwise."""
    if not sys.stderr.isatty():
        return None

    def tell(done: int, whole: int) -> None:
        if whole > 20_000_000:
            sys.stderr.write(f"\r{name}: {done / max(whole, 1):4.0%}" + ("\n" if done >= whole else ""))

    return tell


def _analyses(options: argparse.Namespace) -> list[Analysis]:
    from trace_diff import api

    found: list[Analysis] = []
    controls = dict(options.control_us)
    for at, spec in enumerate(options.traces):
        label = options.label[at] if at < len(options.label) else None
        try:
            given = _load(spec, label)
        except _known_errors() as error:
            raise Stop(3, _one_line(error, spec)) from None
        try:
            stated = given.stated if given.phase == options.phase else {}
            analysis = api.analyse(given.traces, options.phase, **stated)
        except api.NoSteps as error:
            raise Stop(4, f"{error}{_damage(given.traces)}") from None
        if any(a.label == analysis.label for a in found):
            from dataclasses import replace

            analysis = replace(analysis, label=f"{analysis.label} ({at + 1})")
        control = given.control_us if given.phase == options.phase else None
        control = controls.get(analysis.label, controls.get("") if at == 0 else None) or control
        found.append(analysis.with_control(control))
    unknown = [n for n in controls if n and n not in {a.label for a in found}]
    if unknown:
        raise Stop(2, f"--control-us {unknown[0]}: no such label; there are: {', '.join(a.label for a in found)}")
    return found


def _damage(traces: TraceSet) -> str:
    """What loading had to say of the files, for an error that it may explain."""
    said = [f"{t.path}: {m}" for t in traces for m in t.notes.messages]
    return f" ({'; '.join(said[:4])})" if said else ""


def _one_line(error: Exception, spec: str) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    return text if spec.removeprefix("baseline:") in text or ":" in text else f"{spec}: {text}"


def _console(width: int | None = None) -> Any:
    from rich.console import Console

    return Console(width=width or (None if sys.stdout.isatty() else 150), highlight=False, markup=False, emoji=False)


def _write(path: Path, write: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise Stop(3, f"{path}: {error.strerror or error}") from None


# -- commands --------------------------------------------------------------------------------------------------


def _diff(options: argparse.Namespace) -> int:
    from trace_diff import api

    analyses = _analyses(options)
    diff = api.compare(analyses)
    found = api.find(analyses[0], analyses[1:])
    mapped = _mapped(options.map, analyses[0]) if options.map else None
    if options.json:
        from dataclasses import asdict

        data = {"diff": diff.to_json(), "findings": [asdict(f) for f in found]}
        if mapped is not None:
            data["map"] = mapped
        _out(json.dumps(data, indent=1, default=_plain))
    elif options.markdown:
        from reports import markdown

        _out(markdown.comparison(diff, found, analyses))
    else:
        from reports import terminal

        console = _console()
        console.print(terminal.side_by_side(diff, analyses, layers=options.layers))
        console.print(terminal.findings(found))
        if mapped is not None:
            console.print(f"\n{mapped['share']:.1%} of GPU time has a Python line through {options.map}")
            for row in mapped["lines"][:15]:
                console.print(f"  {row['us']:10.1f} us  {row['line']}")
    if options.html:
        from reports import html

        _write(options.html, lambda: html.comparison(diff, found, options.html, analyses=analyses))
        _say(f"wrote {options.html}")
    return _slower(options.fail_if_slower, diff)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _slower(limit: float | None, diff: Any) -> int:
    if limit is None:
        return 0
    here, others = diff.engines[0], diff.engines[1:]
    if not others:
        raise Stop(4, "--fail-if-slower: no comparable reference")
    for other in others:
        if here.wall_us > other.wall_us * (1 + limit):
            _say(f"trace-diff: {here.label} is {here.wall_us / other.wall_us - 1:.1%} slower than {other.label}, {limit:.1%} allowed")
            return 1
    return 0


def _mapped(path: Path, analysis: Analysis) -> dict[str, Any]:
    """Python lines for the first engine's work, through an eager stack trace of the same engine."""
    from trace_diff import api, stackmap

    try:
        source = _load(str(path)).traces
        found = stackmap.build(analysis, api.analyse(source, str(analysis.phase)))
    except stackmap.NoStacks as error:
        raise Stop(4, f"--map: {error}") from None
    except api.NoSteps as error:
        raise Stop(4, f"--map {path}: {error}") from None
    except _known_errors() as error:
        raise Stop(3, _one_line(error, str(path))) from None
    lines: dict[str, float] = {}
    for row in found.rows:
        if row.sites:
            lines[row.sites[0]] = lines.get(row.sites[0], 0.0) + row.us
    ranked = sorted(lines.items(), key=lambda kv: -kv[1])
    return {"share": found.coverage, "lines": [{"line": k, "us": v} for k, v in ranked], "items": found.to_json()["rows"]}


def _show(options: argparse.Namespace) -> int:
    from reports import show

    try:
        data = show.describe([_load(spec).traces for spec in options.traces])
    except _known_errors() as error:
        raise Stop(3, _one_line(error, options.traces[0])) from None
    if options.json:
        _out(json.dumps(data, indent=1, default=_plain))
    else:
        _console().print(show.table(data))
    return 0


def _explain(options: argparse.Namespace) -> int:
    from reports import explain

    if options.finding == "list":
        _out("\n".join(f"{name:28} {line}" for name, line in explain.rules()))
        return 0
    if not options.traces:
        text = explain.rule(options.finding)
        if text is None:
            raise Stop(2, f"no rule '{options.finding}'; there are: {', '.join(n for n, _ in explain.rules())}")
        _out(text)
        return 0
    from reports import terminal
    from trace_diff import api

    analyses = _analyses(options)
    found = [f for f in api.find(analyses[0], analyses[1:]) if options.finding in (f.id, f.rule)]
    if not found:
        raise Stop(2, f"no finding '{options.finding}'; there are: {', '.join(n for n, _ in explain.rules())}")
    for f in found:
        _console().print(terminal.explain(f))
    status = {str(f.status) for f in found}
    return 0 if "found" in status else 4 if "could_not_look" in status else 6


def _critical_path(options: argparse.Namespace) -> int:
    from reports import show
    from trace_diff import critical_path

    try:
        trace = next(iter(_load(options.trace).traces))
        found = critical_path.critical_path(trace, critical_path.pick(trace, options.phase, options.step))
    except critical_path.NoCriticalPath as error:
        raise Stop(4, f"{options.trace}: {error}") from None
    except _known_errors() as error:
        raise Stop(3, _one_line(error, options.trace)) from None
    if options.json:
        _out(json.dumps(found.to_json(), indent=1))
    else:
        _console().print(show.critical_path(found))
    return 0


def _export(options: argparse.Namespace) -> int:
    from trace_diff import perfetto

    analyses = _analyses(options)
    _write(options.out, lambda: perfetto.export(analyses, options.out))
    _say(f"wrote {options.out}: open it at ui.perfetto.dev; zero is the start of one {options.phase} step of every engine")
    return 0


def _cut(options: argparse.Namespace) -> int:
    from trace_diff import cut

    try:
        report = cut.cut(
            options.trace,
            options.out,
            prefill=options.prefill,
            decode=options.decode,
            control_step_us=options.control_step_us,
        )
    except _known_errors() as error:
        raise Stop(3, _one_line(error, str(options.trace))) from None
    _say(f"wrote {options.out}: {report.events} of {report.parent_events} events, steps {', '.join(report.steps)}")
    return 0


def _capture(options: argparse.Namespace) -> int:
    from trace_diff import capture
    from trace_diff.server import ServerError

    phases = options.phase or ["prefill", "decode"]
    limits = capture.Limits(options.max_minutes, int(options.max_mb * 1e6), options.max_steps)
    extra = {"with_stack": True} if options.with_stack else {}
    try:
        for work in capture.workloads(options.prompt_tokens, options.new_tokens, options.batch, phases):
            got = capture.capture(
                options.url, options.trace_dir, options.out, work, ranks=options.ranks,
                device=False if options.cpu else None, vocab=options.vocab, limits=limits, options=extra,
            )  # fmt: skip
            ratio = "no control" if got.perturbation is None else f"{got.perturbation:.2f}x of the unprofiled step"
            _say(f"{got.phase}: {', '.join(got.files)} in {options.out / got.phase}; {got.steps[0]} steps, {ratio}")
    except (capture.CaptureError, ServerError) as error:
        raise Stop(5, f"capture: {error}") from None
    except _known_errors() as error:
        raise Stop(3, _one_line(error, options.url)) from None
    return 0


def _demo(options: argparse.Namespace) -> int:
    from reports import demo

    try:
        shown = demo.build()
    except _known_errors() as error:
        raise Stop(3, _one_line(error, "baseline_traces")) from None
    demo.print_to(_console(), shown)
    if options.html:
        _write(options.html, lambda: demo.write_html(shown, options.html))
        _say(f"wrote {options.html}")
    return 0


_RUN = {
    "diff": _diff,
    "show": _show,
    "explain": _explain,
    "critical-path": _critical_path,
    "export": _export,
    "cut": _cut,
    "capture": _capture,
    "demo": _demo,
}

if __name__ == "__main__":
    sys.exit(main())
