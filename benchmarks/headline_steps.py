"""The steps of the headline's sitting: bound, search, pairs, context, and what is said at the end.

Each leaves its results in the sitting's record and skips what is there already. Not for: the cells (`headline_cells.py`) or
the settings (`headline_settings.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import bandwidth
from benchmarks import headline_cells as cells
from benchmarks.headline_settings import DEFAULTS, joined, settings
from benchmarks.headline_sitting import Sitting
from optimizer import stats
from optimizer.confine.launch import LaunchError, Server, launch
from optimizer.confine.sandbox import SandboxError
from optimizer.environment import query_gpus
from optimizer.gates.model_math import Model
from optimizer.outside import Outside, OutsideError, serve
from optimizer.target import load_target
from optimizer.traffic.client import Client, ClientError
from optimizer.traffic.loadgen import LoadError, LoadGenerator
from optimizer.vllm_server import BYTES, Common, Setting, command, stated

REPO = Path(__file__).resolve().parent.parent
TURNS = 3  # timed per setting, after one that is not
DEADLINE_S = 120.0  # of one batch of requests
PAIRS_NEED_S = 150.0  # kept back for the pairs while the search goes on: two starts, and six turns of each
FIRST_GUESS_S = 75.0  # a setting's start and turns, before one was seen
ENOUGH_PAIRS, ENOUGH_SETTINGS = 6, 8
FAILURES = (OutsideError, LaunchError, SandboxError, cells.NotTimed, ClientError, LoadError, OSError)


def bound(sitting: Sitting) -> None:
    """What the card reads at, and so the least time of a decoded token at batch 1: every rank reads its share at once.

    What the ranks say to each other is not in it.
    """
    if sitting.of("bound"):
        return
    env = dict(os.environ)
    if sitting.options.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = str(sitting.options.gpu)
    found = bandwidth.elsewhere(sitting.options.device, env)
    size = rank_bytes(sitting.common)
    ms = size / found["read_TBs"] / 1e9 if found.get("read_TBs") else None
    sitting.emit("bound", token_bytes=size, bound_ms=ms, **found)


def rank_bytes(common: Common) -> int:
    """Bytes of weights that one decoded token reads on each rank: its share of projections and head, and all norms."""
    shape = Model.of(common.model)
    whole, share = (shape.layers * shape.layer_weights(tp) + shape.head_weights(tp) for tp in (1, common.tp))
    return bandwidth.token_bytes(common.model, common.dtype) - (whole - share) * BYTES[common.dtype]


# -- search ---------------------------------------------------------------------------------------------------


def search(sitting: Sitting) -> None:
    """Every setting once, one or two at a time; at the end one that joins what helped, if there is time."""
    only, tried = _only(sitting), settings(sitting.common.tp)
    todo: queue.SimpleQueue[Setting] = queue.SimpleQueue()
    for setting in tried:
        if (not only or setting.name in only) and not sitting.of("setting", setting=setting.name):
            todo.put(setting)
    gpus = [sitting.options.gpu] + ([sitting.options.vllm_gpu] if sitting.options.vllm_gpu is not None else [])
    workers = [threading.Thread(target=_search_on, args=(sitting, gpu, todo)) for gpu in gpus[1:]]
    for worker in workers:
        worker.start()
    _search_on(sitting, gpus[0], todo)
    for worker in workers:
        worker.join()
    last = joined(scores(sitting), tried)
    if last is not None and todo.empty() and not sitting.of("setting", setting=last.name) and _time_for_one(sitting):
        with LoadGenerator() as generator:
            _try(sitting, last, gpus[0], generator)


def _search_on(sitting: Sitting, gpu: int, todo: queue.SimpleQueue[Setting]) -> None:
    with LoadGenerator() as generator:
        while _time_for_one(sitting):
            try:
                setting = todo.get_nowait()
            except queue.Empty:
                return
            _try(sitting, setting, gpu, generator)


def _time_for_one(sitting: Sitting) -> bool:
    seen = [e["seconds"] for e in sitting.of("setting", status="timed")]
    kept = PAIRS_NEED_S if "pairs" in sitting.options.steps and sitting.options.device == "cuda" else 0.0
    return sitting.left_s() > kept + (max(seen) if seen else FIRST_GUESS_S if sitting.options.device == "cuda" else 0.0)


def _try(sitting: Sitting, setting: Setting, gpu: int, generator: LoadGenerator) -> None:
    """Start, check and time one setting; whatever happens becomes a line."""
    how = command(sitting.common, setting)
    entry: dict[str, Any] = {"setting": setting.name, "command": str(how).replace("{model_dir}", str(sitting.common.model)), "gpu": gpu}
    began = time.monotonic()
    timeout = max(5.0, min(sitting.options.start_timeout, sitting.left_s() - 5.0))
    log = sitting.options.out / "logs" / f"{setting.name.replace('/', '-').replace(' ', '_')}.log"
    try:
        with serve(
            how, sitting.common.model, sitting.options.vllm_python, timeout_s=timeout, devices=sitting.gpus(gpu), log_to=log
        ) as server:
            entry |= {"start_s": server.start_s} | _time_alone(sitting, server, generator)
    except FAILURES as error:
        entry |= {"status": "failed", "why": str(error)[-3000:]}
    sitting.emit("setting", **entry, seconds=time.monotonic() - began)


def _time_alone(sitting: Sitting, server: Outside, generator: LoadGenerator) -> dict[str, Any]:
    good, shas = [], []
    for turn in ("warm", *range(2 * TURNS)):
        work = cells.requests(sitting.jobs, sitting.prompts, f"search/{turn}")
        try:
            taken = cells.take(server.client, generator, work, DEADLINE_S)
        except cells.AtOnce:
            if turn == 2 * TURNS - 1 and not good:
                raise
            continue
        if turn != "warm":
            good.append(taken)
            shas.append(cells.sha(work))
        if len(good) == TURNS:
            break
    said, against = judge(sitting, server)
    ms = {cell: statistics.median(t.ms[cell] for t in good) for cell in good[0].ms}
    spread = {cell: max(t.ms[cell] for t in good) / min(t.ms[cell] for t in good) for cell in ms}
    return {"status": "unfair" if against else "timed", "why": "; ".join(against), "ms": ms, "spread": spread,
            "prompts_sha": shas, "stated": said}  # fmt: skip


def judge(sitting: Sitting, server: Outside) -> tuple[dict[str, Any], list[str]]:
    """What a vLLM server says of itself, and what speaks against comparing with it."""
    said = stated(server.log(), server.client.metrics())
    card = server.client.models()["data"][0]
    against = cells.unfair(sitting.terms, said, card.get("max_model_len"))
    if card.get("root") not in (None, str(sitting.common.model)):
        against.append(f"serves {card.get('root')}, not the model that was asked for")
    return asdict(said) | {"max_model_len": card.get("max_model_len"), "model": card.get("root")}, against


def scores(sitting: Sitting) -> dict[str, float]:
    """Mean over the cells of log ms, of every setting that was timed and may be compared."""
    timed = sitting.of("setting", status="timed")
    return {e["setting"]: statistics.fmean(math.log(ms) for ms in e["ms"].values()) for e in timed}


# -- pairs ----------------------------------------------------------------------------------------------------


def pairs(sitting: Sitting) -> None:
    """Ours and the best setting in turns; where another is the best at batch 1, ours against that one there, too.

    With `--only` one setting that no search has tried, that one: a result says how many settings were timed.
    """
    if len(only := _only(sitting)) == 1 and not sitting.of("setting", setting=only[0]):
        _against(sitting, only[0], sitting.jobs)
        return
    found = scores(sitting)
    if not found:
        sitting.emit("no_pairs", why="no vLLM setting was timed")
        return
    at_1 = {e["setting"]: e["ms"]["decode, batch 1"] for e in sitting.of("setting", status="timed")}
    best, best_at_1 = min(found, key=found.__getitem__), min(at_1, key=at_1.__getitem__)
    _against(sitting, best, sitting.jobs)
    if best_at_1 != best and sitting.left_s() > PAIRS_NEED_S / 2:
        _against(sitting, best_at_1, [job for job in sitting.jobs if job.name == "b1"])


def _only(sitting: Sitting) -> list[str]:
    """The settings that were asked for by name; none: all. Raises SystemExit for a name that is not there."""
    only = [name.strip() for name in sitting.options.only.split(",") if name.strip()]
    there = [s.name for s in settings(sitting.common.tp)]
    if unknown := sorted(set(only) - set(there)):
        raise SystemExit(f"no setting {', '.join(unknown)}; there are: {', '.join(there)}")
    return only


def _against(sitting: Sitting, name: str, jobs: Any) -> None:
    tried = settings(sitting.common.tp)
    setting = next(s for s in (*tried, joined(scores(sitting), tried) or tried[0]) if s.name == name)
    options = sitting.options
    gpu = options.gpu if options.vllm_gpu is None or options.same_card else options.vllm_gpu
    how = command(sitting.common, setting)
    timeout = max(5.0, min(options.start_timeout, sitting.left_s() - 10.0))
    log = options.out / "logs" / "pairs-vllm.log"
    same = {"setting": name, "ours_sha256": sitting.ours_digest, "launch": f"{time.time_ns():x}", "vllm_gpu": gpu}
    try:
        with (
            serve(how, sitting.common.model, options.vllm_python, timeout_s=timeout, devices=sitting.gpus(gpu), log_to=log) as theirs,
            launch(sitting.ours, log_to=options.out / "logs" / "pairs-ours.log") as ours,
            LoadGenerator() as generator,
        ):
            against = _ours_unfair(sitting, ours) + judge(sitting, theirs)[1]
            agreed = [] if against else list(_take_turns(sitting, {"ours": ours.client, "vllm": theirs.client}, generator, jobs, same))
            said, later = judge(sitting, theirs)
            started = {"ours": ours.start_s, "vllm": theirs.start_s}
            about = {"ours": ours.metadata, "vllm": said, "start_s": started, "sandbox": ours.level.name}
    except FAILURES as error:
        sitting.emit("no_pairs", **same, why=str(error)[-3000:])
        return
    against += later
    if agreed and (share := statistics.fmean(a["first_token_same"] for a in agreed)) < cells.SAME_MODEL:
        against.append(f"only {share:.0%} of the streams begin with the same token: not the same model")
    sitting.emit("fairness", **same, against=against, agreement=agreed, **about)


def _ours_unfair(sitting: Sitting, ours: Server) -> list[str]:
    """Ours by the same terms."""
    said, terms, found = ours.metadata, sitting.terms, []
    if said.get("dtype") != terms.dtype:
        found.append(f"ours computes in {said.get('dtype')}, asked for {terms.dtype}")
    if said.get("max_model_len") != terms.max_model_len:
        found.append(f"ours has max_model_len {said.get('max_model_len')}, asked for {terms.max_model_len}")
    if said.get("tp", 1) != sitting.common.tp:
        found.append(f"ours runs on {said.get('tp', 1)} ranks, asked for {sitting.common.tp}")
    return found


def _take_turns(sitting: Sitting, servers: dict[str, Client], generator: LoadGenerator, jobs: Any, same: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Pairs until there are enough or the time is up; yields how far the tokens of each pair agree."""
    warm = cells.requests(jobs, sitting.prompts, "pairs/warm")
    longest = 0.0
    for client in servers.values():
        for _ in range(2):
            with contextlib.suppress(cells.AtOnce):
                cells.take(client, generator, warm, DEADLINE_S)
    taken = 0
    for index in range(2 * sitting.options.pairs):
        if taken == sitting.options.pairs or sitting.left_s() < 2 * longest + 5.0:
            return
        began = time.monotonic()
        work = cells.requests(jobs, sitting.prompts, f"pairs/{same['launch']}/{index}")
        order = ("ours", "vllm") if index % 4 in (0, 3) else ("vllm", "ours")
        try:
            turns = {name: cells.take(servers[name], generator, work, DEADLINE_S) for name in order}
        except cells.AtOnce as error:
            sitting.emit("pair_discarded", **same, index=index, why=str(error))
            continue
        longest = max(longest, time.monotonic() - began)
        ms = {name: turn.ms for name, turn in turns.items()}
        cards = [asdict(card) for card in query_gpus(sitting.gpus(sitting.options.gpu) + sitting.gpus(same["vllm_gpu"]))] if sitting.options.device == "cuda" else []
        sitting.emit("pair", **same, index=index, order=list(order), ms=ms, prompts_sha=cells.sha(work), gpus=cards)
        taken += 1
        yield cells.agreement(turns["ours"].streams, turns["vllm"].streams)


