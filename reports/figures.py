"""Figures of the reports by matplotlib: waterfall, calibration, category bars, the one-token timeline.

Each function takes plain data and returns a Figure; `svg` and `png` turn it into bytes that are the same for
the same input (fixed ids, no dates). Not for: choosing or computing numbers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from reports import palette
from reports.text import micro, short, tick, wrap
from reports.timeline import Timeline
from reports.views import Prediction, Reference, WaterfallStep

_STYLE: Any = {  # its keys are a literal type that a plain dict is not
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666",
    "axes.labelcolor": "#222",
    "svg.hashsalt": "hotloop",
    "svg.fonttype": "path",
    "text.parse_math": False,  # names may hold dollar signs
    "axes.formatter.useoffset": False,
}


_BAR_INCHES = 0.95  # a bar with its label of twelve characters a line


def svg(figure: Figure) -> str:
    """SVG text without XML header, date or random ids; text is drawn as paths."""
    out = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def png(figure: Figure, dpi: int = 144) -> bytes:
    """PNG bytes without a software or date chunk."""
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def waterfall(
    start_us: float, steps: Sequence[WaterfallStep], final_us: float | None, references: Sequence[Reference] = ()
) -> Figure:
    """Time per token from the first engine over every accepted patch to the last one, smaller is better.

    Gains multiply, so beyond a factor of 2.5 the axis is logarithmic: equal heights are then equal factors.
    """
    with matplotlib.rc_context(_STYLE):
        bars = 1 + len(steps) + (final_us is not None)
        figure, axes = _new(max(7.4, 1.6 + _BAR_INCHES * bars), 3.8)
        last = final_us if final_us is not None else steps[-1].after_us if steps else start_us
        lows = [last, *[s.after_us for s in steps], *[r.us for r in references if r.us < start_us]]
        log = start_us / min(lows) > 2.5
        floor = min(lows) / 1.7 if log else 0.0
        labels = ["start", *[wrap(s.label, 12, lines=4) for s in steps]]
        _bar(axes, 0, start_us, floor, palette.GREY)
        level = start_us
        for at, step in enumerate(steps, 1):
            _waterfall_step(axes, at, step, floor)
            axes.plot([at - 0.7, at + 0.3], [step.before_us] * 2, color="#999", lw=0.8)
            level = step.after_us
        if final_us is not None:
            at = len(steps) + 1
            labels.append("end,\nmeasured")
            _bar(axes, at, final_us, floor, palette.BLUE)
            axes.plot([at - 0.7, at + 0.3], [level] * 2, color="#999", lw=0.8)
        top = max([start_us, *[r.us for r in references if r.us < 2 * start_us]]) * (1.35 if log else 1.15)
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(floor, top)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        _references(axes, references, floor, top, log)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_ylabel("time per token" + (", log scale" if log else ""))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: tick(v) if v else "0"))
        handles = [Patch(color=palette.GREEN, label="measured saving"),
                   Patch(facecolor="none", edgecolor=palette.BLACK, linestyle="--", label="predicted saving")]  # fmt: skip
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)  # off the lines
    return figure


def _bar(axes: Axes, at: int, value: float, floor: float, shade: str) -> None:
    axes.bar(at, value - floor, 0.6, bottom=floor, color=shade)
    axes.text(at, value, micro(value), ha="center", va="bottom")


def _waterfall_step(axes: Axes, at: int, step: WaterfallStep, floor: float) -> None:
    low, high = sorted((step.before_us, step.after_us))
    shade = palette.GREEN if step.after_us <= step.before_us else palette.VERMILION
    axes.bar(at, max(high - low, high * 0.004), 0.6, bottom=low, color=shade)
    if step.predicted_us is not None:
        bottom = max(step.before_us - step.predicted_us, floor)
        axes.add_patch(
            Rectangle((at - 0.36, bottom), 0.72, step.before_us - bottom, fill=False, ls="--", lw=1, ec=palette.BLACK)
        )
    axes.text(at, high, f"{step.before_us / step.after_us:.2f}x", ha="center", va="bottom")


def _references(axes: Axes, references: Sequence[Reference], floor: float, top: float, log: bool) -> None:
    """Lines inside the plot; labels right of it, moved apart where they would overlap."""

    def fraction(us: float) -> float:
        if log:
            return math.log(us / floor) / math.log(top / floor)
        return (us - floor) / (top - floor)

    last = -1.0
    for reference in sorted((r for r in references if floor < r.us <= top), key=lambda r: r.us):
        axes.axhline(reference.us, color=palette.PINK, lw=1, ls=(0, (4, 2)), zorder=0)
        last = max(fraction(reference.us), last + 0.06)
        axes.annotate(
            f"{short(reference.label, 22)} {micro(reference.us)}",
            (1.01, last), xycoords="axes fraction", va="center", fontsize=8, color="#7a3b61", annotation_clip=False,
        )  # fmt: skip


_MARKS = {"accepted": ("o", palette.GREEN), "rejected": ("X", palette.VERMILION), "undecided": ("s", palette.ORANGE),
          "parked": ("D", palette.BLUE)}  # fmt: skip


def calibration(points: Sequence[Prediction]) -> Figure:
    """Predicted against measured saving per attempt, log scales; losses and zeros sit on the lower edge."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(5.2, 4.2)
        values = [v for p in points for v in (p.predicted_us, p.measured_us) if v > 0] or [1.0, 100.0]
        low, high = min(values) / 2, max(values) * 2
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.plot([low, high], [low, high], color="#888", lw=1)
        axes.fill_between([low, high], [low / 2, high / 2], [low * 2, high * 2], color=palette.PALE, zorder=0, lw=0)
        axes.text(high / 1.15, high / 2.6, "within 2x", ha="right", va="top", fontsize=8, color="#777")
        for point in points:
            mark, shade = _MARKS.get(point.outcome, ("o", palette.GREY))
            x, y = max(point.predicted_us, low * 1.1), max(point.measured_us, low * 1.1)
            lost = point.measured_us <= 0
            axes.scatter([x], [y], s=46, marker="v" if lost else mark, color=shade, zorder=3, linewidths=0)
            axes.annotate(point.label, (x, y), xytext=(6, 3), textcoords="offset points", fontsize=8)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("predicted saving per token")
        axes.set_ylabel("measured saving per token")
        for axis in (axes.xaxis, axes.yaxis):
            if high / low < 300:
                axis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < 100 else (1, 3)))
            axis.set_major_formatter(FuncFormatter(lambda v, _: tick(v)))
            axis.set_minor_formatter(NullFormatter())
        used = dict.fromkeys(p.outcome for p in points)
        handles = [
            axes.scatter([], [], s=46, marker=_MARKS.get(o, ("o", ""))[0], color=_MARKS.get(o, ("", palette.GREY))[1],
                         label=o) for o in used
        ]  # fmt: skip
        if any(p.measured_us <= 0 for p in points):
            handles.append(axes.scatter([], [], s=46, marker="v", color=palette.GREY, label="slower or equal"))
        axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=8)
    return figure


