"""Shapes and bytes of matrix products, where a trace recorded operator shapes.

Not for: time (attribute), which products make up a layer (layers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from trace_diff.ingest import Trace
from trace_diff.layers import PRODUCT, LayerMap
from trace_diff.links import links
from trace_diff.nesting import nesting
from trace_diff.sequence import Sequence
from trace_diff.types import Kind

# As torch calls them, and as traces write the C++ types.
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
DTYPE_NAMES = {
    "double": "float64", "float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2", "signed char": "int8", "unsigned char": "uint8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Product:
    """rows x inputs times inputs x outputs."""

    rows: int
    inputs: int
    outputs: int
    dtype: str | None

    @property
    def element_bytes(self) -> int | None:
        return DTYPE_BYTES.get((self.dtype or "").lower())

    @property
    def bytes(self) -> int | None:
        """Bytes that the product must move once: weights, inputs and outputs. None: unknown dtype."""
        size = self.element_bytes
        if size is None:
            return None
        return size * (self.inputs * self.outputs + self.rows * (self.inputs + self.outputs))


def layer_products(trace: Trace, seq: Sequence, layers: LayerMap) -> tuple[Product, ...]:
    """Products of one steady layer, in order; empty unless every one has shapes."""
    finder = Finder(trace, seq)
    middle = layers.layers[len(layers.layers) // 2]
    items = [layers.anchors[i].first for i in middle if layers.anchors[i].role == PRODUCT]
    out = [finder.product(i) for i in items]
    good = tuple(p for p in out if p is not None)
    return good if len(good) == len(out) else ()


class Finder:
    """Looks up the operator behind an item of a sequence and reads its shapes."""

    def __init__(self, trace: Trace, seq: Sequence) -> None:
        self._trace, self._seq = trace, seq
        self._launch = links(trace).launch_of(len(trace.events)) if seq.device == "gpu" else None
        self._parent = nesting(trace).parent

    def product(self, item: int) -> Product | None:
        """The product of item `item`, or None when no enclosing operator has matrix shapes."""
        for row in self.operators(item):
            found = product_of(self._trace.args(row))
            if found is not None:
                return found
        return None

    def operators(self, item: int) -> list[int]:
        """Operator rows around an item's launch (or the item itself on a CPU), innermost first."""
        row = int(self._seq.rows[item])
        at = row if self._launch is None else int(self._launch[row])
        kinds = self._trace.events.kind
        out: list[int] = []
        while at >= 0:
            if kinds[at] == Kind.CPU_OP:
                out.append(at)
            at = int(self._parent[at])
        return out


def product_of(args: dict[str, Any]) -> Product | None:
    """The product that an operator's recorded input shapes describe: two matrices with a common dimension."""
    dims = args.get("Input Dims") or args.get("Input dims")
    if not isinstance(dims, list):
        return None
    types = args.get("Input type") or args.get("Input Types")
    types = [DTYPE_NAMES.get(t, t) if isinstance(t, str) else None for t in types] if isinstance(types, list) else []
    matrices = [(d, types[i] if i < len(types) else None) for i, d in enumerate(dims) if _is_matrix(d)]
    for i, (x, dtype) in enumerate(matrices):
        for w, _ in matrices[i + 1 :]:
            rows = math.prod(x[:-1])
            if len(w) == 2 and w[0] == x[-1]:
                return Product(rows, w[0], w[1], dtype)
            if len(w) == 2 and w[1] == x[-1]:
                return Product(rows, w[1], w[0], dtype)
    return None


def _is_matrix(d: Any) -> bool:
    return isinstance(d, list) and len(d) >= 2 and all(isinstance(x, int) and 0 < x < 1 << 40 for x in d)


def total_bytes(found: Seq[Product | None]) -> int | None:
    """Sum over products; None when any is unknown."""
    sizes = [p.bytes if p is not None else None for p in found]
    return None if any(s is None for s in sizes) else sum(s for s in sizes if s is not None)
