"""The view of a run: what its HTML page and its Markdown both say, as plain values and ready sentences.

Takes `run_data.Run`; adds no number of its own beyond unit changes (tok/s = 1e6 / us per token). Not for:
reading files, drawing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from reports import run_clients
from reports.run_data import Attempt, Measured, Run
from reports.run_judged import command, goal, judged
from reports.text import micro
from reports.views import Prediction, Reference, WaterfallStep

_REASONS = {
    "declined": "the patch did not apply",
    "scope": "outside the patch envelope",
    "policy": "failed the source check",
    "seal": "changed a gate",
    "boot": "did not start",
    "crash": "died while judged or timed",
    "hang": "passed a deadline",
    "wrong_tokens": "wrong tokens",
    "token_accounting": "miscounted tokens",
    "shapes": "wrong at another shape",
    "sampling": "wrong sampling",
    "weights": "ignores the weights it was given",
    "physics": "faster than bytes and FLOPs allow",
    "witness": "trace does not show the model's arithmetic",
    "resources": "uses more than it may",
    "races": "races",
    "start_up": "slower start-up",
    "drift": "numeric drift",
    "not_activated": "the change is not active",
    "guard": "another metric got worse",
    "no_gain": "no gain",
    "no_budget": "no budget left",
    "infrastructure": "the machine failed",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One attempt in a table; texts are ready to print."""

    number: int
    mechanism: str
    title: str
    outcome: str
    reason: str
    detail: str
    findings: tuple[str, ...]
    predicted: str
    measured: str
    traced: str
    speedup: str
    interval: str
    pairs: str
    gates: str
    proposer: str
    commit: str
    edits: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Headline:
    """The first box of the page."""

    sentence: str
    before: str  # tok/s
    after: str
    before_us: str
    after_us: str
    speedup: str
    interval: str
    basis: str  # where the numbers come from
    goal: str
    bound: str  # least time per token
    bound_rate: str  # the same as tok/s; "" where it is not known


@dataclass(slots=True)
class RunPage:
    title: str
    subtitle: str
    headline: Headline
    rows: list[Row]
    waterfall: tuple[float, list[WaterfallStep], float | None] | None
    predictions: list[Prediction]
    references: list[Reference]
    judged: list[tuple[str, str]]
    command: str
    warnings: list[str] = field(default_factory=list)
    timing: list[tuple[str, str]] = field(default_factory=list)
    knowledge: list[str] = field(default_factory=list)
    ablations: list[tuple[str, str, str, str]] = field(default_factory=list)  # patch, without it, 95 %, outcome
    clients: run_clients.Clients | None = None


def tok_s(us: float | None) -> str:
    return "n/a" if not us else f"{1e6 / us:,.1f}"


def times(ratio: float | None) -> str:
    """Time ratio as a speed-up factor."""
    return "n/a" if not ratio else f"{1 / ratio:.2f}x"


def interval(found: Measured | None) -> str:
    if found is None or found.ci95 is None:
        return "n/a"
    low, high = found.ci95
    return f"{1 / high:.2f}x to {1 / low:.2f}x"


def build(run: Run) -> RunPage:
    """The whole view. Works on a run that was stopped at any point."""
    rows = [_row(a) for a in run.attempts]
    return RunPage(
        title=f"Run {run.id}",
        subtitle=_subtitle(run),
        headline=_headline(run),
        rows=rows,
        waterfall=_waterfall(run),
        predictions=_predictions(run),
        references=_references(run),
        judged=judged(run),
        command=command(run.info),
        warnings=_warnings(run),
        timing=_timing(run),
        knowledge=_knowledge(run),
        ablations=[_ablation(d) for d in run.ablations],
        clients=run_clients.load(run.directory),
    )


def _subtitle(run: Run) -> str:
    info = run.info
    parts = [
        str(_target(info)),
        _model(info),
        f"TP={info['tp']}" if info.get("tp") is not None else "",
        str(info.get("device") or ""),
        str(info.get("dtype") or ""),
        f"protocol {info['protocol']}" if info.get("protocol") else "",
        f"proposer {info['agent']}" if info.get("agent") else "",
        str(info.get("created_utc") or "")[:19].replace("T", " "),
    ]
    return " · ".join(p for p in parts if p)


def _model(info: dict[str, Any]) -> str:
    """A model's kind and dimensions: a target serves many."""
    dims = info.get("model")
    if not isinstance(dims, dict) or not dims.get("num_hidden_layers"):
        return ""
    random = ", random weights" if info.get("weights_seed") is not None else ""
    size = f"{dims['num_hidden_layers']} layers, hidden {dims.get('hidden_size', '?')}{random}"
    kind = str(dims.get("model_type", "model"))
    return size if kind == _target(info) else f"{kind} of {size}"


def _target(info: dict[str, Any]) -> str:
    target = info.get("target")
    return str(target.get("name", "")) if isinstance(target, dict) else str(target or "")


