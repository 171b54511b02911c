"""What loading had to do to a file, gathered while it loads. Not for: deciding what to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from trace_diff.types import LoadNotes

_MESSAGES = 50


@dataclass(slots=True)
class NoteBook:
    """Counts and sentences of one load; `freeze` gives the border type."""

    repaired: int = 0
    quarantined: int = 0
    lost: int = 0
    truncated: bool = False
    events_cut: bool = False
    messages: list[str] = field(default_factory=list)
    last_good_ns: int | None = None

    def say(self, message: str) -> None:
        """Add a sentence once; a file with a thousand faults of one kind does not get a thousand lines."""
        if message not in self.messages and len(self.messages) < _MESSAGES:
            self.messages.append(message)

    def cut(self, message: str) -> None:
        """The file ends before its JSON does."""
        self.truncated = True
        self.say(message)

    def freeze(self) -> LoadNotes:
        return LoadNotes(self.repaired, self.quarantined, self.lost, self.truncated, tuple(self.messages), self.events_cut)
