"""Small Kineto traces for tests, with times in whole nanoseconds. Not a trace of anything real."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HOST = 100  # process and thread of the host rows


def us(ns: int) -> str:
    """Exact decimal text of microseconds."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


class Build:
    """Collects events; `text` gives the file as Kineto would write it."""

    def __init__(self, rank: int | None = 0, world: int = 1, **meta: Any) -> None:
        self.meta: dict[str, Any] = {"schemaVersion": 1, **meta}
        if rank is not None:
            self.meta["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
        self.events: list[str] = []

    def raw(self, text: str) -> Build:
        """An event as text, possibly damaged."""
        self.events.append(text)
        return self

    def event(
        self,
        cat: str,
        name: str,
        start: int,
        dur: int,
        pid: Any = HOST,
        tid: Any = HOST,
        args: dict[str, Any] | None = None,
    ) -> Build:
        head = json.dumps({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid})[:-1]
        tail = f', "args": {json.dumps(args)}' if args is not None else ""
        return self.raw(f'{head}, "ts": {us(start)}, "dur": {us(dur)}{tail}}}')

    def op(self, name: str, start: int, dur: int, ext: int = -1, tid: int = HOST, pid: int = HOST, **args: Any) -> Build:
        return self.event("cpu_op", name, start, dur, pid, tid, {"External id": ext, **args} if ext >= 0 else args)

    def python(self, name: str, start: int, dur: int, tid: int = HOST) -> Build:
        return self.event("python_function", name, start, dur, tid=tid, args={"Python id": len(self.events)})

    def call(
        self, name: str, start: int, dur: int, corr: int = -1, tid: int = HOST, pid: Any = HOST, cat: str = "cuda_runtime"
    ) -> Build:
        return self.event(cat, name, start, dur, pid, tid, {"cbid": 1, "correlation": corr} if corr >= 0 else {"cbid": 1})

    def mark(self, name: str, start: int, dur: int, tid: int = HOST, pid: Any = HOST) -> Build:
        return self.event("user_annotation", name, start, dur, pid, tid, {})

    def kernel(
        self,
        name: str,
        start: int,
        dur: int,
        corr: int = -1,
        stream: int = 7,
        device: int = 0,
        pid: Any = None,
        cat: str = "kernel",
        **args: Any,
    ) -> Build:
        ident = {"correlation": corr} if corr >= 0 else {}
        return self.event(
            cat, name, start, dur, device if pid is None else pid, stream, {"device": device, "stream": stream, **ident, **args}
        )

    def launch(self, name: str, call_at: int, start: int, dur: int, corr: int, call_dur: int = 5000, **kw: Any) -> Build:
        """A launch call and its kernel."""
        self.call(kw.pop("call", "cudaLaunchKernel"), call_at, call_dur, corr)
        return self.kernel(name, start, dur, corr, **kw)

    def text(self, indent: bool = False, as_list: bool = False, tail: str = "") -> str:
        glue = ",\n  " if indent else ", "
        events = glue.join(self.events)
        if as_list:
            return f"[{events}]"
        head = json.dumps(self.meta)[:-1]
        return f'{head}, "traceEvents": [{events}]{tail}}}'

    def write(self, path: Path, **kw: Any) -> Path:
        data = self.text(**kw).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def decode_steps(build: Build, count: int = 4, kernels: int = 3, period: int = 100_000, names: str = "gemm") -> Build:
    """`count` steps ProfilerStep#n, each with `kernels` launches of 12.5 us kernels, one every 20 us."""
    corr = 0
    for step in range(count):
        base = 1_000_000 + step * period
        build.mark(f"ProfilerStep#{step}", base, period - 10_000)
        for k in range(kernels):
            corr += 1
            at = base + 5_000 + k * 20_000
            build.op("aten::mm", at, 15_000, ext=corr)
            build.launch(names, at + 3_000, at + 10_000, 12_500, corr)
    return build
