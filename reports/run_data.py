"""Read a run folder into what a report shows: attempts, their pairs and verdicts, the headline, how it was judged.

Only `ledger.jsonl` and `run.json` are read here (traces are read where they are drawn), and every number is
either a field of a ledger line or computed from pair lines in this file, so that it can be recomputed. A run
that was stopped anywhere still reads: what has not happened is None. Not for: checking the hash chain's
meaning (`optimize verify`), drawing.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OUTCOMES = ("accepted", "rejected", "undecided", "parked")
_STAGES = {"screened": "screen", "decided": "decide", "confirmed": "confirm"}


class RunError(ValueError):
    """The run folder cannot be reported on; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What pairs of one stage say, computed from their pair lines."""

    pairs: int
    discarded: int
    a_us: float | None  # median microseconds per token of the incumbent
    b_us: float | None  # median of the candidate
    ratio: float | None  # candidate time / incumbent time: geometric mean over pairs; < 1 is faster
    ci95: tuple[float, float] | None  # of the ratio, t interval over log-ratios; None below two pairs

    @property
    def saved_us(self) -> float | None:
        """Difference of the arms' medians: what DESIGN calls measured."""
        return None if self.a_us is None or self.b_us is None else self.a_us - self.b_us


@dataclass(slots=True)
class Attempt:
    """One attempt, gathered from its ledger lines in order."""

    number: int
    proposed: list[dict[str, Any]] = field(default_factory=list)  # one per patch of a series
    gates: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)  # screen, decide, confirm -> ledger data
    outcome: str = "unfinished"
    verdict: dict[str, Any] = field(default_factory=dict)  # data of the accepted/rejected/... line
    incumbent: str | None = None
    started: str | None = None
    ended: str | None = None
    patches: list[dict[str, Any]] = field(default_factory=list)  # from attempts/<n>/patch.json

    @property
    def mechanism(self) -> str:
        names = [str(p.get("mechanism") or "?") for p in self.proposed]
        return " + ".join(dict.fromkeys(names)) or str(self.verdict.get("mechanism") or "no patch")

    @property
    def predicted_us(self) -> float | None:
        """Of the whole series, which is measured at its end: as entered by the judge, else the members' sum."""
        for data in (self.verdict, *self.stages.values()):
            if _is_number(data.get("predicted_us")):
                return float(data["predicted_us"])
        values = [p["predicted_us"] for p in self.proposed if _is_number(p.get("predicted_us"))]
        return float(sum(values)) if values else None

    @property
    def per(self) -> str:
        return str(self.proposed[-1].get("per", "token")) if self.proposed else "token"

    @property
    def key(self) -> str | None:
        """AST hash of the judged program: the end of the series."""
        return self.proposed[-1].get("ast_hash") if self.proposed else None

    @property
    def finding_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(f) for p in self.proposed for f in p.get("finding_ids") or ()))

    def measured(self, stage: str = "confirm") -> Measured:
        """One stage by its pair lines; ratio, interval and medians as the judge entered them, where it did."""
        said = self.stages.get(stage, {})
        if stage == "confirm" and self.outcome == "accepted":
            said = said | {k: self.verdict[k] for k in ("ratio", "ci95") if self.verdict.get(k) is not None}
        return judged(measure(p for p in self.pairs if p.get("stage") == stage and p.get("key") in (None, self.key)), said)

    @property
    def best_measured(self) -> tuple[str, Measured] | None:
        """The latest stage that has pairs, and what they say."""
        for stage in ("confirm", "decide", "screen"):
            found = self.measured(stage)
            if found.ratio is not None:
                return stage, found
        return None

    @property
    def reason(self) -> str:
        data = self.verdict
        return str(data.get("reason") or data.get("why") or data.get("detail") or "")

    @property
    def detail(self) -> str:
        return str(self.verdict.get("detail") or self.verdict.get("why") or "")

    @property
    def where(self) -> str:
        """The stage that ended the attempt."""
        return str(self.verdict.get("stage") or (list(self.stages)[-1] if self.stages else ""))


