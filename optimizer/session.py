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

from optimizer import summary
from optimizer.loop import Loop
from optimizer.run import Run
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
    console.print(f"Ended because {why}.", highlight=False)
    place = report(run, console)
    if place is not None:
        console.print(f"Report: {place}", highlight=False)
    return DONE


def report(run: Run, console: Console) -> Path | None:
    """Write the report beside the run. A report that fails says so; the run's result stands without it."""
    from reports import html

    try:
        return html.run_report(run.dir, run.dir / "report" / "index.html")
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