def timeline(view: Timeline) -> Figure:
    """The decode step of each engine on one time axis; the static twin of the HTML timeline."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(11, 0.8 + 0.32 * view.lanes + 0.32 * len(view.engines))
        y = 0.0
        ticks, names = [], []
        for engine in view.engines:
            axes.text(0, y + 0.42, engine.title, fontsize=9, fontweight="bold", va="center")
            y += 0.8
            for lane in engine.lanes:
                for span in (*lane.idle, *lane.spans):
                    axes.add_patch(Rectangle((span.start_us, y + 0.08), span.dur_us, 0.8, color=span.colour, lw=0))
                for span in lane.replays:
                    axes.add_patch(Rectangle((span.start_us, y + 0.88), span.dur_us, 0.12, color=span.colour, lw=0))
                ticks.append(y + 0.5)
                names.append(lane.name)
                y += 1
            axes.plot([engine.wall_us] * 2, [y - len(engine.lanes), y], color=palette.BLACK, lw=1.2)
            y += 0.2
        axes.set_xlim(0, view.end_us * 1.01)
        axes.set_ylim(y, 0)
        axes.set_yticks(ticks, names)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("time from the start of the step")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tick(v) if v else "0"))
        handles = [Patch(color=c, label=w) for c, w in view.legend]
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure
