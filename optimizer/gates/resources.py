"""G19: memory, open files, threads and processes stay flat over 300 requests and near the incumbent's.

All read from outside (/proc). Afterwards the first prompts of the candidate's life are asked again: state that
accumulates over requests shows in them. The leak test runs on a small cache where the target has one: pages of a large
one become resident only as they are first used, which looks like a leak. Not for: speed.
"""

from __future__ import annotations

from optimizer.client import Request
from optimizer.gates import perturb, races, streams
from optimizer.gates.context import Failed, Lab, Setup, ask, failed, passed
from optimizer.types import GateResult, RejectReason

WARM, REQUESTS, BATCH = 60, 300, 60
SLOPE_BYTES = 32 << 10  # resident growth a request that is still no leak
FLAT_BYTES = 8 << 20  # growth over the whole run that is noise of the allocator
PAGED_SLOPE_BYTES = 1 << 20  # where cache pages are still being touched for the first time
MORE_FILES, MORE_THREADS = 8, 4
FACTOR, ALLOWANCE_BYTES = 1.10, 64 << 20  # against the incumbent


def ranks(lab: Lab) -> GateResult:
    """At the TP that is optimised: files, threads and processes, and what is needed to compare memory."""
    setup = perturb.perturbed(lab)
    server = lab.server(setup)
    before = server.census()
    _many(lab, setup, "ranks", 2 * BATCH)
    lab.notes["census"] = after = server.census()
    return _flat("resources", before, after, 2 * BATCH, PAGED_SLOPE_BYTES)


def leak(lab: Lab) -> GateResult:
    """300 requests at one rank: nothing grows, and the first answers are still the same."""
    setup = races.poisoned(lab)
    server = lab.server(setup)
    _many(lab, setup, "warm", WARM)
    before = server.census()
    _many(lab, setup, "many", REQUESTS)
    result = _flat(
        "leak", before, server.census(), REQUESTS, SLOPE_BYTES if setup.small_cache else PAGED_SLOPE_BYTES
    )
    if not result.passed:
        return result
    late = ask(server, [Request(p, 6) for p in lab.draw("late", 3, [12, 18, 30], kinds=("random",))])
    tokens = streams.judge(
        lab.oracle(setup).score(late),
        "leak",
        "G12",
        reason=RejectReason.SHAPES,
        what=f"after {WARM + REQUESTS} requests",
        accept_numeric_drift=lab.ctx.accept_numeric_drift,
    )
    return passed("leak", "G19 G12", **result.facts) if tokens.passed else tokens


def _flat(gate: str, before: dict[str, int], after: dict[str, int], requests: int, most: int) -> GateResult:
    slope = (after["rss_bytes"] - before["rss_bytes"]) / requests
    facts = {"before": before, "after": after, "slope_bytes": slope}
    if slope > most and slope * requests > FLAT_BYTES:
        return failed(
            gate, "G19", RejectReason.RESOURCES, f"memory grows by {slope / 1024:.0f} KiB a request", **facts
        )
    for what, more in (("fds", MORE_FILES), ("threads", MORE_THREADS), ("processes", 0)):
        if after[what] > before[what] + more:
            return failed(
                gate,
                "G19",
                RejectReason.RESOURCES,
                f"{what} went from {before[what]} to {after[what]}",
                **facts,
            )
    return passed(gate, "G19", **facts)


def _many(lab: Lab, setup: Setup, name: str, n: int) -> None:
    """Short requests in batches, every prompt its own."""
    server = lab.server(setup)
    prompts = lab.draw(f"resources-{name}", n, [4 + i % 13 for i in range(n)], kinds=("random",))
    for start in range(0, n, BATCH):
        got = ask(server, [Request(p, 2) for p in prompts[start : start + BATCH]], 120.0)
        if wrong := next((w for s in got if (w := streams.account(s, 2))), None):
            raise Failed(RejectReason.TOKEN_ACCOUNTING, wrong, "G11")


def against_incumbent(lab: Lab) -> GateResult:
    """Memory of all ranks against the incumbent's, which `startup.py` has started."""
    mine = lab.notes.get("census")
    if mine is None:
        return passed("memory", "G19", "not compared: the candidate's memory was not taken")
    setup = lab.setup(arm="incumbent", weights="perturbed")
    _many(lab, setup, "ranks", 2 * BATCH)
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
