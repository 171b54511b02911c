"""A run's state, read out of its ledger: pure functions over lines, nothing kept beside them.

Because every decision is taken from these, a run that was killed and one that was not go on alike. Not for:
writing (ledger.py), or judging (accept.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from optimizer.ledger import Line
from optimizer.serial import build
from optimizer.types import Calibration, Pair, RejectReason, Stage, Verdict

VERDICTS = {
    "accepted": Verdict.ACCEPT,
    "rejected": Verdict.REJECT,
    "undecided": Verdict.UNDECIDED,
    "parked": Verdict.PARKED,
}
# What a proposer may be told in words: the rest would let it learn hidden prompts or gates.
_OPEN_REASONS = {
    None,  # undecided: what was resolved and what was not
    *(RejectReason.DECLINED, RejectReason.SCOPE, RejectReason.POLICY, RejectReason.BOOT, RejectReason.NO_GAIN, RejectReason.NOT_ACTIVATED),
}  # fmt: skip


@dataclass(slots=True)
class Attempt:
    """The lines of one attempt, in order."""

    number: int
    lines: list[Line] = field(default_factory=list)

    def data(self, kind: str) -> list[dict[str, Any]]:
        return [line["data"] for line in self.lines if line["kind"] == kind]

    @property
    def end(self) -> Line | None:
        """The verdict's line; None while the attempt is open."""
        return next((line for line in self.lines if line["kind"] in VERDICTS), None)

    @property
    def verdict(self) -> Verdict | None:
        return VERDICTS[self.end["kind"]] if self.end else None

    @property
    def key(self) -> str | None:
        """AST hash of the program that was judged: what alpha is booked on."""
        proposed = self.data("proposed")
        return proposed[-1]["ast_hash"] if proposed else None

    def gates_passed(self, stage: str, member: int) -> bool:
        return any(g["stage"] == stage and g["gate"] == "all" and g["member"] == member and g["passed"]
                   for g in self.data("gate"))  # fmt: skip


def attempts(lines: Iterable[Line]) -> list[Attempt]:
    """Every attempt that was proposed, by number."""
    found: dict[int, Attempt] = {}
    for line in lines:
        if line["attempt"] is not None:
            found.setdefault(line["attempt"], Attempt(line["attempt"])).lines.append(line)
    return [found[n] for n in sorted(found) if found[n].data("proposed")]


def open_attempt(lines: Iterable[Line]) -> Attempt | None:
    """The attempt that was proposed and has no verdict yet."""
    return next((a for a in attempts(lines) if a.end is None), None)


def admitted(attempt: Attempt) -> bool:
    """Whether a person admitted this patch after an earlier attempt had been parked."""
    return any(data.get("admits") is not None for data in attempt.data("proposed"))


def waiting(lines: Iterable[Line]) -> int | None:
    """The parked attempt that a person admitted and that has not been tried again yet."""
    asked, tried = [], set()
    for line in lines:
        if line["kind"] == "reviewed" and line["data"].get("decision") == "admit":
            asked.append(line["attempt"])
        elif line["kind"] == "proposed":
            tried.add(line["data"].get("admits"))
    return next((number for number in asked if number not in tried), None)


def incumbent(lines: Iterable[Line], base: str) -> str:
    """Commit of the last accepted patch, or the snapshot."""
    found = base
    for line in lines:
        if line["kind"] == "accepted" or (line["kind"] == "decided" and line["data"].get("incumbent")):
            found = line["data"].get("incumbent") or line["data"]["commit"]
    return found


def pairs(lines: Iterable[Line], stage: Stage, key: str, incumbent_commit: str | None) -> list[Pair]:
    """All pairs of a stage ever taken of one program against one incumbent, whichever attempt took them."""
    fields = Pair.__slots__
    return [
        build(Pair, {name: line["data"][name] for name in fields if name in line["data"]})
        for line in lines
        if line["kind"] == "pair"
        and line["data"]["stage"] == stage
        and line["data"]["key"] == key
        and line["incumbent_commit"] == incumbent_commit
    ]


def calibration(lines: Iterable[Line]) -> Calibration | None:
    found = [line["data"] for line in lines if line["kind"] == "calibrated"]
    return build(Calibration, {k: v for k, v in found[-1].items() if k in Calibration.__slots__}) if found else None


def captured(lines: Iterable[Line], tree: str) -> dict[str, Any] | None:
    """The latest capture of a tree, by its git tree id: a commit that only changed its words needs no new one."""
    found = [line["data"] for line in lines if line["kind"] == "captured" and line["data"].get("tree") == tree]
    return found[-1] if found else None


