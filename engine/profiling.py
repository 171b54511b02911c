"""torch.profiler traces of a running rank, between /start_profile and /stop_profile.

Files: <trace-dir>/rank<r>.<n>.pt.trace.json.gz, n counting the starts of this server from 0. Each holds the
rank's metadata under the top-level key `engine`. Not for: timing; a profiled step is slower than others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Body of POST /start_profile."""

    with_stack: bool = False
    record_shapes: bool = False
    max_steps: int | None = None  # stop recording after so many steps; None: at /stop_profile


class Profiler:
    """Owned by a rank's main thread: the CPU side records the thread that starts it."""

    def __init__(self, trace_dir: Path | None, rank: int, size: int, metadata: dict[str, Any]) -> None:
        self._trace_dir = trace_dir
        self._rank = rank
        self._size = size
        self._metadata = metadata
        self._active: profile | None = None
        self._recording = False
        self._steps_left: int | None = None
        self._starts = 0

    def start(self, options: ProfileOptions) -> None:
        """Begin recording."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        self._active = profile(
            activities=activities, record_shapes=options.record_shapes, with_stack=options.with_stack
        )
        self._steps_left = options.max_steps
        self._active.start()
        self._recording = True

    def step_done(self) -> None:
        """Count a step, and end the recording after the last one asked for."""
        if self._recording and self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._end()

    def stop(self) -> str:
        """End the recording, write the trace and return its path."""
        assert self._active is not None and self._trace_dir is not None
        if self._recording:
            self._end()
        path = self._trace_dir / f"rank{self._rank}.{self._starts}.pt.trace.json.gz"
        self._active.export_chrome_trace(str(path))
        self._active = None
        self._starts += 1
        return str(path)

    def _end(self) -> None:
        assert self._active is not None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._active.add_metadata_json("engine", json.dumps(self._metadata | {"rank": self._rank}))
        if self._size == 1:  # with more ranks the profiler takes this from the process group
            self._active.add_metadata_json("distributedInfo", json.dumps({"rank": 0, "world_size": 1}))
        self._active.stop()
        self._recording = False