def _headline(run: Run) -> Headline:
    found, product = run.headline, run.product
    bound = _bound_us(run)
    if found is not None and found.a_us and found.b_us:
        basis = (
            f"{found.pairs} interleaved pairs of the first and the last engine after the loop. The speed-up is the geometric mean "
            "of the pairs' ratios, before and after are medians: on a noisy machine their quotient differs"
        )
        return Headline(
            f"{times(found.ratio)} ({interval(found)}, 95 %)", tok_s(found.a_us), tok_s(found.b_us), micro(found.a_us),
            micro(found.b_us), times(found.ratio), interval(found), basis, goal(run.info),
            *_bound_words(bound),
        )  # fmt: skip
    start = _start_us(run)
    if product is not None and product.ratio:
        last = run.accepted[-1].best_measured
        after = last[1].b_us if last else None
        basis = (
            f"product of {product.pairs} confirmed ratios; the run has no headline measurement of its own. Before: "
            "calibration pairs; after: the last confirmation. They were taken at different times, so their quotient may differ"
        )
        return Headline(
            f"{times(product.ratio)} (product of confirmations, no interval)", tok_s(start), tok_s(after),
            micro(start) if start else "n/a", micro(after) if after else "n/a", times(product.ratio), "n/a", basis,
            goal(run.info), *_bound_words(bound),
        )  # fmt: skip
    words = "no patch accepted" if run.attempts else "stopped before the first attempt"
    return Headline(
        words, tok_s(start), tok_s(start), micro(start) if start else "n/a", micro(start) if start else "n/a", "1.00x",
        "n/a", "calibration pairs" if start else "nothing was timed", goal(run.info),
        *_bound_words(bound),
    )  # fmt: skip


def _bound_words(bound: float | None) -> tuple[str, str]:
    return (micro(bound), tok_s(bound)) if bound else ("not known", "")


def _start_us(run: Run) -> float | None:
    """The first engine's time per token: calibration pairs before anything was accepted, else the incumbent's arm of
    the first attempt. (Later calibrations are of a faster engine.)"""
    kinds = [line.get("kind") for line in run.lines]
    first = run.lines[: kinds.index("accepted") if "accepted" in kinds else len(kinds)]
    pairs = [line["data"] for line in first if line.get("kind") == "pair" and isinstance(line.get("data"), dict)]
    values = [
        float(p[k])
        for p in pairs
        if p.get("stage") == "calibrate" and not p.get("discarded")
        for k in ("a_us_per_token", "b_us_per_token")
        if isinstance(p.get(k), int | float)
    ]
    if values:
        return statistics.median(values)
    return next((m[1].a_us for a in run.attempts if (m := a.best_measured)), None)


def _bound_us(run: Run) -> float | None:
    """Lower bound of the time per token: bytes that a step must move over the bandwidth that the run measured."""
    for data in (data for kind in ("finished", "calibrated", "captured") for data in reversed(run.kinds.get(kind, []))):
        value = data.get("bound_us_per_token")
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None


def _references(run: Run) -> list[Reference]:
    """Other engines timed in the same run, and the bound: captured lines with a control time."""
    found: dict[str, float] = {}
    for data in run.kinds.get("captured", ()):
        label, us = data.get("title") or data.get("label"), data.get("control_us_per_token")
        if data.get("reference") and label and isinstance(us, int | float) and us > 0:
            found[str(label)] = float(us)
    bound = _bound_us(run)
    if bound:
        found["bound"] = bound
    return [Reference(k, v) for k, v in found.items()]


def _row(attempt: Attempt) -> Row:
    best = attempt.best_measured
    saved = best[1].saved_us if best else None
    traced = attempt.verdict.get("traced_us")
    if traced is None:
        traced = attempt.stages.get("confirm", {}).get("traced_us")
    passed = sum(bool(g.get("passed")) for g in attempt.gates)
    failed = [str(g.get("gate")) for g in attempt.gates if not g.get("passed")]
    title = next((str(p["title"]) for p in attempt.patches if p.get("title")), "")
    edits = tuple(
        {"file": str(e.get("file")), "old": str(e.get("old") or ""), "new": str(e.get("new") or "")}
        for p in attempt.patches
        for e in p.get("edits") or ()
        if isinstance(e, dict)
    )
    return Row(
        number=attempt.number,
        mechanism=attempt.mechanism,
        title=title,
        outcome=attempt.outcome,
        reason=_reason(attempt),
        detail=attempt.detail,
        findings=attempt.finding_ids,
        predicted=micro(attempt.predicted_us) if attempt.predicted_us is not None else "n/a",
        measured=micro(saved) if saved is not None else "not timed",
        traced=micro(traced) if isinstance(traced, int | float) else "n/a",
        speedup=times(best[1].ratio) if best else "n/a",
        interval=interval(best[1]) if best else "n/a",
        pairs=_pairs(attempt),
        gates=f"{passed} passed" + (f", failed: {', '.join(failed)}" if failed else ""),
        proposer=str(attempt.proposed[0].get("proposer", "")) if attempt.proposed else "",
        commit=str(attempt.verdict.get("commit") or "")[:12],
        edits=edits,
    )


