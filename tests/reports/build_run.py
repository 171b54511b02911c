"""Builds a run folder as the loop would leave it (ledger, run.json, patches, CPU traces), small and seeded.

The numbers are invented but consistent: a test recomputes the report's figures from this folder. Not for:
testing the loop itself.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE_US = 55_000.0  # per token


def canonical(line: dict[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


INCUMBENT = "a1b2c3d4" * 5


class LedgerBuilder:
    """Appends hash-chained lines."""

    def __init__(self, path: Path) -> None:
        self.path, self.seq, self.prev = path, 0, "0" * 64
        path.write_text("", "utf-8")

    def add(self, kind: str, data: dict[str, Any], attempt: int | None = None) -> None:
        line = {
            "v": 1, "seq": self.seq, "prev": self.prev, "t_utc": f"2026-11-29T10:{self.seq // 60:02}:{self.seq % 60:02}.000+00:00",
            "kind": kind, "attempt": attempt, "incumbent_commit": INCUMBENT, "gates_digest": "5ea1" * 16,
            "sandbox_level": "bwrap", "env_hash": "e0" * 32, "data": data,
        }  # fmt: skip
        line["hash"] = hashlib.sha256(canonical(line).encode()).hexdigest()
        with self.path.open("a", encoding="utf-8") as out:
            out.write(canonical(line) + "\n")
        self.seq, self.prev = self.seq + 1, line["hash"]


@dataclass(frozen=True)
class Plan:
    """One attempt: what is proposed and how it ends."""

    mechanism: str
    finding: str
    predicted_us: float
    ratio: float | None = None  # true effect; None: stopped by a gate
    outcome: str = "accepted"
    reason: str = ""
    stage: str = "confirm"
    detail: str = ""
    gates: Sequence[str] = ("scope", "policy", "seal", "boot", "greedy", "tokens")


PLANS = (
    Plan("custom-all-reduce", "comm-wait", 38_000, 0.27),
    Plan("inference-mode", "autograd-on", 900, 0.94),
    Plan("remove-host-reads", "host-reads", 310, None, "rejected", "wrong_tokens", "quick",
         "stream 3 differs from the oracle at token 17: 412 instead of 98", ("scope", "policy", "seal", "boot", "greedy")),
    Plan("preallocate-decode", "allocations", 450, 0.997, "undecided", "", "decide", "effect -0.3 % is below the margin 2 %"),
    Plan("merge-qkv", "split-gemms", 600, 0.93),
    Plan("bf16-norm", "pointwise-chain", 200, None, "parked", "drift", "quick", "max |delta logit| 0.004 lies above the reorder band"),
    Plan("spin-barrier", "comm-wait", 700, None, "rejected", "hang", "quick", "no token for 30 s at TP=4", ("scope", "policy", "seal", "boot")),
)  # fmt: skip


def _key(attempt: int | None) -> str:
    return hashlib.sha256(f"program {attempt}".encode()).hexdigest()


def _pairs(ledger: LedgerBuilder, rng: random.Random, attempt: int | None, stage: str, n: int, a: float, ratio: float, key: str = "") -> None:
    for index in range(n):
        left, right = a * rng.uniform(0.985, 1.015), a * ratio * rng.uniform(0.985, 1.015)
        discarded = "load average rose above 1.5 during the pair" if stage == "decide" and index == 1 else None
        ledger.add(
            "pair",
            {"stage": stage, "index": index, "order": "ab" if index % 2 else "ba",
             "prompts_sha": hashlib.sha256(f"{attempt}{stage}{index}".encode()).hexdigest(),
             "a_us_per_token": None if discarded else left, "b_us_per_token": None if discarded else right,
             "discarded": discarded, "key": key or _key(attempt), "seconds": 8.0},
            attempt,
        )  # fmt: skip


def _stage(stage: str, ratio: float, passed: bool) -> dict[str, Any]:
    return {"stage": stage, "passed": passed, "p": 0.004 if passed else 0.4, "ratio": ratio,
            "ci95": [ratio * 0.985, ratio * 1.015], "pairs": 6, "early": False, "why": ""}  # fmt: skip


def _attempt(ledger: LedgerBuilder, rng: random.Random, run: Path, number: int, plan: Plan, level: float) -> float:
    folder = run / "attempts" / str(number)
    folder.mkdir(parents=True)
    patch = {
        "edits": [{"file": "engine/comm.py", "old": "dist.all_reduce(x)", "new": "shm.all_reduce(x)"}],
        "finding_ids": [plan.finding], "mechanism": plan.mechanism, "predicted_us": plan.predicted_us, "per": "token",
        "title": f"{plan.mechanism.replace('-', ' ')} in the decode step",
    }  # fmt: skip
    (folder / "patch.json").write_text(json.dumps({"patches": [patch]}), "utf-8")
    ledger.add(
        "proposed",
        {"patch_sha": hashlib.sha256(plan.mechanism.encode()).hexdigest(), "ast_hash": _key(number),
         "finding_ids": [plan.finding], "mechanism": plan.mechanism, "predicted_us": plan.predicted_us,
         "per": "token", "proposer": "playbook", "usd": 0.0},
        number,
    )  # fmt: skip
    for at, gate in enumerate(plan.gates):
        last = at == len(plan.gates) - 1 and plan.ratio is None
        ledger.add(
            "gate",
            {"gate": gate, "check": f"G{at:02}", "passed": not last, "reason": plan.reason if last else None,
             "detail": plan.detail if last else "", "seconds": 0.4, "parked": last and plan.outcome == "parked"},
            number,
        )  # fmt: skip
    if plan.ratio is None:
        ledger.add(plan.outcome, {"stage": plan.stage, "reason": plan.reason, "detail": plan.detail}, number)
        return level
    done = {"undecided": ("screen", "decide")}.get(plan.outcome, ("screen", "decide", "confirm"))
    for stage, kind, n in (("screen", "screened", 3), ("decide", "decided", 6), ("confirm", "confirmed", 6)):
        if stage in done:
            _pairs(ledger, rng, number, stage, n, level, plan.ratio)
            ledger.add(kind, _stage(stage, plan.ratio, plan.outcome == "accepted" or stage == "screen"), number)
    data: dict[str, Any] = {"stage": plan.stage, "detail": plan.detail, "mechanism": plan.mechanism}
    if plan.outcome == "accepted":
        data |= {"commit": hashlib.sha1(plan.mechanism.encode()).hexdigest(), "traced_us": level * (1 - plan.ratio) * 1.1}
        ledger.add("accepted", data, number)
        ledger.add("knowledge_proposed", {"entries": [f"{plan.mechanism}-cpu-tp4"]}, number)
        return level * plan.ratio
    ledger.add(plan.outcome, data, number)
    return level


def build_run(run: Path, *, plans: Sequence[Plan] = PLANS, finished: bool = True, traces: bool = True) -> Path:
    """Write a whole run folder under `run`; without `finished` it looks like a run killed before its headline."""
    rng = random.Random(7)
    run.mkdir(parents=True, exist_ok=True)
    info = {
        "schema": 1, "id": "20261129-100000-7a3f", "created_utc": "2026-11-29T10:00:00.000+00:00",
        "target_dir": "/home/eng/tiny", "target": "tiny-qwen3", "python": "/usr/bin/python3",
        "model_dir": "/home/eng/tiny/tiny_qwen3", "metric": "tok/s", "tp": 4, "device": "cpu", "dtype": "float32",
        "agent": "playbook", "protocol": "quick", "seed": 7, "goal": {"kind": "factor", "value": 3.0}, "devices": [],
        "limits": {"attempts": 8, "wall_minutes": 10.0}, "sandbox": "auto", "sandbox_level": "bwrap",
        "gates_digest": "5ea1" * 16, "weights_sha256": "77" * 32, "prompt_key": "secret-" + "9d" * 16,
        "root_commit": "a1b2c3d4" * 5, "model": {"hidden_size": 256, "num_hidden_layers": 4}, "options": {},
        "environment": {"cpu": "2 cores, AMD EPYC", "torch": "2.13.0+cpu", "python": "3.11.7", "hash": "e0" * 32},
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(info, indent=1), "utf-8")
    ledger = LedgerBuilder(run / "ledger.jsonl")
    ledger.add("run_started", {k: v for k, v in info.items() if k != "prompt_key"})
    ledger.add("captured", {"label": "baseline", "traces": [f"traces/baseline/rank{r}.json.gz" for r in range(4)],
                            "tp": 4, "batch": 1, "control_us_per_token": 6900.0, "reference": False})  # fmt: skip
    ledger.add("captured", {"label": "hf", "traces": ["traces/hf/rank0.json.gz"], "tp": 4, "batch": 1, "reference": True,
                            "title": "transformers TP=4", "control_us_per_token": 9100.0})  # fmt: skip
    _pairs(ledger, rng, None, "calibrate", 4, BASE_US, 1.0)
    ledger.add("calibrated", {"pairs": 4, "log_sd": 0.012, "bias": 0.001, "margin": 0.02, "mde": 0.028,
                              "bound_us_per_token": 640.0, "bound_bytes": 6_400_000, "bandwidth_bytes_per_s": 1e10})  # fmt: skip
    level = BASE_US
    for number, plan in enumerate(plans, 1):
        level = _attempt(ledger, rng, run, number, plan, level)
        ledger.add("budget", {"attempts_left": len(plans) - number, "seconds_left": 600 - 70 * number})
    if finished:
        _pairs(ledger, rng, None, "headline", 5, BASE_US, level / BASE_US, f"headline/{INCUMBENT}")
        ledger.add("decided", {"stage": "ablate", "passed": True, "ratio": 0.94, "ci95": [0.92, 0.96], "pairs": 6,
                               "title": "inference mode in the decode step", "of_attempt": 2, "why": "buys 6 %"})  # fmt: skip
        ledger.add("decided", {"stage": "ablate", "passed": True, "ratio": 1.0, "ci95": [0.0, 1e9], "pairs": 0, "title": "inference mode in the decode step",
                               "hunks": 2, "kept": 2, "tried": ["buys -1.4%", "buys +6.0%"], "why": "nothing could be left out"})  # fmt: skip
        ledger.add("finished", {"reason": "no finding left whose bound could reach the margin", "headline": None})
    if traces:
        for rank in range(4):
            write_trace(run / "traces" / "baseline" / f"rank{rank}.json.gz", rank, comm_us=8000, autograd=True)
            write_trace(run / "traces" / "1" / f"rank{rank}.json.gz", rank, comm_us=200, autograd=True)
            write_trace(run / "traces" / "2" / f"rank{rank}.json.gz", rank, comm_us=200, autograd=False)
        write_trace(run / "traces" / "hf" / "rank0.json.gz", 0, comm_us=0, autograd=False, world=1)
    return run


def write_trace(path: Path, rank: int, *, comm_us: float, autograd: bool, world: int = 4, steps: int = 6) -> None:
    """A CPU-only Kineto trace of one prefill and `steps` decode steps of a four-layer engine."""
    events: list[dict[str, Any]] = []
    clock = 1000.0

    def op(name: str, dur: float, cat: str = "cpu_op", inside: Sequence[tuple[str, float]] = ()) -> None:
        nonlocal clock
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 100 + rank, "tid": 100 + rank, "ts": round(clock, 3),
                       "dur": dur, "args": {"External id": len(events) + 1}})  # fmt: skip
        at = clock + 1
        for child, length in inside:
            events.append({"ph": "X", "cat": "cpu_op", "name": child, "pid": 100 + rank, "tid": 100 + rank,
                           "ts": round(at, 3), "dur": length, "args": {"External id": len(events) + 1}})  # fmt: skip
            at += length + 1
        clock += dur + 2

    for step in range(steps + 1):
        start, mark = clock, len(events)
        clock += 30
        for _layer in range(4):
            op("aten::rms_norm", 60, inside=[("aten::pow", 15), ("aten::mean", 12), ("aten::mul", 11)])
            for _ in range(3):
                op("aten::linear", 95, inside=[("aten::t", 6), ("aten::mm", 70 if autograd else 62)])
            op("aten::scaled_dot_product_attention", 120)
            op("aten::linear", 90, inside=[("aten::mm", 70)])
            if world > 1:
                late = comm_us / 16 if rank == 2 else 0.0  # rank 2 arrives late and leaves with the others
                clock += late
                op("c10d::allreduce_", comm_us / 8 - late, inside=[("gloo:all_reduce", comm_us / 10 - late)])
            op("aten::silu", 25)
            op("aten::linear", 180, inside=[("aten::mm", 160)])
            if autograd:
                op("aten::clone", 25, inside=[("aten::empty_like", 8), ("aten::copy_", 9)])
        op("aten::item", 12, inside=[("aten::_local_scalar_dense", 6)])
        name = "execute_context_1(12)_generation_0(0)" if step == 0 else "execute_context_0(0)_generation_1(1)"
        events.insert(mark, {"ph": "X", "cat": "user_annotation", "name": name, "pid": 100 + rank, "tid": 100 + rank,
                             "ts": round(start, 3), "dur": round(clock - start, 3)})  # fmt: skip
        clock += 50
    data = {
        "schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": 1_790_000_000_000_000_000,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world}, "deviceProperties": [],
        "traceEvents": events,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(data).encode(), 6, mtime=0))
