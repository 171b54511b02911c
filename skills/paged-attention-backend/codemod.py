"""Let decode attention read the pages of the cache in place, by a Triton kernel, beside its reference.

Looked for: decode attention that gathers pages by a block table and masks by lengths (`gpu_tools.paged_attention`).
"""

from __future__ import annotations

import gpu_tools as gpu


def propose(sources: dict[str, str], finding: dict) -> dict:
    """One patch; see the module docstring."""
    changed = gpu.paged_attention(sources)
    if isinstance(changed, str):
        return {"declined": changed}
    return {
        "sources": changed,
        "mechanism": "paged-attention-backend",
        "title": "Decode attention reads the pages of the cache in place",
        "predicted_us": finding.get("bound_us"),
        "invariants": ["pages are [blocks, tokens, kv heads, size]", "positions at and past a sequence's length are never read"],
        "params": {},
        "activation": {
            "appear": [{"row": "paged_attention_parts", "phase": "decode", "ranks": "all"}],
            "vanish": [{"row": "aten::scaled_dot_product_attention", "phase": "decode", "ranks": "all"}],
        },
    }
