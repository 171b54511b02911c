"""How fast devices read their memory: data, one row a device, each with where its figure is from.

A row of kind "measured" was read off a streaming kernel; "peak" is the vendor's figure, which no kernel reaches, so a
time computed from it stays a lower bound. Not for: which work is bound by memory (findings.roofline_gap).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """`name`: start of the name that the driver reports, without the vendor. Bytes per nanosecond are GB/s."""

    name: str
    bytes_per_ns: float
    kind: str  # "measured" or "peak"
    source: str


MEMORIES: tuple[Memory, ...] = (
    Memory("H200", 4169.0, "measured", "streaming read of HBM3e, one H200 SXM, driver 580 (the vendor's peak: 4800)"),
    Memory("GB200", 8000.0, "peak", "NVIDIA GB200 NVL72 page: 8 TB/s a GPU"),
    Memory("B200", 8000.0, "peak", "NVIDIA DGX B200 datasheet: 64 TB/s for 8 GPUs"),
    Memory("H100 NVL", 3900.0, "peak", "NVIDIA H100 datasheet: H100 NVL 3.9 TB/s"),
    Memory("H100 PCIe", 2000.0, "peak", "NVIDIA H100 PCIe datasheet: 2 TB/s"),
    Memory("H100 80GB HBM3", 3350.0, "peak", "NVIDIA H100 datasheet: H100 SXM 3.35 TB/s"),
    Memory("H100 SXM5", 3350.0, "peak", "NVIDIA H100 datasheet: H100 SXM 3.35 TB/s"),
    Memory("A100-SXM4-80GB", 2039.0, "peak", "NVIDIA A100 datasheet: A100 80GB SXM 2039 GB/s"),
    Memory("A100-SXM-80GB", 2039.0, "peak", "NVIDIA A100 datasheet: A100 80GB SXM 2039 GB/s"),
    Memory("A100 80GB PCIe", 1935.0, "peak", "NVIDIA A100 datasheet: A100 80GB PCIe 1935 GB/s"),
    Memory("A100-SXM4-40GB", 1555.0, "peak", "NVIDIA A100 datasheet: A100 40GB 1555 GB/s"),
    Memory("A100-PCIE-40GB", 1555.0, "peak", "NVIDIA A100 datasheet: A100 40GB 1555 GB/s"),
    Memory("V100", 900.0, "peak", "NVIDIA V100 datasheet: 900 GB/s"),
    Memory("L40S", 864.0, "peak", "NVIDIA L40S datasheet: 864 GB/s"),
    Memory("L40", 864.0, "peak", "NVIDIA L40 datasheet: 864 GB/s"),
    Memory("L4", 300.0, "peak", "NVIDIA L4 datasheet: 300 GB/s"),
    Memory("A10G", 600.0, "peak", "AWS and NVIDIA A10G: 600 GB/s"),
    Memory("A10", 600.0, "peak", "NVIDIA A10 datasheet: 600 GB/s"),
    Memory("T4", 320.0, "peak", "NVIDIA T4 datasheet: 320+ GB/s"),
    Memory("GeForce RTX 4090", 1008.0, "peak", "GeForce RTX 4090: 384 bit at 21 Gbit/s"),
    Memory("GeForce RTX 3090", 936.0, "peak", "GeForce RTX 3090: 384 bit at 19.5 Gbit/s"),
    Memory("Instinct MI355X", 8000.0, "peak", "AMD Instinct MI355X datasheet: 8 TB/s"),
    Memory("Instinct MI350X", 8000.0, "peak", "AMD Instinct MI350X datasheet: 8 TB/s"),
    Memory("Instinct MI325X", 6000.0, "peak", "AMD Instinct MI325X datasheet: 6 TB/s"),
    Memory("Instinct MI300X", 5300.0, "peak", "AMD Instinct MI300X datasheet: 5.3 TB/s"),
    Memory("Instinct MI210", 1600.0, "peak", "AMD Instinct MI210 datasheet: 1.6 TB/s"),
)  # fmt: skip
_VENDOR = re.compile(r"^(?:nvidia|tesla|amd)\s+", re.IGNORECASE)


def memory(device: str | None) -> Memory | None:
    """The row of a device by the name that its driver reports ("NVIDIA H100 80GB HBM3"), or None.

    A row matches a whole word: "A10" is not "A100".
    """
    name = _VENDOR.sub("", device or "").lower()
    for row in MEMORIES:
        head = row.name.lower()
        if name.startswith(head) and not name[len(head) : len(head) + 1].isalnum():
            return row
    return None
