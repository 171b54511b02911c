"""What can be asked for with `--target`, the traffic cells, and how a cell's streams become one number.

Every number is lower-is-better: a throughput is kept as microseconds per token, goodput as microseconds per
good request, memory as bytes. `PROTOCOLS` (re-exported by `measure.py`) are built here for the tiny model on
a CPU; `protocol_for` scales them to a device and to what was asked for. Not for: running anything
(`measure.py`), margins and alphas (`accept.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from optimizer.types import Cell, Protocol, Stream

# Prompt kinds: what `prompts.PromptSource.draw` is asked for.
KINDS = ("text", "repetitive", "code")
SLO_TTFT_FACTOR = 3.0  # a request is good while it stays within this many times arm a's own median
SLO_TPOT_FACTOR = 2.0

_CPU = {
    "decode": Cell("decode", 16, 17, requests=4),
    "long_decode": Cell("long_decode", 16, 96),
    "prefill": Cell("prefill", 384, 4, requests=3),
    "long_context": Cell("long_context", 768, 12),
    "batch8": Cell("batch8", 16, 8, concurrency=8, requests=8),
    "batch32": Cell("batch32", 16, 6, concurrency=32, requests=32),
    "mixed": Cell("mixed", 128, 8, concurrency=4, requests=8, kind="text"),
    "repetitive": Cell("repetitive", 64, 12, kind="repetitive"),
    "code": Cell("code", 64, 12, kind="code"),
    "poisson": Cell("poisson", 32, 6, concurrency=0, requests=12, arrivals_per_s=6.0),
}
_CUDA = {
    "decode": Cell("decode", 128, 129, requests=4),
    "long_decode": Cell("long_decode", 128, 384),
    "prefill": Cell("prefill", 4096, 8, requests=4),
    "long_context": Cell("long_context", 16000, 64),
    "batch8": Cell("batch8", 128, 64, concurrency=8, requests=8),
    "batch32": Cell("batch32", 128, 64, concurrency=32, requests=32),
    "mixed": Cell("mixed", 1024, 48, concurrency=8, requests=16),
    "repetitive": Cell("repetitive", 256, 64, kind="repetitive"),
    "code": Cell("code", 256, 64, kind="code"),
    "poisson": Cell("poisson", 256, 32, concurrency=0, requests=24, arrivals_per_s=8.0),
}
CELLS: dict[str, dict[str, Cell]] = {"cpu": _CPU, "cuda": _CUDA}
# The quick protocol on a GPU: an engine before its first patch needs 80 ms a step, and a lease is counted in minutes.
_SHORT = {"decode": Cell("decode", 128, 25, requests=2)}
BLOCK_S = 2.0  # the target cell is timed for at least so long, by the incumbent's pace ...
BLOCK_MOST = 8  # ... but never with more than so many times the protocol's requests
MIXED_SHARES = (0.25, 0.5, 1.0)  # prompt lengths of a `mixed` cell, in turn, as shares of prompt_tokens
_QUICK_GUARDS = ("batch4",)
_FULL_GUARDS = tuple(name for name in _CPU if name != "decode")

PROTOCOLS: dict[str, Protocol] = {
    "quick": Protocol(
        "quick", calibrate_pairs=4, screen_pairs=2, decide_pairs=6, confirm_pairs=8, headline_pairs=3,
        cell=_CPU["decode"], guard_cells=(Cell("batch4", 16, 8, concurrency=4, requests=4),), warmup_steps=16,
        full_gates=("swap", "shapes", "perturb", "delays"),
    ),
    "full": Protocol(
        "full", calibrate_pairs=6, screen_pairs=3, decide_pairs=6, confirm_pairs=6, headline_pairs=12,
        cell=_CPU["decode"], guard_cells=tuple(_CPU[n] for n in _FULL_GUARDS), warmup_steps=16,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """One way to read a cell. per: what `predicted_us` refers to; unit: of `Pair.a_us_per_token`."""

    name: str
    per: str
    unit: str
    says: str


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("tpot", "token", "us", "decode time per output token of one request: (last - first arrival) / (n - 1)"),
        Metric("ttft", "request", "us", "from sending a request to its first token"),
        Metric("token_wall", "token", "us", "wall time of the cell / tokens delivered: the inverse of throughput"),
        Metric("good_wall", "request", "us", "wall time of the cell / requests within their deadlines: inverse goodput"),
        Metric("memory", "engine", "bytes", "peak memory of all ranks"),
    )
}
TARGETS = ("tok/s", "tpot", "ttft", "throughput@C", "goodput@TTFT,TPOT", "memory")


def protocol_for(base: Protocol, target: str = "tok/s", device: str = "cpu") -> Protocol:
    """`base` with the cell and metric that `--target` asks for, and cells sized for the device.

    target: one of `TARGETS`; C is a concurrency, TTFT and TPOT are milliseconds. The cell that was the
    target of `base` becomes a guard when another takes its place. Errors: ValueError that names the valid
    forms, or the valid devices.
    """
    if device not in CELLS:
        raise ValueError(f"no traffic cells for device {device!r}; valid: {', '.join(CELLS)}")
    quick = base.name == "quick"
    cells = CELLS[device] | (_SHORT if quick and device == "cuda" else {})
    mine = cells.get(base.cell.name, base.cell)
    # On a GPU every length that is timed: a library may plan or compile for each one anew (cuDNN's attention does).
    steps = base.warmup_steps if device == "cpu" else mine.new_tokens - 1
    scaled = tuple(cells.get(c.name, c) for c in base.guard_cells)
    protocol = replace(base, cell=mine, guard_cells=scaled, warmup_steps=steps)
    cell, metric = _asked_for(target, cells)
    if cell.name == protocol.cell.name:
        return replace(protocol, metric=metric, cell=cell)
    guards = (protocol.cell, *(g for g in protocol.guard_cells if g.name != cell.name))
    return replace(protocol, cell=cell, metric=metric, guard_cells=guards)


def stated(target: str, measured: float) -> tuple[float, str, bool]:
    """(value, unit, more is better) of a target as a person states it, from what a pair measures (us or bytes)."""
    if target == "memory":
        return measured / 2**20, "MiB", False
    if target in ("ttft", "tpot"):
        return measured / 1e3, "ms", False
    return 1e6 / measured, "requests/s" if target.startswith("goodput") else "tok/s", True


def sized(protocol: Protocol, token_us: float | None) -> Protocol:
    """`protocol` with enough requests in its target cell to time an engine of `token_us` for `BLOCK_S`.

    Both arms of a pair get the same cell, sized by the incumbent alone. A fast engine would else be timed for a
    fraction of a second, in which one hiccup of the machine is a tenth of the result. Never fewer requests than the
    protocol has; an open-loop cell stays as it is.
    """
    cell = protocol.cell
    if not token_us or cell.arrivals_per_s is not None:
        return protocol
    each = max(1, cell.concurrency)
    rounds = math.ceil(BLOCK_S * 1e6 / (token_us * cell.new_tokens))
    fewest = -(-cell.requests // each)
    return replace(protocol, cell=replace(cell, requests=each * min(max(rounds, fewest), BLOCK_MOST * fewest)))


def _asked_for(target: str, cells: dict[str, Cell]) -> tuple[Cell, str]:
    if target in ("tok/s", "tpot"):
        return cells["decode"], "tpot"
    if target == "ttft":
        return cells["prefill"], "ttft"
    if target == "memory":
        return cells["decode"], "memory"
    if match := re.fullmatch(r"throughput@([1-9][0-9]{0,3})", target):
        c = int(match[1])
        return replace(cells["batch8"], name=f"batch{c}", concurrency=c, requests=c), "token_wall"
    if match := re.fullmatch(r"goodput@([0-9.]+),([0-9.]+)", target):
        return replace(cells["poisson"], slo_ms=(float(match[1]), float(match[2]))), "good_wall"
    raise ValueError(f"unknown target {target!r}; valid: {', '.join(TARGETS)}")


# --- from streams to numbers ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """One cell as one arm ran it."""

    cell: Cell
    streams: tuple[Stream, ...]
    rounds_ns: tuple[int, ...]  # wall of each round, first send to last arrival


def tpot_us(stream: Stream) -> float:
    """(last - first arrival) / (n - 1).

    Not the median gap: an engine that hands out tokens in bursts would get a median of zero. What it hides
    before the first token, TTFT shows. Errors: ValueError for fewer than two tokens.
    """
    if len(stream.arrivals_ns) < 2:
        raise ValueError("TPOT needs at least two tokens")
    return (stream.arrivals_ns[-1] - stream.arrivals_ns[0]) / (len(stream.arrivals_ns) - 1) / 1e3


def ttft_us(stream: Stream) -> float:
    return (stream.arrivals_ns[0] - stream.sent_ns) / 1e3


def gaps_us(streams: Sequence[Stream]) -> list[float]:
    """Every gap between neighbouring tokens of every stream."""
    return [(b - a) / 1e3 for s in streams for a, b in zip(s.arrivals_ns, s.arrivals_ns[1:], strict=False)]


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile: always a value that was measured."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(-(-q * len(ordered) // 1)) - 1))]


def slo_us(timed: Timed) -> tuple[float, float]:
    """(TTFT, TPOT) deadlines: the cell's own, else multiples of this arm's medians."""
    if timed.cell.slo_ms is not None:
        return timed.cell.slo_ms[0] * 1e3, timed.cell.slo_ms[1] * 1e3
    ttft, tpot = median(map(ttft_us, timed.streams)), median(map(tpot_us, timed.streams))
    return SLO_TTFT_FACTOR * ttft, SLO_TPOT_FACTOR * tpot


def missed_fraction(timed: Timed, slo: tuple[float, float]) -> float:
    """Share of requests that missed a deadline; an unfinished one never gets here (all must finish)."""
    missed = [s for s in timed.streams if ttft_us(s) > slo[0] or tpot_us(s) > slo[1]]
    return len(missed) / len(timed.streams)


def value(metric: str, timed: Timed, memory_bytes: float) -> float:
    """The target's number for one arm. Errors: KeyError for an unknown metric."""
    wall_us = sum(timed.rounds_ns) / 1e3
    if metric == "memory":
        return memory_bytes
    if metric == "tpot":
        return median(map(tpot_us, timed.streams))
    if metric == "ttft":
        return median(map(ttft_us, timed.streams))
    if metric == "token_wall":
        return wall_us / sum(len(s.token_ids) for s in timed.streams)
    if metric == "good_wall":
        good = len(timed.streams) * (1 - missed_fraction(timed, slo_us(timed)))
        return wall_us / max(good, 0.5)  # none good: worse than one good, and still a number to compare
    raise KeyError(f"unknown metric {metric!r}; valid: {', '.join(METRICS)}")