# -- context --------------------------------------------------------------------------------------------------


def context(sitting: Sitting) -> None:
    """The plain engine and transformers, once each: how far the others have come. No interval, no ratio."""
    short = [replace(job, new_tokens=min(job.new_tokens, 33), repeats=1) for job in sitting.jobs if job.name in ("b1", "p1024")]
    hf = load_target(REPO / "docs" / "examples" / "hf_target")
    for name, spec, jobs in (
        ("the plain engine", sitting.plain, [replace(job, new_tokens=min(job.new_tokens, 33), repeats=1) for job in sitting.jobs]),
        ("transformers, eager", replace(sitting.plain, tree=hf.root, target=hf, label="transformers", extra_args=()), short),
    ):
        if sitting.of("context", engine=name, ours_sha256=sitting.ours_digest) or sitting.left_s() < 20.0:
            continue
        if spec.tp not in spec.target.tp:
            sitting.emit("context", engine=name, ours_sha256=sitting.ours_digest, why=f"it does not run on {spec.tp} ranks")
            continue
        try:
            with launch(spec, timeout_s=max(5.0, sitting.left_s() - 5.0)) as server, LoadGenerator() as generator:
                for turn in ("warm", "timed"):
                    work = cells.requests(jobs, sitting.prompts, f"context/{turn}")
                    found = cells.take(server.client, generator, work, min(DEADLINE_S, max(5.0, sitting.left_s())))
                about = {"ms": found.ms, "start_s": server.start_s, "metadata": server.metadata}
        except FAILURES as error:
            about = {"why": str(error)[-2000:]}
        sitting.emit("context", engine=name, ours_sha256=sitting.ours_digest, **about)


