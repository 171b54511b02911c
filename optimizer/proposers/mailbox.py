"""How a waiting run and an agent outside it hand each other questions and answers: files, each written once.

The run writes `question-<n>.json` and waits for `answer-<n>.json`; whoever answers first has answered, and no one can
overwrite it. Not for: what an agent sees (toolbox.py), or how it is reached (mcp_server.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimizer.knowledge.blueprint import Entry
from optimizer.serial import build, plain, write_json
from optimizer.types import Series
from trace_diff.types import Finding

from .base import Budget, Declined, ProposeContext

FOLDER = "mailbox"


class AlreadyAnswered(Exception):
    """Another client was first."""


class Mailbox:
    """The mailbox of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.place = run_dir / FOLDER

    # -- the run's side --------------------------------------------------------------------------------------

    def ask(self, number: int, ctx: ProposeContext) -> None:
        """Put the question of an attempt; the same again after a resumption."""
        question = {
            "attempt": number,
            "incumbent": ctx.incumbent,
            "frozen": list(ctx.frozen),
            "sources": dict(ctx.sources),
            "findings": [plain(asdict(f)) for f in ctx.findings],
            "history": [dict(h) for h in ctx.history],
            "knowledge": [e.model_dump(mode="json") for e in ctx.knowledge],
            "budget": plain(ctx.budget),
        }
        question["key"] = _key(question)
        answer = self.place / f"answer-{number}.json"
        if answer.is_file() and json.loads(answer.read_text("utf-8")).get("key") != question["key"]:
            answer.unlink()  # to an earlier question with this number; one to this very question is kept
        write_json(self.place / f"question-{number}.json", question)

    def answer(self, number: int) -> Series | Declined | None:
        """What was answered, or None while nobody has. Raises ValueError on a file that is no answer."""
        file = self.place / f"answer-{number}.json"
        if not file.is_file():
            return None
        said = json.loads(file.read_text("utf-8"))
        if "declined" in said:
            file.unlink()  # the run may ask again
            return Declined("mcp", why=str(said["declined"]), final=bool(said.get("final", False)))
        return build(Series, said["series"])

    def close(self, number: int) -> None:
        """The question is answered or given up; nobody may answer it any more."""
        (self.place / f"question-{number}.json").unlink(missing_ok=True)

    # -- the agent's side ------------------------------------------------------------------------------------

    def question(self) -> tuple[int, ProposeContext] | None:
        """The open question and the number of its attempt, or None when the run is not waiting."""
        for file in sorted(self.place.glob("question-*.json")):
            number = int(file.stem.rpartition("-")[2])
            if (self.place / f"answer-{number}.json").exists():
                continue
            try:
                said = json.loads(file.read_text("utf-8"))
            except FileNotFoundError:
                continue  # closed between the two looks
            return number, ProposeContext(
                sources=said["sources"],
                findings=[build(Finding, f) for f in said["findings"]],
                history=said["history"],
                knowledge=[Entry.model_validate(e) for e in said["knowledge"]],
                budget=build(Budget, said["budget"]),
                incumbent=said["incumbent"],
                frozen=said["frozen"],
                attempt=number,
            )
        return None

    def reply(self, number: int, said: Series | Declined) -> None:
        """Answer, whole or not at all, once. Raises AlreadyAnswered."""
        data = {"declined": said.why, "final": said.final} if isinstance(said, Declined) else {"series": plain(said)}
        target = self.place / f"answer-{number}.json"
        try:
            data["key"] = json.loads((self.place / f"question-{number}.json").read_text("utf-8"))["key"]
        except FileNotFoundError:
            raise AlreadyAnswered(f"attempt {number} no longer waits for an answer") from None
        draft = self.place / f".answer-{number}.{os.getpid()}.{id(said)}"
        draft.write_text(json.dumps(data, ensure_ascii=False), "utf-8")
        try:
            os.link(draft, target)  # fails where the target exists, unlike a rename
        except FileExistsError:
            raise AlreadyAnswered(f"attempt {number} already has an answer") from None
        finally:
            draft.unlink(missing_ok=True)

    def count(self, name: str, most: int) -> int:
        """Count one use of `name` by any client; returns how many are left. Raises PermissionError when none is."""
        with self._counts() as counts:
            used = counts.get(name, 0)
            if used >= most:
                raise PermissionError(f"the run's budget of {most} {name} is spent")
            counts[name] = used + 1
            return most - used - 1

    @contextmanager
    def _counts(self) -> Iterator[dict[str, Any]]:
        self.place.mkdir(parents=True, exist_ok=True)
        with (self.place / "counts.json").open("a+", encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            handle.seek(0)
            counts = json.loads(handle.read() or "{}")
            yield counts
            handle.seek(0)
            handle.truncate()
            handle.write(json.dumps(counts))


def _key(question: dict[str, Any]) -> str:
    """What makes two questions the same: the code, what was tried on it, and what was found."""
    parts = (question["incumbent"], len(question["history"]), [f["id"] for f in question["findings"]])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
