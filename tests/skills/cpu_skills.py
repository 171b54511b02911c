"""Skills that act on this engine on a CPU."""

ON_CPU = (
    "custom-all-reduce",
    "inference-mode",
    "static-decode-metadata",
    "merge-projections",
    "weight-layout",
    "preallocate-decode-buffers",
    "remove-host-reads",
    "device-side-sampling",
    "batch-host-copies",
    "direct-kv-write",
    "last-layer-rows",
)