@dataclass(slots=True)
class Run:
    """Everything a report needs of one run."""

    directory: Path
    info: dict[str, Any]  # run.json
    lines: list[dict[str, Any]]
    attempts: list[Attempt]
    kinds: dict[str, list[dict[str, Any]]]  # kind -> data of its lines, in order
    ledger_sha256: str  # of the file
    last_hash: str | None
    chain_ok: bool | None  # None: an empty ledger
    dropped: int  # torn or unreadable lines

    def first(self, kind: str) -> dict[str, Any]:
        return (self.kinds.get(kind) or [{}])[0]

    def last(self, kind: str) -> dict[str, Any]:
        return (self.kinds.get(kind) or [{}])[-1]

    @property
    def id(self) -> str:
        return str(self.info.get("id") or self.info.get("run_id") or self.directory.name)

    @property
    def headline(self) -> Measured | None:
        """The present engine against the first one: from its own headline pairs, None when none were run. A run that went on
        after its end has those of an earlier engine, too."""
        key = f"headline/{self.lines[-1].get('incumbent_commit')}" if self.lines else None
        found = measure(p for p in self.kinds.get("pair", ()) if p.get("stage") == "headline" and p.get("key", key) == key)
        said = self.last("finished").get("headline")
        found = judged(found, said if isinstance(said, dict) else {})
        return found if found.ratio is not None else None

    @property
    def ablations(self) -> list[dict[str, Any]]:
        """What leaving one accepted patch (or hunks of it) out did, as entered at the end of the run."""
        return [d for d in self.kinds.get("decided", ()) if d.get("stage") == "ablate"]

    @property
    def product(self) -> Measured | None:
        """Product of the accepted attempts' confirmed ratios: shown, and named so, where no headline exists."""
        ratios = [m[1].ratio for a in self.accepted if (m := a.best_measured) and m[1].ratio is not None]
        if not ratios:
            return None
        return Measured(len(ratios), 0, None, None, math.prod(ratios), None)

    @property
    def accepted(self) -> list[Attempt]:
        return [a for a in self.attempts if a.outcome == "accepted"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def measure(pairs: Iterable[dict[str, Any]]) -> Measured:
    """Medians, geometric-mean ratio and its 95 % t interval over pair lines; discarded pairs do not count."""
    rows = list(pairs)
    good = [
        (float(p["a_us_per_token"]), float(p["b_us_per_token"]))
        for p in rows
        if not p.get("discarded")
        and all(_is_number(p.get(k)) and p[k] > 0 for k in ("a_us_per_token", "b_us_per_token"))
    ]
    if not good:
        return Measured(0, len(rows), None, None, None, None)
    logs = [math.log(b / a) for a, b in good]
    mean = statistics.fmean(logs)
    ci = None
    if len(logs) >= 2:
        from scipy.stats import t  # heavy; only a report with pairs needs it

        half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
        ci = (math.exp(mean - half), math.exp(mean + half))
    return Measured(
        len(good),
        len(rows) - len(good),
        statistics.median(a for a, _ in good),
        statistics.median(b for _, b in good),
        math.exp(mean),
        ci,
    )


def judged(found: Measured, said: dict[str, Any]) -> Measured:
    """`found` with what the ledger says of ratio, interval and medians in its place: the judge pools its noise over pairs."""
    ratio, ci = said.get("ratio"), said.get("ci95")
    if not found.pairs or not isinstance(ratio, int | float) or not _is_number(ratio):
        return found
    interval = found.ci95
    if isinstance(ci, list | tuple) and len(ci) == 2 and all(_is_number(c) and c > 0 for c in ci):
        interval = (float(ci[0]), float(ci[1]))
    a, b = (float(said[k]) if _is_number(said.get(k)) and said[k] > 0 else own for k, own in (("a_us", found.a_us), ("b_us", found.b_us)))
    return Measured(found.pairs, found.discarded, a, b, float(ratio), interval)


def _ledger(path: Path) -> tuple[list[dict[str, Any]], bytes, int]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{path}: no such file; is this a run folder?") from None
    lines, dropped = [], 0
    for text in raw.splitlines():
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError):
            dropped += 1  # a torn last line of a killed run, or damage: counted and shown
            continue
        if isinstance(line, dict):
            lines.append(line)
        else:
            dropped += 1
    return lines, raw, dropped