def _reason(attempt: Attempt) -> str:
    words = _REASONS.get(attempt.reason, attempt.reason)
    if attempt.outcome == "accepted":
        return ""
    if attempt.outcome == "unfinished":
        return "the run stopped in the middle of it"
    return f"{words} ({attempt.where})" if attempt.where and words else words


def _knowledge(run: Run) -> list[str]:
    found: list[str] = []
    for data in run.kinds.get("knowledge_proposed", ()):
        entries = data.get("entries")
        found += [str(e) for e in entries] if isinstance(entries, list) else [str(data.get("id") or "?")]
    return found


def _ablation(data: dict[str, Any]) -> tuple[str, str, str, str]:
    """The pairs time the engine without the patch (a) against the final one (b): ratio below 1 is what it buys."""
    ratio, ci = data.get("ratio"), data.get("ci95")
    number = isinstance(ratio, int | float) and bool(data.get("pairs"))
    low, high = ci if isinstance(ci, list) and len(ci) == 2 else (None, None)
    span = f"{1 / high:.2f}x to {1 / low:.2f}x" if number and low and high else "n/a"
    title, outcome, why = str(data.get("title") or "?"), "dropped" if data.get("incumbent") else "kept", str(data.get("why") or "")
    if isinstance(data.get("hunks"), int):  # parts of one patch, each trial with pairs of its own
        tried = ", ".join(map(str, data.get("tried") or ())) or "none"
        return f"Parts of “{title}”", "", "", f"{data.get('kept')} of {data['hunks']} hunks stay; without some of them: {tried}"
    return title, times(ratio) if number else "not timed", span, f"{outcome}: {why}" if why else outcome


def _pairs(attempt: Attempt) -> str:
    parts = []
    for stage in ("screen", "decide", "confirm"):
        found = attempt.measured(stage)
        if found.pairs or found.discarded:
            parts.append(f"{stage} {found.pairs}" + (f" (+{found.discarded} discarded)" if found.discarded else ""))
    return ", ".join(parts) or "none"


def _waterfall(run: Run) -> tuple[float, list[WaterfallStep], float | None] | None:
    """Levels are chained by the confirmed ratios, so that each bar stands where its own pairs put it."""
    headline = run.headline
    start = headline.a_us if headline else _start_us(run)
    if not start or not run.accepted:
        return None
    steps, level = [], start
    for attempt in run.accepted:
        best = attempt.best_measured
        if best is None or best[1].ratio is None:
            continue
        after = level * best[1].ratio
        label = f"{attempt.number} {attempt.mechanism}"
        steps.append(WaterfallStep(label, level, after, attempt.predicted_us))
        level = after
    return start, steps, headline.b_us if headline else None


def _predictions(run: Run) -> list[Prediction]:
    found = []
    for attempt in run.attempts:
        best = attempt.best_measured
        if attempt.predicted_us is not None and best and best[1].saved_us is not None and attempt.per == "token":
            found.append(Prediction(str(attempt.number), attempt.predicted_us, best[1].saved_us, attempt.outcome))
    return found


def _warnings(run: Run) -> list[str]:
    found = []
    finished = run.last("finished")
    if not finished:
        found.append("The run has not finished: this report shows what is in the ledger so far.")
    if run.chain_ok is False:
        found.append("The ledger's hash chain is broken: a line was changed after it was written.")
    if run.dropped:
        found.append(f"{run.dropped} unreadable ledger line(s) were left out.")
    if run.headline is None and run.accepted:
        found.append("No headline pairs: the total is a product of confirmations, not one measurement.")
    mde, goal = run.last("calibrated").get("mde"), run.info.get("goal")
    if (
        isinstance(mde, float)
        and isinstance(goal, dict)
        and goal.get("kind") == "factor"
        and goal.get("value", 9) - 1 < mde
    ):
        found.append("The goal lies below the minimum detectable effect of this machine.")
    return found


def _timing(run: Run) -> list[tuple[str, str]]:
    finished = run.last("finished")
    stop = finished.get("reason") or finished.get("why") or ("finished" if finished else "stopped")
    counts = Counter(a.outcome for a in run.attempts)
    order = ("accepted", "rejected", "undecided", "parked", "unfinished")
    usd = sum(float(p.get("usd") or 0) for a in run.attempts for p in a.proposed)
    rows = [
        ("Attempts", ", ".join(f"{counts[o]} {o}" for o in order if counts[o]) or "none"),
        ("Ended because", str(stop)),
    ]
    if usd:
        rows.append(("Spent on the proposer", f"{usd:.2f} USD"))
    return rows
