"""Does the sandbox let a GPU engine work? Starts the tiny engine on CUDA inside it, completes, profiles.

    python -m benchmarks.gpu_sandbox

Prints the level used, the server's own description, whether CUDA, CUPTI (device rows in the trace) and the
oracle's verdict work. Not for: timings.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from optimizer.confine import sandbox
from optimizer.confine.launch import launch
from optimizer.target import load_target
from optimizer.traffic.client import Request
from optimizer.types import LaunchSpec

REPO = Path(__file__).resolve().parent.parent


def main() -> None:
    target = load_target(REPO / "engine")
    spec = LaunchSpec(tree=REPO, target=target, python=Path(sys.executable), model_dir=REPO / "engine/tiny_qwen3",
                      tp=1, device="cuda", devices=(0,), label="sandbox check")
    print("level:", sandbox.detect())
    with launch(spec) as server:
        print("start_s:", round(server.start_s, 2), json.dumps(server.metadata))
        server.client.start_profile(max_steps=8)
        streams = server.client.complete([Request(tuple(range(100, 112)), 16)], 60.0)
        server.client.stop_profile()
        print("tokens:", streams[0].token_ids, streams[0].error)
        for path in sorted(Path(server.trace_dir).glob("*.json.gz")):
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            kernels = sum(1 for event in events if event.get("cat") == "kernel")
            print("trace:", path.name, "kernels:", kernels)


if __name__ == "__main__":
    main()
