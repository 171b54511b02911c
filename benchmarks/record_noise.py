"""Record A/A noise of this machine: `python -m benchmarks.record_noise --name NAME [--pairs 12] [--tp 4]`.

Takes pairs of fresh launches of one and the same engine with `measure.run_pair`, as the loop does, and writes
their log-ratios, in the order taken, with what the machine was doing meanwhile, into `recorded_noise.json`
(a series of the same name is replaced). Discarded pairs are kept in the file, named, and not used. Not for:
simulating rules (`decision_rules.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import noise
from optimizer import measure
from optimizer.fingerprint import fingerprint
from optimizer.target import load_target
from optimizer.traffic.prompts import PromptSource
from optimizer.truth.oracle import Oracle
from optimizer.types import LaunchSpec, Pair, Stage

ROOT = Path(__file__).resolve().parent.parent


def record(spec: LaunchSpec, protocol: str, stage: Stage, pairs: int) -> list[Pair]:
    """A/A pairs, arm order ABBA from a random start."""
    start = random.randrange(2)
    source = PromptSource(secrets.token_bytes(32), spec.model_dir)
    taken = []
    with Oracle(spec.model_dir) as oracle:
        for i in range(pairs):
            order = ("ab", "ba", "ba", "ab")[(i + 2 * start) % 4]
            pair = measure.run_pair(
                spec, spec, protocol=measure.PROTOCOLS[protocol], stage=stage, index=i, order=order,
                prompts=source, oracle=oracle,
            )  # fmt: skip
            taken.append(pair)
            print(f"{i + 1}/{pairs} {order} {pair.discarded or f'{_log_ratio(pair):+.4f}'} ({pair.seconds:.1f} s)", flush=True)
    return taken


def _log_ratio(pair: Pair) -> float:
    assert pair.a_us_per_token and pair.b_us_per_token
    return math.log(pair.a_us_per_token / pair.b_us_per_token)


def series(name: str, spec: LaunchSpec, protocol: str, pairs: list[Pair]) -> dict[str, Any]:
    """One series as JSON: ratios, raw times, guards' ratios, the machine."""
    kept = [p for p in pairs if not p.discarded]
    guards = sorted({g for p in kept for g in p.guards})
    return {
        "name": name,
        "recorded_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "protocol": protocol,
        "engine": spec.target.name,
        "tp": spec.tp,
        "device": spec.device,
        "cores": os.cpu_count(),
        "machine": fingerprint(spec.device, spec.sandbox),
        "load1": [p.facts["windows"][arm]["load1"] for p in kept for arm in "ab"],
        "foreign_cores": [round(p.facts["windows"][arm]["foreign_cores"], 3) for p in kept for arm in "ab"],
        "log_ratios": [_log_ratio(p) for p in kept],
        "us_per_token": [[p.a_us_per_token, p.b_us_per_token] for p in kept],
        "guard_log_ratios": {g: [_guard_ratio(p.guards[g]) for p in kept if g in p.guards] for g in guards},
        "orders": [p.order for p in kept],
        "discarded": [p.discarded for p in pairs if p.discarded],
        "seconds_per_pair": sum(p.seconds for p in pairs) / len(pairs),
    }


def _guard_ratio(values: tuple[float, float]) -> float | None:
    a, b = values
    return math.log(b / a) if a > 0 and b > 0 else None


def store(new: dict[str, Any], path: Path = noise.RECORDED) -> None:
    """Add or replace a series."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"schema": 1, "series": []}
    data["series"] = [s for s in data["series"] if s["name"] != new["name"]] + [new]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--name", required=True)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--protocol", choices=list(measure.PROTOCOLS), default="quick")
    parser.add_argument("--stage", choices=[s.value for s in Stage], default=Stage.CALIBRATE.value)
    parser.add_argument("--target-dir", type=Path, default=ROOT / "engine")
    parser.add_argument("--model", type=Path, default=ROOT / "engine" / "tiny_qwen3")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv" / "bin" / "python")
    args = parser.parse_args(argv)
    target = load_target(args.target_dir)
    spec = LaunchSpec(target.root, target, args.python, args.model, args.tp, args.device, label="aa")
    pairs = record(spec, args.protocol, Stage(args.stage), args.pairs)
    if sum(not p.discarded for p in pairs) < 4:
        raise SystemExit("fewer than four usable pairs: nothing stored")
    store(series(args.name, spec, args.protocol, pairs))


if __name__ == "__main__":
    main()
