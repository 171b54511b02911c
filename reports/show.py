"""`trace-diff show`: what trace files hold, rank by rank, as plain data and as a table.

Not for: comparing (`trace_diff.compare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.text import micro, short
from trace_diff import summary
from trace_diff.ingest import gather

if TYPE_CHECKING:
    from trace_diff.critical_path import CriticalPath
    from trace_diff.ingest import TraceSet

def describe(sets: Sequence[TraceSet]) -> dict[str, Any]:
    """{"ranks": [...], "sets": [...], "notes": [...]}: every rank's device span, busy and idle time, damage and steps;
    per set of traces its label, missing and duplicate ranks, clocks and the late rank; all as `summary.show` has them.

    Files of one run that were named one by one are one set: `together`.
    """
    shown = [summary.show(found) for found in together(sets)]
    return {
        "ranks": [r for s in shown for r in s["ranks"]],
        "sets": [{k: v for k, v in s.items() if k not in ("ranks", "notes")} for s in shown],
        "notes": [n for s in shown for n in s["notes"]],
    }


def together(sets: Sequence[TraceSet]) -> list[TraceSet]:
    """All sets as one where they are files of one rank each, of one world, and every rank is another; else as given."""
    traces = [t for found in sets for t in found]
    ranks = {t.rank for t in traces}
    worlds = {t.world_size for t in traces}
    one = len(sets) > 1 and len(traces) == len(ranks) == len(sets) and all(t.rank_known for t in traces)
    return [gather(traces, sets[0].label)] if one and len(worlds) == 1 else list(sets)


def table(data: dict[str, Any]) -> RenderableType:
    """One table per rank."""
    late = [_late(s["late"]) for s in data["sets"] if s["late"]]
    ranks = [p for r in data["ranks"] for p in _rank_table(r)]
    return Group(*ranks, *[Text(x, style="bold") for x in late], *[Text(n, style="dim") for n in data["notes"]])


def _late(late: dict[str, Any]) -> str:
    sites = f" ({', '.join(short(s, 60) for s in late['sites'])})" if late["sites"] else ""
    return (
        f"rank {late['rank']} is late: its peers wait {micro(late['wait_ns_per_step'] / 1000)} a step for it, "
        f"{late['share']:.0%} of all waiting; {late['cause']}{sites}"
    )


def critical_path(found: CriticalPath) -> RenderableType:
    """What binds the path, and its dearest names."""
    head = f"step {found.index} {short(found.step, 60)}: the critical path is {micro(found.length_us)} of {micro(found.window_us)}"
    bound = Table(box=None, pad_edge=False)
    for name in ("bound by", "time", "share"):
        bound.add_column(name, justify="left" if name == "bound by" else "right")
    for name, us in found.bound_by.items():
        bound.add_row(name, micro(us), f"{us / found.length_us:.0%}" if found.length_us else "")
    names = Table(box=None, pad_edge=False)
    for name in ("name", "bound by", "count", "time"):
        names.add_column(name, justify="right" if name in ("count", "time") else "left", overflow="fold")
    for row in found.rows[:20]:
        names.add_row(Text(short(row["name"], 80)), row["bound_by"], str(row["count"]), micro(row["us"]))
    said = Text("As Holistic Trace Analysis sees it, in whole microseconds.", style="dim")
    return Group(Text(head, style="bold"), bound, Text(""), names, said)


def _rank_table(r: dict[str, Any]) -> list[RenderableType]:
    damage = [f"{r[k]} {k}" for k in ("repaired", "quarantined", "lost") if r[k]] + ["cut off"] * r["truncated"]
    head = f"rank {r['rank']} of {r['world_size'] or '?'}: {short(r['file'], 90)}, {r['events']:,} events"
    out: list[RenderableType] = [Text(head, style="bold")]
    if r["gpu_span_ns"] is not None:
        share = r["gpu_busy_ns"] / r["gpu_span_ns"] if r["gpu_span_ns"] else 0.0
        out.append(Text(f"GPU: {micro(r['gpu_span_ns'] / 1000)} span, {micro(r['gpu_busy_ns'] / 1000)} busy ({share:.1%})"))
    else:
        out.append(Text("no device work in this trace"))
    if damage:
        out.append(Text(f"damage: {', '.join(damage)}", style="yellow"))
    out += [Text(n, style="dim") for n in r["notes"]]
    steps = Table(box=None, pad_edge=False)
    for name in ("step", "name", "phase", "wall", "largest parts", "flags"):
        steps.add_column(name, justify="right" if name == "wall" else "left", overflow="fold")
    for s in r["steps"]:
        parts = sorted(s["parts"].items(), key=lambda kv: -kv[1])[:3]
        text = ", ".join(f"{k} {v / s['wall_ns']:.0%}" for k, v in parts if s["wall_ns"] and v)
        flags = ", ".join(s["flags"]) or ("" if s["complete"] else "incomplete")
        steps.add_row(str(s["index"]), Text(short(s["name"], 60)), s["phase"], micro(s["wall_ns"] / 1000), text, flags)
    return [*out, steps, Text("")]
