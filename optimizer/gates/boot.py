"""G05, G06, G19: a fresh process in a clean room comes up, is what was asked for, holds nothing that it should not, can
serve what the engines before it could, and rests without work.

Not for: how fast it starts (`startup.py`). Metadata is the server's own word: a contradiction rejects, agreement
proves nothing.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from optimizer.confine import sandbox
from optimizer.gates import startup
from optimizer.gates.context import IDLE, Lab, failed, idle_threads, parked, passed
from optimizer.types import GateResult, RejectReason

CAPACITY = ("max_model_len", "max_num_seqs", "num_kv_blocks", "max_num_batched_tokens")
CAPACITY_SHARE = 0.95  # static buffers may cost a few cache pages: of the first engine's, over all patches of a run
MORE_IDLE = 0.7  # threads beyond the incumbent's


def check(lab: Lab) -> GateResult:
    before = lab.incumbent_metadata()
    first = lab.first_metadata()
    server = lab.server(lab.setup())
    ctx = lab.ctx
    stated = server.metadata
    for name, theirs in [(name, had.get(name)) for had in (before, first) for name in CAPACITY]:
        mine = stated.get(name)
        if type(theirs) is int and (type(mine) is not int or mine < CAPACITY_SHARE * theirs):
            detail = f"{name} fell from {theirs} to {mine}: what could be served before must be served"
            return failed("boot", "G19", RejectReason.RESOURCES, detail)
    for name, want in (("tp", lab.tp), ("device", ctx.candidate.device)):
        if name in stated and stated[name] != want:
            return failed(
                "boot",
                "G05",
                RejectReason.BOOT,
                f"the server says {name} = {stated[name]!r}, asked for {want!r}",
            )
    want = ctx.target.dtype.get(ctx.candidate.device)
    if want and stated.get("dtype", want) != want:
        return failed(
            "boot",
            "G05",
            RejectReason.BOOT,
            f"the server says dtype = {stated['dtype']!r}, the target is {want!r}",
        )
    foreign = sorted(foreign_engines(server.maps(), " ".join(ctx.target.serve)))
    if foreign:
        return failed("boot", "G06", RejectReason.POLICY, f"another engine's library is loaded: {foreign[0]}")
    if strays := server.strays():
        detail = f"writes {strays[0]!r} where only its socket and traces belong ({len(strays)} in all)"
        return failed("boot", "G04", RejectReason.POLICY, detail)
    first_s = startup.first_answer(lab, lab.setup())
    idle = idle_threads(server)
    lab.remember(ctx.candidate_commit, stated | {IDLE: idle})
    if idle > before.get(IDLE, 0.0) + MORE_IDLE:
        detail = f"{idle:.1f} {IDLE}: the engine takes it from others on the machine"
        return parked("boot", "G19", RejectReason.RESOURCES, detail)
    census = server.census()
    return passed(
        "boot", "G05 G06", start_s=server.start_s, first_answer_s=first_s, sandbox=server.level.name, **census
    )


def foreign_engines(maps: set[str], serve: str) -> set[str]:
    """Mapped files that belong to an engine which the target's own command does not name."""
    others = {name for name in sandbox.OTHER_ENGINES if name not in serve}
    return {path for path in maps if others & set(PurePosixPath(path).parts)}
