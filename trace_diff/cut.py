"""Cut a few steps out of a large Kineto trace; what is kept stays byte for byte, so other tools load it too.

Events are kept as raw JSON text and never re-encoded: no rounding, no lost argument. Host events inside the
window stay, device events stay with the launch that caused them (not by time: an engine that runs ahead has
its device work outside the window). Not for: repairing damaged files (`ingest` reads those; a cut needs a
whole one), finding steps (`windows`). The last kept step ends with its last event, not with the next step;
steps that had to be inferred from repetition are marked, the only events that a cut adds.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trace_diff.ingest.schema import WORK_KINDS, kind_of
from trace_diff.types import Kind, Phase, Step

if TYPE_CHECKING:
    from trace_diff.ingest import Trace

_LAUNCHES = (Kind.RUNTIME, Kind.DRIVER)
_ON_DEVICE = (*WORK_KINDS, Kind.SYNC)
_BY_TIME = (Kind.PROFILER, Kind.PYTHON, Kind.GPU_ANNOTATION)  # no launch of their own, or around many


class CutError(ValueError):
    """The file cannot be cut; the message names the file and, where known, the byte."""


@dataclass(frozen=True, slots=True)
class CutReport:
    """What was kept. Stored in the new file under `hotloop_cut`, so a cut always says what it was cut from."""

    parent: str  # file name
    parent_sha256: str
    command: str
    steps: tuple[str, ...]  # names of the kept steps
    phases: tuple[str, ...]
    events: int
    parent_events: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Args(msgspec.Struct, gc=False):
    correlation: int | None = None


class _Event(msgspec.Struct, gc=False):
    ph: str
    cat: str | None = None
    ts: msgspec.Raw = msgspec.Raw(b"0")
    dur: msgspec.Raw = msgspec.Raw(b"0")
    id: int | str | None = None
    pid: int | str | None = None
    args: _Args | None = None


@dataclass(slots=True)
class _Row:
    """One event: its raw text and the few fields that decide whether it stays."""

    raw: msgspec.Raw
    ph: str
    kind: Kind
    start_ns: int
    end_ns: int
    correlation: int
    flow: int | str | None


def _ns(text: msgspec.Raw) -> int:
    """Microseconds as decimal text, exactly in nanoseconds."""
    return int(Decimal(bytes(text).decode().strip('"')) * 1000)


def read_json(path: Path) -> bytes:
    """The JSON text of a `.json` or `.json.gz`; errors name the file."""
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CutError(f"{path}: damaged gzip of {len(data)} bytes, {error}") from None


def read(path: Path) -> tuple[dict[str, msgspec.Raw], list[_Row]]:
    """Top-level fields and events of a whole file, for `keep`. Raises CutError."""
    top, raws = split(path)
    return top, list(_rows(path, raws))


def split(path: Path) -> tuple[dict[str, msgspec.Raw], list[msgspec.Raw]]:
    """Top-level fields but `traceEvents`, and the events, all as raw text.

    Raises CutError when the JSON is not whole, naming file and byte.
    """
    text = read_json(path)
    try:
        if text.lstrip()[:1] == b"[":
            return {}, msgspec.json.decode(text, type=list[msgspec.Raw])
        top = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        events = msgspec.json.decode(top.pop("traceEvents", b"[]"), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        where = "" if "byte" in str(error) else f" at byte {len(text)}"
        raise CutError(f"{path}: {error}{where}; only whole files can be cut") from None
    except UnicodeDecodeError as error:
        raise CutError(f"{path}: not UTF-8 at byte {error.start}; only whole files can be cut") from None
    return top, events


def _rows(path: Path, raws: Sequence[msgspec.Raw]) -> Iterator[_Row]:
    decoder, kind = msgspec.json.Decoder(_Event), cache(kind_of)
    for at, raw in enumerate(raws):
        try:
            event = decoder.decode(raw)
            start = _ns(event.ts)
            end = start + (_ns(event.dur) if event.ph == "X" else 0)
        except (msgspec.DecodeError, RecursionError, ArithmeticError, ValueError) as error:
            raise CutError(f"{path}: event {at} cannot be read: {error}") from None
        correlation = event.args.correlation if event.args else None
        yield _Row(raw, event.ph, kind(event.cat), start, end, -1 if correlation is None else correlation, event.id)


def keep(rows: Sequence[_Row], start_ns: int, end_ns: int) -> list[msgspec.Raw]:
    """Raw events of the host window [start_ns, end_ns) and of the device work that was launched in it.

    Device rows without a launch anywhere in the file are kept when they start in the window. Python frames
    that enclose the window stay whole (they name the call sites). Flow arrows stay if both ends may stay.
    """
    launches = {r.correlation for r in rows if r.kind in _LAUNCHES and r.correlation >= 0}
    inside = {
        r.correlation
        for r in rows
        if r.kind in _LAUNCHES and r.correlation >= 0 and start_ns <= r.start_ns < end_ns
    }

    def stays(r: _Row) -> bool:
        if r.ph == "M":
            return True
        if r.kind in _ON_DEVICE and r.correlation in launches:
            return r.correlation in inside
        if r.ph in "sft":
            return r.flow in inside or (r.flow not in launches and start_ns <= r.start_ns < end_ns)
        if r.kind in _BY_TIME:
            return r.start_ns < end_ns and r.end_ns > start_ns
        return start_ns <= r.start_ns < end_ns

    return [r.raw for r in rows if stays(r)]


def choose(steps: Sequence[Step], prefill: int, decode: int) -> list[Step]:
    """The first run of `decode` neighbouring decode steps, with the one before that launched two steps' work where there
    is one, and up to `prefill` prefill steps right before.

    Raises CutError when there is no such run.
    """
    order = sorted(steps, key=lambda s: s.start_ns)
    for at in range(len(order) if decode else 0):
        run = order[at : at + decode]
        if len(run) == decode and all(s.complete and s.phase in (Phase.DECODE, Phase.UNKNOWN) for s in run):
            if at and "doubled" in order[at - 1].flags:  # the run's work begins there
                at, run = at - 1, order[at - 1 : at + decode]
            before = order[max(0, at - prefill) : at]
            return [s for s in before if s.phase in (Phase.PREFILL, Phase.MIXED)] + run
    if decode == 0 and prefill:
        found = [s for s in order if s.phase is Phase.PREFILL][:prefill]
        if found:
            return found
    seen = ", ".join(f"{p}: {sum(s.phase is p for s in steps)}" for p in Phase)
    raise CutError(f"no {decode} neighbouring decode steps; the trace has {seen}")


def write(path: Path, top: dict[str, msgspec.Raw], events: Sequence[msgspec.Raw], report: CutReport) -> None:
    """Chrome trace JSON, gzip if the name ends in .gz; the same input gives the same bytes."""
    head = dict(top) | {"hotloop_cut": msgspec.Raw(msgspec.json.encode(report.to_json()))}
    parts = [b"{"]
    for key, raw in head.items():
        parts += [msgspec.json.encode(key), b": ", bytes(raw).strip(), b",\n"]
    parts.append(b'"traceEvents": [\n')
    parts.append(b",\n".join(msgspec.json.format(e, indent=-1) for e in events))
    parts.append(b"\n]}\n")
    data = b"".join(parts)
    if path.suffix == ".gz":
        data = gzip.compress(data, 9, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _begins(trace: Trace, step: Step) -> int:
    """Where the host begins a step: an engine that runs ahead does so before the step's wall window opens."""
    rows = step.rows[trace.events.device[step.rows] < 0]
    return int(trace.events.ts_ns[rows].min()) if len(rows) else step.start_ns


