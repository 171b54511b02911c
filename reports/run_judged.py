"""How a run was judged, and the command that repeats it: seal, sandbox, noise, environment, ledger. Not for: results."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

from reports.run_data import Run
from reports.text import micro


def percent(value: object, digits: int = 1) -> str:
    return f"{value:.{digits}%}" if isinstance(value, int | float) else "n/a"


def goal(info: dict[str, Any]) -> str:
    goal = info.get("goal")
    if isinstance(goal, dict) and goal.get("value") is not None:
        value = f"{goal['value']:g}"
        return f"{value}x" if goal.get("kind") == "factor" else f"{value} {goal.get('unit', 'tok/s')}"
    return str(goal) if goal else "none set"


def command(info: dict[str, Any]) -> str:
    """The exact command where the run kept it, else the same request spelled out."""
    if isinstance(info.get("argv"), list):
        return shlex.join(str(a) for a in info["argv"])
    limits = info.get("limits") or {}
    flags = [
        ("--target", info.get("metric") or "tok/s"),
        ("--goal", goal(info).split()[0] if info.get("goal") else None),
        ("--target-dir", info.get("target_dir")),
        ("--python", info.get("python")),
        ("--model", info.get("model_dir")),
        ("--tp", info.get("tp")),
        ("--device", info.get("device")),
        ("--agent", info.get("agent")),
        ("--protocol", info.get("protocol")),
        ("--attempts", limits.get("attempts")),
        ("--budget-minutes", limits.get("wall_minutes")),
        ("--max-rejections", limits.get("consecutive_rejections")),
        ("--gpu-minutes", limits.get("gpu_minutes")),
        ("--max-usd", limits.get("usd")),
        ("--devices", ",".join(map(str, info.get("devices") or ())) or None),
        ("--engine-args", shlex.join(map(str, info.get("engine_args") or ())) or None),
        ("--knowledge", info.get("knowledge")),
        ("--without-knowledge", ",".join(info.get("without_knowledge") or ()) or None),
        *(("--guard-margin", f"{name}={share:g}") for name, share in sorted((info.get("guard_margins") or {}).items())),
        *_options(info.get("options") or {}),
        ("--seed", info.get("seed")),
    ]
    words = [w for flag, value in flags if value is not None for w in (flag, f"{value:g}" if isinstance(value, float) else str(value))]
    return shlex.join(["optimize", *words, *(["--accept-numeric-drift"] if info.get("accept_numeric_drift") else [])])


def _options(options: dict[str, Any]) -> list[tuple[str, object]]:
    """The proposer's options as they were given on the command line."""
    named = {"only": ("--skills", ","), "folders": ("--trust-skills", None)}
    found: list[tuple[str, object]] = []
    for key, value in options.items():
        flag, joined = named.get(key, ("--agent-option", ""))
        if joined:
            found.append((flag, joined.join(map(str, value))))
        elif joined is None:
            found += [(flag, str(v)) for v in value]
        else:
            found.append((flag, f"{key}={value}"))
    return found


def judged(run: Run) -> list[tuple[str, str]]:
    """How it was judged: name, value. Secrets of run.json (the prompt key) are never listed."""
    info, last = run.info, run.lines[-1] if run.lines else {}
    calibrated = run.last("calibrated")
    gates = Counter(str(g.get("gate")) for a in run.attempts for g in a.gates)
    rows = [
        ("Gates run", ", ".join(f"{name} {n}x" for name, n in gates.most_common()) or "none"),
        ("Seal digest", str(last.get("gates_digest") or info.get("gates_digest") or "not recorded")),
        ("Sandbox level", str(last.get("sandbox_level") or info.get("sandbox_level") or "not recorded")),
        ("Protocol", str(info.get("protocol") or "not recorded")),
    ]
    if calibrated:
        rows += [
            ("Noise (A/A)", f"sd of paired log-ratios {percent(calibrated.get('log_sd'))}, bias "
             f"{percent(calibrated.get('bias'), 2)}, {calibrated.get('pairs', 'n/a')} pairs"),
            ("Margin to clear", percent(calibrated.get("margin"))),
            ("Minimum detectable effect", percent(calibrated.get("mde")) + " at 80 % power"),
        ]  # fmt: skip
    else:
        rows.append(("Noise (A/A)", "not calibrated"))
    if bound := _bound(run):
        rows.append(("Lower bound", bound))
    rows += [
        ("Weights sha256", str(info.get("weights_sha256") or "not recorded")),
        ("Root commit", str(info.get("root_commit") or "not recorded")),
        ("Environment", environment(info.get("environment"))),
        ("Environment hash", str(last.get("env_hash") or "not recorded")),
        ("Ledger", f"{len(run.lines)} lines, head {run.last_hash or 'none'}"),
        ("Ledger file sha256", run.ledger_sha256),
        ("Hash chain", {True: "whole", False: "BROKEN", None: "empty ledger"}[run.chain_ok]),
    ]
    return rows


def _bound(run: Run) -> str:
    """What the bound in the headline is made of."""
    found = next((d for d in run.kinds.get("calibrated", ()) if d.get("bandwidth_bytes_per_s")), None)
    if found is None:
        return ""
    size, rate = found["bound_bytes"], found["bandwidth_bytes_per_s"]
    return f"{micro(found['bound_us_per_token'])} a token: {size / 1e6:,.1f} MB of weights in {run.info.get('dtype')}, at {rate / 1e9:,.1f} GB/s measured before the first candidate"


def environment(values: object) -> str:
    if not isinstance(values, dict) or not values:
        return "not recorded"
    flat = [f"{k} {v}" for k, v in sorted(values.items()) if k != "hash" and not isinstance(v, dict | list)]
    gpus = Counter(str(g.get("name")) for g in values.get("gpus") or () if isinstance(g, dict))
    flat += [f"{n}x {name}" for name, n in gpus.items()]
    versions = values.get("versions")
    flat += [f"{k} {v}" for k, v in sorted(versions.items()) if v] if isinstance(versions, dict) else []
    return "; ".join(flat)
