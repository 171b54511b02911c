"""What a person sees while a run works: a live line on a terminal, plain lines in a log, nothing in tests.

Not for: computing anything that is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.status import Status


@dataclass(slots=True)
class Terminal:
    """Rich output: a spinner with the present step where there is a terminal, only notes and tables elsewhere."""

    console: Console
    clock: Callable[[], float] = time.monotonic
    budget: Callable[[], str] = lambda: ""
    _status: Status | None = None
    _started: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @contextmanager
    def live(self):
        """While this is open, `step` shows on a live line."""
        if not self.console.is_terminal:
            yield self
            return
        with self.console.status("starting") as self._status:
            try:
                yield self
            finally:
                self._status = None

    def step(self, text: str, seconds: float | None = None) -> None:
        if self._status is not None:
            expected = f" (about {seconds:.0f} s)" if seconds else ""
            self._status.update(f"[bold]{text}[/bold]{expected}  {self._elapsed()}  {self.budget()}")

    def note(self, text: str) -> None:
        self.console.print(f"[dim]{self._elapsed()}[/dim]  {text}", highlight=False)

    def show(self, renderable: Any) -> None:
        self.console.print(renderable)

    def _elapsed(self) -> str:
        seconds = int(self.clock() - self._started)
        return f"{seconds // 60}:{seconds % 60:02d}"


@dataclass(slots=True)
class Quiet:
    """Keeps what would have been shown."""

    steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)

    def step(self, text: str, seconds: float | None = None) -> None:
        self.steps.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show(self, renderable: Any) -> None:
        self.shown.append(renderable)
