"""G19: memory, open files, threads and processes stay flat over 600 requests and near the incumbent's.

All read from outside (/proc, control group). The traffic is mixed (`mixed.py`) and all of it is judged: state that
accumulates over requests shows in tokens. The leak test runs on a small cache where the target has one: pages of a large
one become resident only as they are first used, which looks like a leak. Not for: speed.
"""

from __future__ import annotations

import itertools
import time
from statistics import median

from optimizer.confine import procfs
from optimizer.confine.launch import Server
from optimizer.gates import mixed, perturb, races
from optimizer.gates.context import Lab, Setup, ask, failed, parked, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

REQUESTS, BATCH = 600, mixed.BATCH
WARM = 2  # batches before the first census: an allocator grows while it meets new sizes
SLOPE_BYTES = 32 << 10  # resident growth a request that is still no leak
FLAT_BYTES = 8 << 20  # growth of files in memory that is none
PAGED_SLOPE_BYTES = 1 << 20  # of each rank, where cache pages are still being touched for the first time
GROWTH = {"fds": 8, "threads": 4, "processes": 0, "stored_bytes": FLAT_BYTES}
MORE_THREADS = 4
SETTLE_S = 3.0
LEAST_WORK = 0.1  # of the busiest rank's CPU time
FACTOR, ALLOWANCE_BYTES = 1.10, 64 << 20  # against the incumbent


def ranks(lab: Lab) -> GateResult:
    """At the TP that is optimised: files, threads and processes, mixed traffic, and what is needed to compare with."""
    setup = perturb.perturbed(lab)
    server = lab.server(setup)
    got = mixed.Mixed()
    seen, worked = [server.census()], _work(server)
    seen += _two_parts(lab, setup, server, got, seen[0])
    lab.notes["census"] = _held(seen[1:])
    result = _flat("resources", seen, PAGED_SLOPE_BYTES * setup.tp, warm=1)  # long prompts touch pages of a large cache
    if result.passed and (idle := _idle_rank(lab, setup, worked, _work(server))):
        return parked("resources", "G18", RejectReason.WITNESS, idle, **result.facts)
    return _with_tokens(lab, setup, got, result, f"at TP {setup.tp}")


def _two_parts(lab: Lab, setup: Setup, server: Server, got: mixed.Mixed, before: dict[str, int]) -> list[dict[str, int]]:
    """Mixed traffic twice, long prompts in the first part; a census after each."""
    seen = []
    for part in range(2):
        mixed.send(lab, setup, f"ranks{part}", got, long=part == 0)
        seen.append(settled(server, before))
    return seen


def _held(seen: list[dict[str, int]]) -> dict[str, int]:
    """The last census, with the least memory of any: an allocator may give back late."""
    return seen[-1] | {"rss_bytes": min(now["rss_bytes"] for now in seen)}


def _work(server: Server) -> list[float]:
    """CPU seconds of each rank so far."""
    return [procfs.cpu_s(pid) for pid in server.ranks()]


def _idle_rank(lab: Lab, setup: Setup, before: list[float], after: list[float]) -> str | None:
    """Ranks share the work. Judged on a CPU only, and only where the engine has one process for each rank."""
    if lab.on_gpu or setup.tp == 1 or not len(before) == len(after) == setup.tp:
        return None
    spent = [b - a for a, b in zip(before, after, strict=True)]
    if min(spent) >= LEAST_WORK * max(spent):
        return None
    return f"one rank worked {min(spent):.2f} s while another worked {max(spent):.2f} s: the work is not shared"