# -- what is said at the end ----------------------------------------------------------------------------------


def summary(sitting: Sitting) -> list[str]:
    """The table of settings, then of every opponent the ratios, or why there are none. Results enter the record."""
    said = _settings_table(sitting)
    tried = [*sitting.of("pair", ours_sha256=sitting.ours_digest), *sitting.of("fairness", ours_sha256=sitting.ours_digest)]
    for name in dict.fromkeys(e["setting"] for e in tried):
        said += _verdict(sitting, name)
    for entry in sitting.of("no_pairs")[-1:]:
        said.append(f"no pairs: {entry['why'].splitlines()[0]}")
    for entry in sitting.of("context", ours_sha256=sitting.ours_digest):
        times = ", ".join(f"{cell} {ms:.2f} ms" for cell, ms in entry.get("ms", {}).items())
        said.append(f"for context, {entry['engine']}: {times or entry['why'].splitlines()[0]}")
    return said


def _settings_table(sitting: Sitting) -> list[str]:
    found = scores(sitting)
    base = found.get(DEFAULTS)
    said = [f"vLLM settings, ms per cell: {'; '.join(cells.CELLS)}"]
    for entry in sitting.of("setting"):
        if entry["status"] != "timed":
            said.append(f"  {entry['setting']:32} {entry['status']}: {_last_line(entry['why'])}")
            continue
        share = f"{math.exp(found[entry['setting']] - base):.3f} of the defaults' time" if base is not None else ""
        said.append(f"  {entry['setting']:32} {'  '.join(f'{ms:8.3f}' for ms in entry['ms'].values())}  {share}")
    missed = [s.name for s in settings(sitting.common.tp) if not sitting.of("setting", setting=s.name)]
    return said + ([f"  not reached: {', '.join(missed)}"] if missed else [])


