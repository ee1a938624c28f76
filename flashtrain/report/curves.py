"""The curves of a run's metrics.csv as SVG pictures: loss, learning rate, gradient norm, tokens/s, memory, scores.

The file may come from anybody: what is no finite number is left out, names are bounded, and long courses are thinned
such that every peak stays.
"""

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

from flashtrain.errors import UserError
from flashtrain.files.foreign_files import MIB
from flashtrain.report.figures import INK, LOG_FROM, colour, lowest, style, tick_label, ticks_at
from flashtrain.report.formats import figure_text
from flashtrain.training.loggers import STEP, read_metrics

MOST_BYTES = 16 * MIB  # of a metrics.csv that is drawn: 150,000 rows, and a second or two
MOST_LINES = 6  # of a panel
_POINTS = 600  # of a line; a longer one is thinned
_FEW = 30  # points that are marked each
_SMOOTHED = 200  # from so many points on a line of means is drawn over them
Course = tuple[list[float], list[float]]  # steps and values


class Panel(NamedTuple):
    """title, with its unit; names: of its columns; zero: whether the axis starts there whatever is drawn."""

    title: str
    names: str
    zero: bool = True


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
    """(title, SVG text) of each panel for which the file has values. UserError: it is no metrics.csv, or a long one."""
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes: no curves are drawn of more than {MOST_BYTES:,}.")
    columns, rows = read_metrics(path)
    found = {name: course for name in columns if name != STEP and len((course := _course(rows, name))[0])}
    panels = [(panel, _of_panel(panel, found)) for panel in PANELS]
    return [(panel.title, _drawn(panel, lines)) for panel, lines in panels if lines]


def _course(rows: Sequence[Mapping[str, str]], name: str) -> Course:
    """The optimiser steps, counted from 1, at which the column has a number, and the numbers."""
    points = [(_number(row.get(STEP, "")), _number(row.get(name, ""))) for row in rows]
    kept = sorted((step + 1, value) for step, value in points if step is not None and value is not None)
    return [step for step, _ in kept], [value for _, value in kept]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < 1e30 else None  # beyond that an axis has no room


def _of_panel(panel: Panel, found: Mapping[str, Course]) -> dict[str, Course]:
    """The panel's lines by name, each course once: groups of parameters mostly have the same learning rate."""
    lines: dict[str, Course] = {}
    for name, course in found.items():
        if re.fullmatch(panel.names, name) and course not in lines.values() and len(lines) < MOST_LINES:
            lines[name] = course
    return lines


def _drawn(panel: Panel, lines: Mapping[str, Course]) -> str:
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashtrain"}):  # text as text: small, and quickly drawn
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


def _draw(axes: Axes, name: str, steps: Sequence[float], values: Sequence[float], colour: str) -> None:
    label = figure_text(name if name.startswith("lr-") else name.replace("_", " "))[:60]
    long = len(values) >= _SMOOTHED
    axes.plot(
        *_thinned(steps, values),
        color=colour,
        linewidth=0.8 if long else 1.5,
        alpha=0.35 if long else 1,
        label=label,
        marker="o" if len(values) <= _FEW else "",
        markersize=3.5,
    )
    if long:  # a noisy course is read off its means
        width = len(values) // 50
        stretches = [slice(at, at + width) for at in range(0, len(values), width)]
        means = ([statistics.fmean(one[stretch]) for stretch in stretches] for one in (steps, values))
        axes.plot(*means, color=colour, linewidth=1.6)


def _thinned(steps: Sequence[float], values: Sequence[float]) -> Course:
    """At most some _POINTS points: of each stretch the lowest and the highest, in their order."""
    if len(values) <= _POINTS:
        return list(steps), list(values)
    width = math.ceil(2 * len(values) / _POINTS)
    kept: list[int] = []
    for start in range(0, len(values), width):
        places = range(start, min(start + width, len(values)))
        kept += sorted({min(places, key=values.__getitem__), max(places, key=values.__getitem__)})
    return [steps[at] for at in kept], [values[at] for at in kept]


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