def _mark(trace: Trace, step: Step, shift: int, limit_ns: int) -> msgspec.Raw:
    """An annotation over the host part of a step that was inferred, in the grammar that `windows` reads."""
    e = trace.events
    rows = step.rows[e.device[step.rows] < 0]
    begin = int(e.ts_ns[rows].min())
    end = min(int((e.ts_ns[rows] + e.dur_ns[rows]).max()), limit_ns - 1)
    pid, tid = trace.tracks[int(np.bincount(e.track[rows]).argmax())]
    phase = step.phase if step.phase in (Phase.PREFILL, Phase.DECODE) else Phase.DECODE
    at = begin + shift
    return msgspec.Raw(
        b'{"ph":"X","cat":"user_annotation","name":%s,"pid":%s,"tid":%s,"ts":%d.%03d,"dur":%d.%03d}'
        % (
            msgspec.json.encode(f"step_{step.index}_{phase}"), msgspec.json.encode(pid), msgspec.json.encode(tid),
            at // 1000, at % 1000, (end - begin) // 1000, (end - begin) % 1000,
        )
    )  # fmt: skip


def cut(
    src: Path,
    out: Path,
    *,
    prefill: int = 1,
    decode: int = 4,
    control_step_us: float | None = None,
    command: str | None = None,
) -> CutReport:
    """Write the chosen steps of `src` to `out`. Raises CutError, naming the file and the reason.

    `control_step_us` (wall of a step of this cell without the profiler) is kept in the new file, where
    `api.analyse` looks for it.
    """
    from trace_diff import ingest, windows
    from trace_diff.ingest.trace import zero_ns

    top, rows = read(src)
    trace = ingest.load(src)
    every = sorted(windows.steps(trace), key=lambda s: s.start_ns)
    try:
        steps = choose(every, prefill, decode)
    except CutError as error:
        raise CutError(f"{src}: {error}") from None
    shift = trace.base_ns - zero_ns(trace.meta)  # columns start at the first event
    at = every.index(steps[-1]) + 1
    end = _begins(trace, every[at]) if at < len(every) else max(r.end_ns for r in rows) - shift + 1
    kept = keep(rows, _begins(trace, steps[0]) + shift, end + shift)
    if any("inferred" in s.flags for s in steps):
        # Too few repeats are left to find these steps again.
        bounds = [*(_begins(trace, s) for s in steps), end]
        kept += [_mark(trace, s, shift, bounds[i + 1]) for i, s in enumerate(steps)]
    report = CutReport(
        parent=src.name,
        parent_sha256=hashlib.sha256(src.read_bytes()).hexdigest(),
        command=command or f"trace-diff cut {src.name} --prefill {prefill} --decode {decode} -o {out.name}",
        steps=tuple(s.name for s in steps),
        phases=tuple(str(s.phase) for s in steps),
        events=len(kept),
        parent_events=len(rows),
    )
    if control_step_us is not None:
        top["control_step_us"] = msgspec.Raw(msgspec.json.encode(control_step_us))
    write(out, top, kept, report)
    return report