def _verdict(sitting: Sitting, name: str) -> list[str]:
    checks = {e["launch"]: e["against"] for e in sitting.of("fairness", setting=name, ours_sha256=sitting.ours_digest)}
    taken = sitting.of("pair", setting=name, ours_sha256=sitting.ours_digest)
    unchecked = ["the sitting ended before the last check of what was compared"]
    against = {launch: checks.get(launch, unchecked) for launch in dict.fromkeys([*(p["launch"] for p in taken), *checks])}
    taken = [pair for pair in taken if not against[pair["launch"]]]
    if not taken:
        why = list(dict.fromkeys(reason for reasons in against.values() for reason in reasons)) or ["no pair was timed"]
        sitting.emit("result", setting=name, ours_sha256=sitting.ours_digest, excluded=why)
        return [f"ours against vLLM, {name}: no ratio, because {'; '.join(why)}"]
    result = ratios(taken)
    limits = sitting.of("bound")
    bound_ms = limits[-1]["bound_ms"] if limits else None
    timed = len(sitting.of("setting", status="timed"))
    short = [] if timed >= ENOUGH_SETTINGS else [f"only {timed} settings were timed"]
    short += [] if len(taken) >= ENOUGH_PAIRS else [f"only {len(taken)} pairs"]
    sitting.emit("result", setting=name, ours_sha256=sitting.ours_digest, settings_timed=timed, bound_ms=bound_ms, short=short, **result)
    said = [f"ours against vLLM, {name} (vLLM's time over ours; above 1 ours is faster){': ' + '; '.join(short) if short else ''}"]
    for cell, row in result["cells"].items():
        share = f", {bound_ms / row['ours_ms']:.0%} of the bound" if bound_ms and cell == "decode, batch 1" else ""
        rate = f", {1000 / row['ours_ms']:.1f} against {1000 / row['vllm_ms']:.1f} tok/s" if cell == "decode, batch 1" else ""
        said.append(f"  {cell:32} {row['ours_ms']:8.3f} {row['vllm_ms']:8.3f} ms  {_interval(row)}{rate}{share}")
    return said + ([f"  {'geometric mean':32} {'':20} {_interval(result['geometric_mean'])}"] if result["geometric_mean"] else [])


def ratios(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Per cell and over all: exp of the mean log ratio of the pairs, with its 95 % t interval."""
    logs = {c: [math.log(p["ms"]["vllm"][c] / p["ms"]["ours"][c]) for p in taken] for c in taken[0]["ms"]["ours"]}
    rows = {
        cell: _exp(values) | {who + "_ms": statistics.median(p["ms"][who][cell] for p in taken) for who in ("ours", "vllm")}
        for cell, values in logs.items()
    }
    whole = len(logs) == len(cells.CELLS)
    mean = _exp([statistics.fmean(each) for each in zip(*logs.values(), strict=True)]) if whole else None
    return {"pairs": len(taken), "launches": len({p["launch"] for p in taken}), "cells": rows, "geometric_mean": mean}


def _exp(values: list[float]) -> dict[str, Any]:
    low, high = stats.t_interval(values)
    bounded = math.isfinite(low)
    return {"ratio": math.exp(statistics.fmean(values)), "ci95": [math.exp(low), math.exp(high)] if bounded else None}


def _interval(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f}" + (f" [{row['ci95'][0]:.3f}, {row['ci95'][1]:.3f}]" if row["ci95"] else " (one pair)")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:160]
