"""Draw the curves of a run's metrics.jsonl (loss, learning rate, tokens/s and
others) as SVG pictures."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from flashtrain.report.figures import INK, LOG_FROM, colour, lowest, style, tick_label, ticks_at
from flashtrain.report.formats import figure_text
from flashtrain.training.metrics_file import STEP, read_metrics

_FEW = 30  # up to this number of points each has a marker
_SMOOTHED = 200  # from this number of points on a line of means is drawn over them
Course = tuple[list[float], list[float]]  # steps and values


class Panel(NamedTuple):
    """A plot of the metrics whose names match a regular expression."""

    title: str  # with the unit
    names: str  # a regular expression of the metrics' names
    zero: bool = True  # whether the axis always starts at zero


PANELS = (
    Panel("loss (nats)", r"(\w+_)?loss", zero=False),
    Panel("accuracy", r"\w*accuracy|\w*f1"),
    Panel("learning rate", r"lr-.+"),
    Panel("gradient norm", r"gradient_norm"),
    Panel("tokens/s", r"tokens_per_second"),
    Panel("MFU", r"mfu"),
    Panel("peak memory (GiB)", r"peak_memory_gib"),
)


def curves(path: Path) -> list[tuple[str, str]]:
    """Draw the panels of a metrics.jsonl, and return (title, SVG text) of each panel that
    has values in the file."""
    rows = read_metrics(path)
    names = dict.fromkeys(name for row in rows for name in row if name != STEP)
    found = {name: course for name in names if len((course := _course(rows, name))[0])}
    panels = [(panel, _of_panel(panel, found)) for panel in PANELS]
    return [(panel.title, _drawn(panel, lines)) for panel, lines in panels if lines]


def _course(rows: Sequence[Mapping[str, float]], name: str) -> Course:
    """Return (steps, values): the optimizer steps, counted from 1, at which the metric has a finite
    value, and these values."""
    points = [
        (row[STEP] + 1, row[name]) for row in rows if name in row and math.isfinite(row[name])
    ]
    return [step for step, _ in points], [value for _, value in points]


def _of_panel(panel: Panel, found: Mapping[str, Course]) -> dict[str, Course]:
    """Return the metrics of `found` that the panel draws, by name; of equal ones only the first,
    since parameter groups mostly have the same learning rate."""
    lines: dict[str, Course] = {}
    for name, course in found.items():
        if re.fullmatch(panel.names, name) and course not in lines.values():
            lines[name] = course
    return lines


def _drawn(panel: Panel, lines: Mapping[str, Course]) -> str:
    # Text stays text, and points within half a pixel are merged: small files
    # that are quickly drawn.
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "flashtrain", "path.simplify_threshold": 0.5}
    ):
        figure = Figure(figsize=(4.6, 2.7))
        axes = figure.add_axes((0.13, 0.17, 0.84, 0.7))
        style(axes, panel.title)
        for index, (name, (steps, values)) in enumerate(lines.items()):
            _draw(axes, name, steps, values, colour(index))
        _scale(axes, panel, lines)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=7.5, labelcolor=INK, loc="best")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _draw(
    axes: Axes, name: str, steps: Sequence[float], values: Sequence[float], colour: str
) -> None:
    label = figure_text(name if name.startswith("lr-") else name.replace("_", " "))
    long = len(values) >= _SMOOTHED
    axes.plot(
        steps,
        values,
        color=colour,
        linewidth=0.8 if long else 1.5,
        alpha=0.35 if long else 1,
        label=label,
        marker="o" if len(values) <= _FEW else "",
        markersize=3.5,
    )
    if long:  # means make a noisy curve readable
        width = len(values) // 50
        stretches = [slice(at, at + width) for at in range(0, len(values), width)]
        means = (
            [statistics.fmean(one[stretch]) for stretch in stretches] for one in (steps, values)
        )
        axes.plot(*means, color=colour, linewidth=1.6)


def _scale(axes: Axes, panel: Panel, lines: Mapping[str, Course]) -> None:
    values = [value for _, course in lines.values() for value in course]
    steps = sorted({step for course, _ in lines.values() for step in course})
    low, high = min(values), max(values)
    if panel.names == "gradient_norm" and low > 0 and high >= LOG_FROM * low:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    elif low >= 0:
        start = 0.0 if panel.zero else lowest(low, high)
        axes.set_ylim(start, high + 0.08 * ((high - start) or 1))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_label))
    room = 0.03 * (steps[-1] - steps[0]) or 0.5
    axes.set_xlim(steps[0] - room, steps[-1] + room)
    if not ticks_at(axes, steps, [f"{step:,.0f}" for step in steps]):
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("step", fontsize=8)
