"""Memory-bound products that take longer than their bytes need.

Signature: products of a decode step with recorded shapes, on a device whose read bandwidth is known. Saving per
step <= sum over products of (time - bytes / bandwidth), replayed. Bandwidth is that of the device (measured, or its
vendor's peak: `trace_diff/bandwidth.py`), or what the best product of this very trace reached, if that is more.
Products of more than 128 rows are not judged: there arithmetic sets the pace.

On a CPU weights that fit a core's cache are left out, and the bandwidth is what one core reads at best.

Inside a CUDA graph no shapes are recorded. Where the engine wrote its model's dimensions into the trace, the weights
of all products together are the bytes, and the gap is theirs as a whole.
"""

from __future__ import annotations

from typing import Any

from trace_diff.bandwidth import Memory, memory
from trace_diff.findings.calls import operators
from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.layers import PRODUCT
from trace_diff.products import DTYPE_BYTES, DTYPE_NAMES, Finder
from trace_diff.whatif import Edit

RULE = "roofline-gap"
SKILLS = ("skinny-gemm", "weight-layout", "ngram-speculation")
FORMULA = "sum over products of (time - bytes / read bandwidth), replayed"
MOST_ROWS = 128  # above it arithmetic, not bytes, sets the pace of a bf16 product on current devices
LEAST_SHARE = 0.02  # of the products' time
# One core, float32 weights of several layers in turn, by columns: 34 measured on a 2-core AMD EPYC guest with 32 MiB of
# last-level cache. Rounded up, so that the bound stays one.
CPU_READ_BYTES_PER_NS = 40.0
CPU_CACHE_BYTES = 256 << 10  # smaller weights stay in the second-level cache of most cores


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if seq is None or layers is None:
        return NotFound("no products in the step" if not context.on_gpu else "no device work in the step")
    finder = Finder(context.trace, seq)
    sized: list[tuple[int, int, int, float]] = []
    missing = 0
    for a in layers.anchors:
        if a.role != PRODUCT:
            continue
        p = finder.product(a.first)
        if p is None or p.bytes is None:
            missing += 1
            continue
        if p.rows > MOST_ROWS:
            return NotFound(f"products of {p.rows} rows are not bound by memory")
        sized.append((a.first, a.last, p.bytes, float(seq.dur_ns[a.first : a.last + 1].sum())))
    if not sized or (context.on_gpu and missing > 0.1 * len(sized)):  # on a CPU attention may be products of its own
        return _as_a_whole(context) or CouldNotLook(("operator shapes (record_shapes=True)",))
    if not context.on_gpu and not (sized := [s for s in sized if s[2] > CPU_CACHE_BYTES]):
        return NotFound("every weight fits a core's cache")
    best = max((b / t for _, _, b, t in sized if t > 0), default=0.0)
    known = memory(context.analysis.cell.device)
    if context.on_gpu and known is None:
        return _unknown(context.analysis.cell.device, best)
    table = known.bytes_per_ns if known is not None and context.on_gpu else CPU_READ_BYTES_PER_NS
    bandwidth = max(best, table)
    edit: dict[int, float] = {}
    time = floor = 0.0
    for first, last, size, ns in sized:
        need = size / bandwidth
        time, floor = time + ns, floor + min(need, ns)
        for i in range(first, last + 1):
            row = int(seq.rows[i])
            edit[row] = float(context.trace.events.dur_ns[row]) * min(1.0, need / ns)
    row = {
        "what": "products of a step",
        "count": len(sized),
        "us": round(time / 1000, 1),
        "byte_bound_us": round(floor / 1000, 1),
        "bytes": sum(b for _, _, b, _ in sized),
        "bandwidth_TBs": round(bandwidth / 1000, 3),
        "bandwidth_from": _source(known) if table >= best else "best product of this trace",
    }
    if time - floor < LEAST_SHARE * time:
        return NotFound("products run at the memory bandwidth", (row,))
    return Draft(
        title=f"Products take {time / 1000:.0f} us a step, their bytes need {floor / 1000:.0f} us",
        formula=FORMULA,
        basis=Basis.DEVICE if context.on_gpu else Basis.HOST,
        edit=Edit(device=edit) if context.on_gpu else Edit(host_cuts=_host_cuts(context, edit)),
        evidence=(row,),
        skills=SKILLS,
        inferred=table < best or known is None or known.kind != "measured",
    )


def _host_cuts(context: Context, left: dict[int, float]) -> dict[int, float]:
    """On a CPU a product is an operator with others below it: each loses its share of the time that need not be."""
    cuts: dict[int, float] = {}
    for row, ns in left.items():
        share = 1.0 - ns / max(1.0, float(context.trace.events.dur_ns[row]))
        cuts |= {r: cut * share for r, cut in context.subtree_cuts(operators(context, [row]), lead=False).items()}
    return cuts


def _source(known: Memory | None) -> str:
    return "one core at its best" if known is None else f"{known.kind}: {known.source}"


def _unknown(device: str | None, best: float) -> CouldNotLook:
    """Without the device's figure, products that are all slow look as good as products that are all fast."""
    seen = f"the best product of this trace reads {best / 1000:.2f} TB/s"
    return CouldNotLook((f"read bandwidth of {device or 'a device that the trace does not name'} (trace_diff/bandwidth.py)",), (seen,))


def _as_a_whole(context: Context) -> Draft | NotFound | None:
    """All products of the step against all weights of the model; None without dimensions or a known bandwidth."""
    seq, told = context.analysis.sequence, context.trace.meta.get("engine")
    known = memory(context.analysis.cell.device)
    bandwidth = known.bytes_per_ns if known is not None else 0.0
    size = weight_bytes(told) if isinstance(told, dict) else None
    if seq is None or size is None or not bandwidth or (context.analysis.cell.tokens or 0) > MOST_ROWS:
        return None
    items = [i for i, cls in enumerate(seq.classes) if cls in ("gemm", "gemv")]
    time, floor = float(sum(seq.dur_ns[i] for i in items)), size / bandwidth
    row = {
        "what": "products of a step, as a whole",
        "count": len(items),
        "us": round(time / 1000, 1),
        "byte_bound_us": round(floor / 1000, 1),
        "bytes": size,
        "bandwidth_TBs": round(bandwidth / 1000, 3),
        "bandwidth_from": _source(known),
    }
    if time - floor < LEAST_SHARE * time:
        return NotFound("products run at the memory bandwidth", (row,))
    share = floor / time
    return Draft(
        title=f"Products take {time / 1000:.0f} us a step, their weights need {floor / 1000:.0f} us",
        formula=FORMULA,
        basis=Basis.DEVICE,
        edit=Edit(device={int(seq.rows[i]): float(seq.dur_ns[i]) * share for i in items}),
        evidence=(row,),
        skills=SKILLS,
        notes=("shapes are hidden in a graph: bytes of the model's weights, from the engine's own description",),
        inferred=True,
    )


def weight_bytes(told: dict[str, Any]) -> int | None:
    """Bytes of the weights that one rank's products of a decode step read, by the dimensions an engine states."""
    model, tp, dtype = told.get("model"), told.get("tp"), str(told.get("dtype")).lower()
    width = DTYPE_BYTES.get(DTYPE_NAMES.get(dtype, dtype))
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    if not isinstance(model, dict) or width is None or not all(isinstance(model.get(n), int) for n in names):
        return None
    hidden, inner, layers, heads, kv_heads, head, vocabulary = (model[n] for n in names)
    layer = hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    return width * (layers * layer + vocabulary * hidden) // (tp if isinstance(tp, int) and tp > 0 else 1)