def chain(lines: list[dict[str, Any]]) -> bool | None:
    """Whether every line's `hash` is the sha256 of the line without it, and `prev` the one before."""
    if not lines:
        return None
    before = lines[0].get("prev")
    for line in lines:
        rest = {k: v for k, v in line.items() if k != "hash"}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if line.get("hash") != hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() or line.get("prev") != before:
            return False
        before = line["hash"]
    return True


def _attempts(directory: Path, lines: list[dict[str, Any]]) -> list[Attempt]:
    found: dict[int, Attempt] = {}
    ends: dict[int, int] = {}  # line of an attempt's verdict
    for at, line in enumerate(lines):
        number, kind = line.get("attempt"), line.get("kind")
        data = _data(line)
        if not isinstance(number, int) or isinstance(number, bool):
            continue
        if kind not in ("proposed", "gate", "pair", *_STAGES, *_OUTCOMES):
            continue
        attempt = found.setdefault(number, Attempt(number))
        attempt.started = attempt.started or line.get("t_utc")
        attempt.ended = line.get("t_utc")
        if kind == "proposed":
            attempt.proposed.append(data)
            attempt.incumbent = line.get("incumbent_commit")
        elif kind == "gate":
            if data.get("gate") != "all":  # the loop's own mark that a whole stage passed
                attempt.gates.append(data)
        elif kind == "pair":
            attempt.pairs.append(data | {"incumbent": line.get("incumbent_commit"), "line": at})
        elif kind in _STAGES:
            if data.get("member") is None and data.get("stage", _STAGES[kind]) == _STAGES[kind]:
                attempt.stages[_STAGES[kind]] = data
        else:
            attempt.outcome, attempt.verdict = str(kind), data
            ends[number] = at
    booked = [p for a in found.values() for p in a.pairs]
    for attempt in found.values():
        if attempt.key and any(p.get("key") == attempt.key for p in booked):
            # Alpha is booked on the program: a retry against the same incumbent goes on with the pairs it has. Those that
            # were taken after an attempt had ended are another's.
            last = ends.get(attempt.number, len(lines))
            attempt.pairs = [
                p for p in booked if p.get("key") == attempt.key and p.get("incumbent") == attempt.incumbent and p["line"] < last
            ]
        attempt.patches = _patches(directory / "attempts" / str(attempt.number) / "patch.json")
    return [found[n] for n in sorted(found)]


def _data(line: dict[str, Any]) -> dict[str, Any]:
    data = line.get("data")
    return data if isinstance(data, dict) else {}


def _patches(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(path.read_text("utf-8", errors="replace"))
    except (OSError, json.JSONDecodeError):
        return []
    if isinstance(data, dict):
        data = data.get("patches") or [data]
    return [p for p in data if isinstance(p, dict)] if isinstance(data, list) else []


def read(directory: Path) -> Run:
    """Read a run folder. Raises RunError when there is no ledger or run.json is not JSON."""
    lines, raw, dropped = _ledger(directory / "ledger.jsonl")
    info: dict[str, Any] = {}
    path = directory / "run.json"
    if path.exists():
        try:
            info = json.loads(path.read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise RunError(f"{path}: not JSON at byte {error.pos}: {error.msg}") from None
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(str(line.get("kind")), []).append(_data(line))
    return Run(
        directory=directory,
        info=info,
        lines=lines,
        attempts=_attempts(directory, lines),
        kinds=kinds,
        ledger_sha256=hashlib.sha256(raw).hexdigest(),
        last_hash=lines[-1].get("hash") if lines else None,
        chain_ok=chain(lines),
        dropped=dropped,
    )
