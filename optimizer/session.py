"""One process at work on a run: signals, services, the loop, and what is said at its end.

Not for: the steps of the loop, or making the run (start.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from optimizer import state, summary
from optimizer.loop import Loop
from optimizer.resume import reopen, weights_there
from optimizer.run import Limits, Run, RunError
from optimizer.services import Interrupted
from optimizer.view import Terminal

DONE, STOPPED = 0, 130


def work(run: Run, console: Console) -> int:
    """Go on with a run until it ends or is asked to stop. Returns an exit status."""
    from optimizer.wiring import real

    view = Terminal(console)
    with interruptible(run, view), view.live(), real(run, view) as services:
        view.budget = lambda: _left(services.budget.left_s(reserve=False))
        try:
            why = Loop(services, run).go()
        except Interrupted:
            view.note(f"stopped; `optimize resume {run.request.id}` goes on from here")
            return STOPPED
    console.print(summary.table(run.ledger.lines()))
    console.print(f"Ended because {summary.clip(why)}.", highlight=False)
    place = report(run, console)
    if place is not None:
        console.print(f"Report: {place}", highlight=False)
    return DONE


def greet(run: Run, console: Console) -> None:
    """What was asked for, and under what it will be judged."""
    want = run.request
    limits = [f"{value:g} {name.replace('_', ' ')}" for name, value in _limits(run) if value is not None]
    console.print(f"[bold]run {want.id}[/bold] in {run.dir}", highlight=False)
    console.print(
        f"{want.target} TP={want.tp} on {want.device} ({want.dtype}), target {want.metric}"
        + (f", goal {want.goal}" if want.goal else "")
        + f"; agent {want.agent}, protocol {want.protocol}, seed {want.seed}",
        highlight=False,
    )
    console.print(
        f"limits: {', '.join(limits) or 'none'}; sandbox {want.sandbox_level}; seal {str(want.gates_digest)[:12]}; "
        f"model {want.model_dir.name}, sha256 {str(want.weights_sha256)[:12]}",
        highlight=False,
    )
    if want.sandbox_level != "bwrap":
        console.print(f"[yellow]candidates run in sandbox level {want.sandbox_level}, not the highest[/yellow]")
    for path in want.snapshot_left_out:
        console.print(f"{path} is too large for the snapshot and is left out", highlight=False)


def _limits(run: Run) -> list[tuple[str, float | None]]:
    return [(name, getattr(run.request.limits, name)) for name in Limits.__slots__]


def take_up(run: Run, limits: Limits, console: Console, give_up: str | None = None) -> int:
    """`optimize resume`: repair and go on; a finished run goes on only when a limit is raised. `give_up`: see `reopen`."""
    from optimizer import fingerprint, seal

    lines = run.ledger.lines()
    want = run.request
    own = [line for line in lines if line["kind"] != "reviewed"]  # a person's decisions come after the end
    ended = any(line["kind"] == "finished" for line in own[-1:]) and state.waiting(lines) is None
    if ended and limits == Limits():
        raise RunError(f"run {want.id} has finished; give --attempts or --budget-minutes to go on with it")
    seal.verify()
    if seal.digest() != want.gates_digest:
        raise RunError(f"run {want.id} was judged under another seal; start a new run")
    drawn = weights_there(run)
    environment = fingerprint.fingerprint(want.device, want.sandbox_level or "none", want.devices)
    notes = [drawn] if drawn else []
    notes += reopen(run, environment, limits, give_up)
    greet(run, console)
    for note in notes:
        console.print(note, highlight=False)
    return work(run, console)


def report(run: Run, console: Console) -> Path | None:
    """Write the report beside the run. A report that fails says so; the run's result stands without it."""
    from reports import html

    try:
        return html.run_report(run.dir, run.dir / "report")
    except (ValueError, OSError, KeyError) as error:
        console.print(f"no report: {error}; `optimize report {run.request.id}` tries again", highlight=False)
        return None


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"[dim]{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02d} left[/dim]"


@contextmanager
def interruptible(run: Run, view: Terminal) -> Iterator[None]:
    """The first Ctrl-C asks the loop to stop after its present step, the second stops at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if run.stop_requested:
            raise KeyboardInterrupt
        run.stop_requested = True
        view.note("stopping after the present step; once more to stop at once (both can be resumed)")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
