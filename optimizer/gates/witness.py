"""G18: the trace of every rank shows the model's arithmetic, and tracing changes no token.

A trace is written by the candidate: it can convict, never acquit. Counted are the FLOPs of weight products in decode
steps, from operator shapes: merged projections keep the sum, skipped layers and a smaller vocabulary do not. Steps
whose work is hidden from the host (graph launches, compiled kernels) are not judged; the facts say so. Too few with
right tokens is quarantined: it may be an operator that is not known here, and a person can tell.
Not for: analysis of traces (`trace_diff`), which is far larger than what may be sealed here.
"""

from __future__ import annotations

import gzip
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec

from optimizer.gates import perturb, streams
from optimizer.gates.context import Lab, ask, failed, parked, passed
from optimizer.gates.model_math import Model
from optimizer.traffic.client import Request
from optimizer.types import GateResult, RejectReason

STEP = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "mkldnn::_linear_pointwise",
    "aten::mkldnn_linear",
)
HIDDEN = ("cudaGraphLaunch", "cuGraphLaunch", "Torch-Compiled Region", "CompiledFunction", "triton_")
LEAST = 0.98  # of the model's own FLOPs
BATCH = 3
MAX_TRACE_BYTES = 256 << 20
# What reading a file that a candidate made may end in: broken packing, broken JSON, values of other kinds.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, EOFError, OSError, zlib.error, RecursionError, OverflowError)


def check(lab: Lab) -> GateResult:
    setup = perturb.perturbed(lab)
    server = lab.server(setup)
    prompts = lab.draw("witness", BATCH, 20, kinds=("random",))
    requests = [Request(p, 6) for p in prompts]
    plain = ask(server, requests)
    server.client.start_profile(record_shapes=True)
    traced = ask(server, requests, 120.0)
    server.client.stop_profile()
    result = streams.judge(
        lab.oracle(setup).score([*plain, *traced]),
        "witness",
        "G18",
        reason=RejectReason.WITNESS,
        what="with and without a profiler",
    )
    if not result.passed and not result.parked:
        return result
    with tempfile.TemporaryDirectory() as folder:
        files = server.collect_traces(Path(folder), MAX_TRACE_BYTES)
        if len(files) < setup.tp:
            return failed(
                "witness", "G18", RejectReason.WITNESS, f"{len(files)} traces came from {setup.tp} ranks"
            )
        try:
            counts = [count(file) for file in files[-setup.tp :]]
        except UNREADABLE as error:
            detail = f"a trace cannot be read: {type(error).__name__}: {error}"
            return failed("witness", "G18", RejectReason.WITNESS, detail)
    return _verdict(lab, setup.tp, counts)


def _verdict(lab: Lab, tp: int, counts: list[dict[str, Any]]) -> GateResult:
    model = Model.of(lab.ctx.candidate.model_dir)
    want = model.product_flops(BATCH, BATCH, tp)
    shares = []
    for rank, seen in enumerate(counts):
        if not seen["steps"]:
            return parked(
                "witness",
                "G18",
                RejectReason.WITNESS,
                f"rank {rank}: the trace shows no decode step of {BATCH} sequences",
            )
        share = seen["flops"] / seen["steps"] / want
        shares.append(share)
        if share < LEAST and not seen["hidden"]:
            detail = f"rank {rank}: products of a decode step make {share:.3f} of the model's FLOPs"
            return parked("witness", "G18", RejectReason.WITNESS, detail, shares=shares)
    facts = {
        "shares": shares,
        "collectives": [c["collectives"] for c in counts],
        "hidden": any(c["hidden"] for c in counts),
    }
    return passed("witness", "G18", **facts)


def count(path: Path) -> dict[str, Any]:
    """What one rank's trace shows of its decode steps: `steps`, `flops` of weight products, `collectives`, `hidden`."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        with gzip.open(path) as handle:
            data = handle.read(MAX_TRACE_BYTES)
    events = msgspec.json.decode(data).get("traceEvents", [])
    spans = sorted(
        (e["ts"], e["ts"] + e.get("dur", 0))
        for e in events
        if e.get("cat") == "user_annotation"
        and (m := STEP.search(str(e.get("name"))))
        and m[1] == "0"
        and m[3] == str(BATCH)
    )
    seen: dict[str, Any] = {"steps": len(spans), "flops": 0, "collectives": 0, "hidden": False}
    at = 0
    for event in sorted((e for e in events if e.get("ph") == "X" and "ts" in e), key=lambda e: e["ts"]):
        while at < len(spans) and event["ts"] >= spans[at][1]:
            at += 1
        if at < len(spans) and event["ts"] >= spans[at][0]:
            _add(seen, event)
    return seen


def _add(seen: dict[str, Any], event: dict[str, Any]) -> None:
    name = str(event.get("name"))
    if event.get("cat") == "cpu_op" and name in PRODUCTS:
        seen["flops"] += product_flops(name, (event.get("args") or {}).get("Input Dims") or [])
    elif name.startswith(("c10d::", "nccl:", "gloo:")) or "all_reduce" in name:
        seen["collectives"] += 1
    if any(word in name for word in HIDDEN):
        seen["hidden"] = True


def product_flops(name: str, dims: list[Any]) -> int:
    """2 m k n of a product with one two-dimensional weight; attention's batched products count as nothing."""
    shapes = [d for d in dims if isinstance(d, list) and len(d) >= 2]
    if len(shapes) < 2:
        return 0
    left, right = shapes[-2:] if name in ("aten::addmm", "aten::baddbmm") else shapes[:2]
    if len(right) == 3:
        if right[0] != 1:
            return 0
        left, right = left[1:], right[1:]
    rows = 1
    for size in left[:-1]:
        rows *= size
    inner = left[-1]
    columns = right[1] if right[0] == inner else right[0]
    return 2 * rows * inner * columns
