"""The figures that several recipes draw from their rows: the course of a
training, and bars in groups."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter

from flashtrain.report.figures import INK, colour, line_figure, new_figure, save, style, tick_label
from flashtrain.report.formats import figure_text
from flashtrain.report.rows import values_of
from flashtrain_recipes.harness.rows import Rows

_INCHES_PER_BAR, _INCHES_PER_GROUP = 0.28, 0.36
_NAME_WIDTH = 46  # letters of a line of a bar's name


def training_figure(rows: Rows, path: str | Path) -> Path:
    """Draw training loss and held-out accuracy against step as a PNG. Raises UserError
    for rows of another kind."""
    title = f"A training of {', '.join(values_of(rows, 'model')) or 'a model'}"
    return line_figure(rows, "step", ("train_loss", "validation_accuracy"), None, path, title=title)


class Bar(NamedTuple):
    """A bar of a figure: its name is left of it, its text at its end."""

    name: str
    value: float
    text: str
    filled: bool = True  # measured here; others are outlines
    interval: Sequence[float] = ()  # the ends of a line over the bar's end


def bar_figure(
    groups: Mapping[str, Sequence[Bar]],
    path: str | Path,
    *,
    title: str,
    unit: str,
    rows: Rows,
    limit: float,
    marks: Mapping[str, float] | None = None,
) -> Path:
    """Draw groups of horizontal bars as a PNG, each bar with its value at its end.

    Args:
        groups: the bars of each panel, by the panel's title.
        title: the text above the figure.
        rows: the rows whose column "measured" is shown below the title.
        unit, limit: the label of the x axis, which begins at 0, and its end.
        marks: the value at which a panel gets a dotted line, by the panel's title.
    """
    sizes = [len(bars) for bars in groups.values()]
    figure = new_figure(
        0.9 + _INCHES_PER_GROUP * len(sizes) + _INCHES_PER_BAR * sum(sizes), title, rows
    )
    panels = figure.subplots(len(sizes), 1, squeeze=False, sharex=True, height_ratios=sizes)[:, 0]
    for panel, (name, bars) in zip(panels, groups.items(), strict=True):
        style(panel, figure_text(name))
        panel.grid(axis="y", visible=False)
        for place, bar in enumerate(bars):
            look = (
                {"color": colour(0)}
                if bar.filled
                else {"facecolor": "none", "edgecolor": colour(0)}
            )
            panel.barh(place, bar.value, height=0.66, **look)
            if bar.interval:
                panel.plot(bar.interval, [place, place], color=colour(1), linewidth=2.5)
            end = max((bar.value, *bar.interval))
            place_of = {"textcoords": "offset points", "va": "center"}
            panel.annotate(
                figure_text(bar.text), (end, place), (5, 0), fontsize=9, color=INK, **place_of
            )
        if marks and name in marks:
            panel.axvline(marks[name], color=INK, linestyle=":", linewidth=1.2)
        names = [textwrap.fill(figure_text(bar.name), _NAME_WIDTH) for bar in bars]
        panel.set_yticks(range(len(bars)), names, fontsize=9, linespacing=1.0)
        panel.invert_yaxis()
    panels[-1].set_xlim(0, limit)
    panels[-1].xaxis.set_major_formatter(FuncFormatter(tick_label))
    panels[-1].set_xlabel(unit)
    return save(figure, Path(path))