def guard_values(timed: Timed, slo: tuple[float, float], target: bool) -> dict[str, float]:
    """The guards of one cell. slo: arm a's, for both arms.

    The target cell guards its TTFT and tail; a batch or open-loop cell its throughput and TTFT; a
    single-stream cell its TPOT and TTFT. A batch of one round has its TTFT in its wall already. Few on
    purpose: every guard costs power.
    """
    name, streams = timed.cell.name, timed.streams
    ttfts = [ttft_us(s) for s in streams]
    one_round = timed.cell.concurrency > 1 and len(timed.rounds_ns) == 1
    found = {} if one_round and not target else {f"{name}.ttft_p50_us": median(ttfts)}
    gaps = gaps_us(streams)
    if target:
        found[f"{name}.ttft_p95_us"] = quantile(ttfts, 0.95)
        tail = 0.99 if len(gaps) >= 200 else 0.95
        found[f"{name}.gap_p{tail * 100:.0f}_us"] = quantile(gaps, tail)
    if timed.cell.arrivals_per_s is not None:
        found[f"{name}.missed_fraction"] = missed_fraction(timed, slo)
        found[f"{name}.ttft_p95_us"] = quantile(ttfts, 0.95)
    elif timed.cell.concurrency > 1:
        found[f"{name}.token_wall_us"] = sum(timed.rounds_ns) / 1e3 / sum(len(s.token_ids) for s in streams)
    elif not target:
        found[f"{name}.tpot_p50_us"] = median(map(tpot_us, streams))
    return found