def leak(lab: Lab) -> GateResult:
    """Many requests at one rank: nothing grows, and answers are still right."""
    setup = races.poisoned(lab)
    server = lab.server(setup)
    got = mixed.Mixed()
    for part in range(WARM):
        mixed.send(lab, setup, f"warm{part}", got)
    seen = [server.census()]
    for part in range(REQUESTS // BATCH):
        mixed.send(lab, setup, f"many{part}", got)
        seen.append(settled(server, seen[0]))
    result = _flat("leak", seen, SLOPE_BYTES if setup.small_cache else PAGED_SLOPE_BYTES)
    late = ask(server, [Request(p, 6) for p in lab.draw("late", 3, [12, 18, 30], kinds=("random",))])
    got.greedy += late
    return _with_tokens(lab, setup, got, result, f"within {REQUESTS + WARM * BATCH} requests")


def _with_tokens(lab: Lab, setup: Setup, got: mixed.Mixed, flat: GateResult, what: str) -> GateResult:
    """Growth is told before wrong tokens: it may be their cause."""
    if not flat.passed:
        return flat
    tokens = mixed.judge(lab, setup, got, flat.gate, what)
    return passed(flat.gate, "G19 G12 G13", **(flat.facts | tokens.facts)) if tokens.passed else tokens


def settled(server: Server, before: dict[str, int]) -> dict[str, int]:
    """A census once connections that have ended are closed: on a busy machine that takes a server a moment."""
    until = time.monotonic() + SETTLE_S
    while True:
        now = server.census()
        if all(now[what] <= before[what] + GROWTH[what] for what in ("fds", "threads")) or time.monotonic() > until:
            return now
        time.sleep(0.02)


def _flat(gate: str, seen: list[dict[str, int]], most: int, warm: int = 0) -> GateResult:
    """Counts stay as they were, and memory does not grow from census to census, the first `warm` left out.

    An allocator grows and shrinks in jumps, a leak grows all the time: judged is the median of the slopes between any
    two censuses (Theil and Sen). What grows once is held by a bound on the total.
    """
    before, after = seen[0], seen[-1]
    resident = list(enumerate(now["rss_bytes"] for now in seen[warm:]))
    slope = median((y - x) / (j - i) for (i, x), (j, y) in itertools.combinations(resident, 2)) / BATCH
    total = after["rss_bytes"] - before["rss_bytes"]
    facts = {"before": before, "after": after, "slope_bytes": slope}
    wrong = next(
        (
            f"{what} went from {before[what]} to {after[what]}"
            for what, more in GROWTH.items()
            if after[what] > before[what] + more
        ),
        None,
    )
    if slope > most or total > 4 * most * BATCH * (len(seen) - 1):
        wrong = f"memory grows by {slope / 1024:.0f} KiB a request, {total >> 20} MiB in all"
    return (
        failed(gate, "G19", RejectReason.RESOURCES, wrong, **facts) if wrong else passed(gate, "G19", **facts)
    )


def against_incumbent(lab: Lab) -> GateResult:
    """Memory of all ranks against the incumbent's, which `startup.py` has started."""
    mine = lab.notes.get("census")
    if lab.on_gpu:
        return passed("memory", "G19", "left to the guards of the timed pairs: another launch is dear here")
    if mine is None:
        return passed("memory", "G19", "not compared: the candidate's memory was not taken")
    setup = lab.setup(arm="incumbent", weights="perturbed")
    server = lab.server(setup)
    theirs = _held(_two_parts(lab, setup, server, mixed.Mixed(), mine))
    facts = {name: (mine[name], theirs[name]) for name in theirs}
    wrong = None
    for what, kind in (("rss_bytes", "resident"), ("stored_bytes", "in files of memory"), ("peak_bytes", "at the most")):
        if mine[what] > FACTOR * theirs[what] + ALLOWANCE_BYTES:
            wrong = wrong or f"{mine[what] >> 20} MiB {kind}, the incumbent {theirs[what] >> 20} MiB"
    for what, more in (("processes", 0), ("threads", MORE_THREADS)):
        if mine[what] > theirs[what] + more:
            wrong = wrong or f"{mine[what]} {what}, the incumbent {theirs[what]}"
    if wrong:
        return failed("memory", "G19", RejectReason.RESOURCES, wrong, **facts)
    return passed("memory", "G19", **facts)
