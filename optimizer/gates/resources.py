"""G19: memory, open files, threads and processes stay flat over 300 requests and near the incumbent's.

All read from outside (/proc). Afterwards tokens are checked once more: state that accumulates over requests shows in
them. The leak test runs on a small cache where the target has one: pages of a large
one become resident only as they are first used, which looks like a leak. Not for: speed.
"""

from __future__ import annotations

import itertools
from statistics import median

from optimizer.gates import perturb, races, streams
from optimizer.gates.context import Failed, Lab, Setup, ask, failed, passed
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

REQUESTS, BATCH = 300, 60
SLOPE_BYTES = 32 << 10  # resident growth a request that is still no leak
FLAT_BYTES = 8 << 20  # growth over the whole run that is noise of the allocator
PAGED_SLOPE_BYTES = 1 << 20  # where cache pages are still being touched for the first time
MORE_FILES, MORE_THREADS = 8, 4
FACTOR, ALLOWANCE_BYTES = 1.10, 64 << 20  # against the incumbent


def ranks(lab: Lab) -> GateResult:
    """At the TP that is optimised: files, threads and processes, and what is needed to compare memory."""
    setup = perturb.perturbed(lab)
    server = lab.server(setup)
    seen = [server.census()]
    for part in range(2):
        _many(lab, setup, f"ranks{part}")
        seen.append(server.census())
    lab.notes["census"] = seen[-1]
    return _flat("resources", seen, PAGED_SLOPE_BYTES)


def leak(lab: Lab) -> GateResult:
    """300 requests at one rank: nothing grows, and answers are still right."""
    setup = races.poisoned(lab)
    server = lab.server(setup)
    _many(lab, setup, "warm")
    seen = [server.census()]
    for part in range(REQUESTS // BATCH):
        _many(lab, setup, f"many{part}")
        seen.append(server.census())
    result = _flat("leak", seen, SLOPE_BYTES if setup.small_cache else PAGED_SLOPE_BYTES)
    if not result.passed:
        return result
    late = ask(server, [Request(p, 6) for p in lab.draw("late", 3, [12, 18, 30], kinds=("random",))])
    tokens = streams.judge(
        lab.oracle(setup).score(late),
        "leak",
        "G12",
        reason=RejectReason.SHAPES,
        what=f"after {REQUESTS + BATCH} requests",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    return passed("leak", "G19 G12", **result.facts) if tokens.passed else tokens


def _flat(gate: str, seen: list[dict[str, int]], most: int) -> GateResult:
    """Slopes between neighbouring censuses, their median: an allocator grows in jumps, a leak all the time."""
    before, after = seen[0], seen[-1]
    steps = [(y["rss_bytes"] - x["rss_bytes"]) / BATCH for x, y in itertools.pairwise(seen)]
    slope, total = median(steps), after["rss_bytes"] - before["rss_bytes"]
    facts = {"before": before, "after": after, "slope_bytes": slope}
    wrong = next(
        (
            f"{what} went from {before[what]} to {after[what]}"
            for what, more in (("fds", MORE_FILES), ("threads", MORE_THREADS), ("processes", 0))
            if after[what] > before[what] + more
        ),
        None,
    )
    if (slope > most and total > FLAT_BYTES) or total > most * BATCH * len(steps) * 4:
        wrong = f"memory grows by {slope / 1024:.0f} KiB a request, {total >> 20} MiB in all"
    return (
        failed(gate, "G19", RejectReason.RESOURCES, wrong, **facts) if wrong else passed(gate, "G19", **facts)
    )


def _many(lab: Lab, setup: Setup, name: str) -> None:
    """A batch of short requests, every prompt its own."""
    lengths = [4 + i % 13 for i in range(BATCH)]
    prompts = lab.draw(f"resources-{name}", BATCH, lengths, kinds=("random",))
    got = ask(lab.server(setup), [Request(p, 2) for p in prompts], 120.0)
    if wrong := next((w for s in got if (w := streams.account(s, 2))), None):
        raise Failed(RejectReason.TOKEN_ACCOUNTING, wrong, "G11")


def against_incumbent(lab: Lab) -> GateResult:
    """Memory of all ranks against the incumbent's, which `startup.py` has started."""
    mine = lab.notes.get("census")
    if lab.on_gpu:
        return passed("memory", "G19", "left to the guards of the timed pairs: another launch is dear here")
    if mine is None:
        return passed("memory", "G19", "not compared: the candidate's memory was not taken")
    setup = lab.setup(arm="incumbent", weights="perturbed")
    for part in range(2):
        _many(lab, setup, f"ranks{part}")
    theirs = lab.server(setup).census()
    facts = {"rss_bytes": mine["rss_bytes"], "incumbent_rss_bytes": theirs["rss_bytes"]}
    if mine["rss_bytes"] > FACTOR * theirs["rss_bytes"] + ALLOWANCE_BYTES:
        return failed(
            "memory", "G19", RejectReason.RESOURCES,
            f"{mine['rss_bytes'] >> 20} MiB resident, the incumbent {theirs['rss_bytes'] >> 20} MiB", **facts,
        )  # fmt: skip
    if mine["processes"] > theirs["processes"]:
        return failed(
            "memory",
            "G19",
            RejectReason.RESOURCES,
            f"{mine['processes']} processes, the incumbent {theirs['processes']}",
            **facts,
        )
    return passed("memory", "G19", **facts)
