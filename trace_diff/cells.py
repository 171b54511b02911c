"""Find out what a trace measured: stated by the caller, written in the trace, or inferred and marked so.

Not for: judging whether two cells are comparable (comparable).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

from trace_diff import products
from trace_diff.analysis import Cell
from trace_diff.ingest import Trace, TraceSet
from trace_diff.layers import LayerMap
from trace_diff.sequence import Sequence
from trace_diff.types import Phase, Step


def cell_of(
    traceset: TraceSet,
    trace: Trace,
    steps: Seq[Step],
    phase: Phase,
    seq: Sequence | None,
    layers: LayerMap | None,
    stated: dict[str, Any],
) -> Cell:
    """The cell of one rank's steady steps. Raises ValueError for a stated field that Cell does not have."""
    known = {f.name for f in fields(Cell)}
    wrong = sorted(set(stated) - known)
    if wrong:
        raise ValueError(f"unknown cell fields {wrong}; known are {sorted(known)}")
    found: dict[str, Any] = {"phase": phase, "engine": traceset.label}
    inferred: list[str] = []
    if any(s.phase is Phase.UNKNOWN for s in steps):
        inferred.append("phase")
    found["device"] = device_class(trace, seq)
    found["tp"] = trace.world_size or len(traceset.traces)
    if not trace.world_size:
        inferred.append("tp")
    requests = Counter(s.requests for s in steps if s.requests is not None)
    if requests:
        found["batch"] = requests.most_common(1)[0][0]
        found["tokens"] = _tokens(steps, phase)
    cached = [s.context for s in steps if s.context is not None]
    if cached and len(cached) == len(steps):
        found["context"] = sum(cached) // len(cached)
    if layers is not None and layers.count:
        found["layers"] = layers.count
        inferred.append("layers")
    if seq is not None and layers is not None and layers.count:
        shapes = products.layer_products(trace, seq, layers)
        if shapes:
            found["products"] = tuple((p.inputs, p.outputs) for p in shapes)
            found["hidden"] = shapes[0].inputs
            found["dtype"] = shapes[0].dtype
            inferred += ["products", "hidden", "dtype"]
            if "batch" not in found and phase == Phase.DECODE:
                found["batch"] = found["tokens"] = shapes[0].rows
                inferred += ["batch", "tokens"]
    told = provenance(trace.meta)
    found.update(told)
    inferred = [x for x in inferred if x not in told]
    found.update(stated)
    return Cell(**found, inferred=tuple(x for x in inferred if x not in stated))


def provenance(meta: dict[str, Any]) -> dict[str, Any]:
    """Cell fields that an engine wrote into its trace under the top-level key `engine` (as ours does)."""
    told = meta.get("engine")
    if not isinstance(told, dict):
        return {}
    out: dict[str, Any] = {}
    for key, kind in (("engine", str), ("tp", int), ("batch", int), ("context", int), ("dtype", str)):
        if isinstance(told.get(key), kind):
            out[key] = told[key]
    model = told.get("model")
    if isinstance(model, dict):
        for key, name in (("layers", "num_hidden_layers"), ("hidden", "hidden_size")):
            if isinstance(model.get(name), int):
                out[key] = model[name]
    if isinstance(told.get("model_hash"), str):
        out["model"] = told["model_hash"]
    return out


def device_class(trace: Trace, seq: Sequence | None) -> str | None:
    """ "cpu", the device's name from the trace, or None when a device worked whose name is not in the trace."""
    if trace.strange_device:
        return f"unknown accelerator ({', '.join(trace.unknown)})"
    if seq is not None and seq.device == "cpu":
        return "cpu"
    names = trace.device_names()
    return names[0] if names else None


def _tokens(steps: Seq[Step], phase: Phase) -> int | None:
    if phase == Phase.DECODE:
        counts = Counter(s.tokens if s.tokens is not None else s.requests for s in steps)
    else:
        counts = Counter(s.tokens for s in steps)
    return counts.most_common(1)[0][0]
