"""Memory-bound products that take longer than their bytes need.

Signature: products of a decode step with recorded shapes, on a device whose read bandwidth is known. Saving per
step <= sum over products of (time - bytes / bandwidth), replayed. Bandwidth is the measured read bandwidth of
the device class (table below), or what the best product of this very trace reached, if that is more. Products
of more than 128 rows are not judged: there arithmetic sets the pace.
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Basis, CouldNotLook, Draft, NotFound
from trace_diff.layers import PRODUCT
from trace_diff.products import Finder
from trace_diff.whatif import Edit

RULE = "roofline-gap"
SKILLS = ("skinny-gemm", "ngram-speculation")
FORMULA = "sum over products of (time - bytes / read bandwidth), replayed"
# Device class -> measured read bandwidth, bytes per ns (= TB/s x 1000); source in the comment.
READ_BYTES_PER_NS = {
    "NVIDIA H200": 4169.0,  # measured: streaming read of HBM, 1 GPU, driver 580
}
MOST_ROWS = 128  # above it arithmetic, not bytes, sets the pace of a bf16 product on current devices
LEAST_SHARE = 0.02  # of the products' time


def look(context: Context) -> Draft | NotFound | CouldNotLook:
    seq, layers = context.analysis.sequence, context.analysis.layers
    if not context.on_gpu or seq is None or layers is None:
        return NotFound("no device work in the step")
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
    if not sized or missing > 0.1 * len(sized):
        return CouldNotLook(("operator shapes (record_shapes=True)",))
    best = max(b / t for _, _, b, t in sized if t > 0)
    table = READ_BYTES_PER_NS.get(context.analysis.cell.device or "", 0.0)
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
        "bandwidth_from": "measured for the device class" if table >= best else "best product of this trace",
    }
    if time - floor < LEAST_SHARE * time:
        return NotFound("products run at the memory bandwidth", (row,))
    return Draft(
        title=f"Products take {time / 1000:.0f} us a step, their bytes need {floor / 1000:.0f} us",
        formula=FORMULA,
        basis=Basis.DEVICE,
        edit=Edit(device=edit),
        evidence=(row,),
        skills=SKILLS,
        inferred=table < best,
    )