def captured_as(lines: Sequence[Line], commit: str | None) -> dict[str, Any] | None:
    """The capture of an incumbent: by its commit, else of the attempt that made it one (it was captured before it was
    rewritten with its trailers), else the first engine's where nothing was accepted by then."""
    own = [line for line in lines if line["kind"] == "captured" and not line["data"].get("reference")]
    found = [line["data"] for line in own if line["data"].get("commit") == commit]
    made = next((line["attempt"] for line in lines if line["kind"] == "accepted" and line["data"].get("commit") == commit), None)
    found = found or [line["data"] for line in own if made is not None and line["attempt"] == made]
    return found[-1] if found else None


def token_us(lines: Sequence[Line]) -> float | None:
    """The incumbent's wall microseconds per token, by the latest pairs that timed it unprofiled."""
    value = None
    confirmed: dict[int, float] = {}
    for line in lines:
        data = line["data"]
        if line["kind"] == "pair" and data["stage"] == Stage.CALIBRATE and not data["discarded"]:
            value = data["b_us_per_token"]
        elif line["kind"] == "confirmed" and data.get("b_us") is not None:
            confirmed[line["attempt"]] = data["b_us"]
        elif line["kind"] == "accepted":
            value = confirmed.get(line["attempt"], value)
        elif line["kind"] == "captured" and value is None:
            value = data.get("control_us_per_token")
    return value


def adopted_us(lines: Sequence[Line]) -> float | None:
    """`token_us` as it was when the incumbent became one: it does not move while that engine is the incumbent."""
    return token_us([line for line in lines if line["kind"] != "pair"])


def speedup(lines: Iterable[Line]) -> float:
    """Product of the accepted patches' confirmed ratios (first engine / incumbent); 1.0 when none was accepted."""
    ratio: dict[int, float] = {}
    total = 1.0
    for line in lines:
        if line["kind"] == "confirmed":
            ratio[line["attempt"]] = line["data"]["ratio"]
        elif line["kind"] == "accepted":
            total /= ratio[line["attempt"]]
    return total


def consecutive_rejections(lines: Iterable[Line]) -> int:
    """Attempts since the last accepted one, parked ones not counted."""
    count = 0
    for line in lines:
        if line["kind"] == "accepted":
            count = 0
        elif line["kind"] in ("rejected", "undecided"):
            count += 1
    return count


def usd(lines: Iterable[Line]) -> float:
    return sum(line["data"].get("usd") or 0.0 for line in lines if line["kind"] in ("proposed", "budget"))


def wall_s(lines: Sequence[Line]) -> float:
    """Seconds that earlier processes worked on the run: from each start or resumption to its last line."""
    total = 0.0
    start = last = None
    for line in lines:
        if line["data"].get("discarded") == "interrupted":
            continue  # entered by the process that found it: the time between was nobody's
        if line["kind"] == "reviewed":
            continue  # by a person, perhaps days later
        at = datetime.fromisoformat(line["t_utc"])
        if line["kind"] in ("run_started", "resumed"):
            total += (last - start).total_seconds() if start and last else 0.0
            start = at
        last = at
    return total + ((last - start).total_seconds() if start and last else 0.0)


def device_s(lines: Iterable[Line]) -> float:
    """Seconds in which an engine was up: captures, gates and pairs."""
    return sum(line["data"].get("seconds") or 0.0 for line in lines if line["kind"] in ("captured", "gate", "pair")
               and line["data"].get("gate") != "all")  # fmt: skip


def history(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """What a proposer may know of earlier attempts: `proposers.base.HistoryItem`, oldest first."""
    return [_item(attempt) for attempt in attempts(lines) if attempt.end is not None]


def _item(attempt: Attempt) -> dict[str, Any]:
    assert attempt.end is not None
    end, proposed = attempt.end["data"], attempt.data("proposed")[-1]
    reason = end.get("reason")
    measured = next((d for kind in ("confirmed", "decided", "screened") for d in attempt.data(kind)), None)
    return {
        "attempt": attempt.number,
        "verdict": str(attempt.verdict),
        "reason": reason,
        "detail": (end.get("detail") or "") if reason in _OPEN_REASONS else "",
        "stage": end.get("stage") or "",
        "mechanism": proposed["mechanism"],
        "finding_ids": proposed["finding_ids"],
        "params": proposed.get("params") or {},
        "ast_hash": proposed["ast_hash"],
        "patch_sha": proposed["patch_sha"],
        "incumbent_commit": attempt.end["incumbent_commit"],
        "token_us": proposed.get("token_us"),
        "predicted_us": proposed["predicted_us"],
        "measured_ratio_ci95": measured["ci95"] if measured else None,
    }
