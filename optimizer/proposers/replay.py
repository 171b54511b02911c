"""Propose again what an earlier run proposed, attempt by attempt, byte for byte; no network, no model.

The recording is a run's folder (attempts/<n>/patch.json) or a file with one series a line. Not for: repeating
measurements or verdicts; those are taken anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.patching import EditMismatch, apply_edits
from optimizer.serial import build, plain
from optimizer.types import Series

from .base import Declined, ProposeContext


class ReplayError(Exception):
    """A recording that is missing or broken; one clear line."""


class Replay:
    """`recording`: a run folder or a .jsonl file, see `record`."""

    name = "replay"

    def __init__(self, recording: str | Path | None = None) -> None:
        if recording is None:
            raise ReplayError("--agent replay needs --agent-option recording=DIR_OR_FILE")
        self.place = Path(recording)
        self.series = read(self.place)

    def propose(self, ctx: ProposeContext) -> Series | Declined:
        """The series of the attempt with the next number; declines after the last one, or when one does not apply."""
        at = len(ctx.history)
        if at >= len(self.series):
            return Declined(self.name, why=f"the recording {self.place} ends after {len(self.series)} series")
        series = self.series[at]
        sources = dict(ctx.sources)
        for patch in series.patches:
            try:
                sources = apply_edits(sources, patch)
            except EditMismatch as error:
                return Declined(self.name, why=f"series {at + 1} of {self.place} was made for other sources: {error}")
        return series


def read(place: Path) -> list[Series]:
    """Every series of a recording, in order. Raises ReplayError."""
    try:
        if place.is_dir():
            files = sorted(place.glob("attempts/*/patch.json"), key=lambda f: int(f.parent.name))
            texts = [f.read_text("utf-8") for f in files]
        else:
            texts = [line for line in place.read_text("utf-8").splitlines() if line.strip()]
        found = [build(Series, json.loads(text)) for text in texts]
    except (OSError, ValueError) as error:
        raise ReplayError(f"{place}: not a recording: {error}") from error
    if not found:
        raise ReplayError(f"{place}: holds no series")
    return found


def record(run_dir: Path, file: Path) -> int:
    """Write a run's series to one file that can be committed; returns how many."""
    found = read(run_dir)
    lines = [json.dumps(plain(s), sort_keys=True, ensure_ascii=False) + "\n" for s in found]
    file.write_text("".join(lines), "utf-8")
    return len(found)
