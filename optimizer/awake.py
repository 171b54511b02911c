"""GPUs kept from going to sleep between launches.

Without persistence mode the driver takes a GPU down when its last user closes it, and brings it up again for the next:
seconds for every launch, and for every `nvidia-smi` in between. Whoever starts one engine after another holds the device
files open meanwhile, as nvidia-persistenced does; no setting of the GPU is touched, and no memory of it is taken. Not for:
looking at a GPU (`environment.py`, `fingerprint.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEVICE_FILES = Path("/dev")


@contextmanager
def awake(devices: Sequence[int] | None) -> Iterator[None]:
    """Hold these GPUs, by index; all where it is empty, none where it is None. What cannot be opened is left alone."""
    names = () if devices is None else [f"nvidia{i}" for i in devices] or sorted(p.name for p in DEVICE_FILES.glob("nvidia[0-9]*"))
    held = []
    try:
        for name in names:
            with contextlib.suppress(OSError):
                held.append(os.open(DEVICE_FILES / name, os.O_RDWR | os.O_CLOEXEC))
        yield
    finally:
        for handle in held:
            os.close(handle)
