"""Draw rows of results as PNG figures, 1200 pixels wide, on a white background:
the style of all figures."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from flashtrain.errors import UserError
from flashtrain.report.formats import COLUMNS, cell, figure_text, heading
from flashtrain.report.rows import Rows, has_failed, status_text, values_of
from flashtrain.report.table import available_columns, check_columns

WIDTH_INCHES, DPI = 8.0, 150  # 1200 pixels
INK, GRID = "#333333", "#e3e3e3"
# Distinguishable with every kind of colour vision. In grey the first four differ by lightness,
# the others by markers.
_COLOURS = ("#123f7e", "#b8420a", "#35a897", "#cf9d10", "#7b3294", "#5a5a5a", "#6fa8dc", "#b5364b")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Largest / smallest value from which an axis is logarithmic: a linear one would hide small values.
LOG_FROM = 40
TICKS = 7  # labels of an axis
_POINTS: dict[str, Any] = {
    "linewidth": 2,
    "markersize": 5.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
}
_LEGEND = 96  # letters of a line of the legend, with a marker before each name
_LABELLED = 4  # up to this number of lines each has its name at its end, instead of a legend
_LABEL_WIDTH = 17  # letters of a line of such a name
_COURSE = 10  # from this number of evenly spaced x on they are a course, such as every tenth step


def sweep_figure(
    rows: Rows, path: str | Path, x: str = "context", group: Sequence[str] | None = None
) -> Path:
    """Draw tokens/s, peak memory (GiB) and loss against `x`, in three panels side by side.

    A line's name says where its jobs failed, with their status.

    Args:
        rows: the summary rows of the jobs.
        path: the PNG file to write.
        x: the key on the x axis.
        group: keys; every combination of their values is a line. None: those of recipe,
            implementation, model and attention that differ.

    Raises:
        UserError: no row has a value for `x`.
    """
    if group is None:
        group = [
            key
            for key in ("recipe", "implementation", "model", "attention")
            if len(values_of(rows, key)) > 1
        ]
    loss = "train_loss"
    if values_of(rows, "validation_loss") or not values_of(rows, "train_loss"):
        loss = "validation_loss"
    return line_figure(rows, x, ["tokens_per_second", "peak_memory_gib", loss], group, path)


def line_figure(
    rows: Rows,
    x: str,
    y: str | Sequence[str],
    group: str | Sequence[str] | None,
    path: str | Path,
    *,
    title: str = "",
    log_y: bool | None = None,
    height: float | None = None,
) -> Path:
    """Draw `y` against `x` as a PNG, with a panel for each y.

    Rows with the same x on one line (such as seeds) are drawn at their median. If a row has the
    keys y_low and y_high (y being the key's name), a bar is drawn between their values. The title
    ends with the rows' "measured": the device and the day. In one or two panels a few lines have
    their names at their ends, otherwise in a legend.

    Args:
        x: the key on the x axis. Its values are numbers, or words, which are spaced evenly.
            Contexts, and other numbers that span a factor of 4, get a log2 axis.
        y: one or several keys, each of which gets a panel.
        group: keys; every combination of their values is a line.
        log_y: whether y axes are logarithmic; None: those whose values span a factor of LOG_FROM.
        height: of the figure, in inches at 150 dots an inch.

    Raises:
        UserError: a key is unknown, or no row has a value for `x`.
    """
    measures = [y] if isinstance(y, str) else list(y)
    groups = [group] if isinstance(group, str) else list(group or [])
    present = available_columns(rows)
    # a known measure that no row has becomes a panel "not measured"
    check_columns(
        [x, *groups, *[measure for measure in measures if measure not in COLUMNS]], present
    )
    placed = [row for row in rows if _can_be_placed(row.get(x))]
    if not placed:
        raise UserError(
            f"no row has a value for '{x}', the key of the x axis: nothing can be drawn."
        )

    lines = _lines(placed, groups)
    axis = _XAxis(placed, x)
    names = [_name(name, rows, axis) for name, rows in lines.items()]
    figure = new_figure(height or (3.2 if len(measures) > 2 else 4.0), title, rows)
    at_ends = any(names) and len(lines) <= _LABELLED and len(measures) <= 2
    for position, measure in enumerate(measures):
        panel = figure.add_subplot(1, len(measures), position + 1)
        style(panel, figure_text(heading(measure)))
        ends = _draw_lines(panel, lines.values(), axis, measure, log_y)
        axis.apply(panel)
        if at_ends:
            _name_lines(panel, ends, names)
    if any(names) and not at_ends:
        handles = [
            Line2D([], [], color=colour(i), marker=marker(i), label=name)
            for i, name in enumerate(names)
        ]
        # So that long names fit.
        columns = max(1, min(len(names), 4, _LEGEND // (max(map(len, names)) + 8)))
        legend(figure, handles, columns)
    return save(figure, Path(path))


def new_figure(height: float, title: str, rows: Rows) -> Figure:
    """Make an empty figure of `height` inches with a title and, below it, the rows' "measured"
    (device and day), if they have that key."""
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    lines = [*title.splitlines(), *textwrap.wrap("; ".join(values_of(rows, "measured")), 96)]
    if any(lines):
        text = "\n".join(figure_text(line) for line in lines if line)
        figure.suptitle(text, x=0.01, ha="left", fontsize=10.5, color=INK, linespacing=1.4)
    return figure


def legend(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """Put a legend below a figure's panels."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
    )


def _can_be_placed(value: Any) -> bool:
    """Return whether a value of the x key can be drawn: a text or a finite number."""
    return value is not None and (not isinstance(value, (int, float)) or math.isfinite(value))


class _XAxis:
    """The x axis: numbers on a linear or log2 scale, words spaced evenly."""

    def __init__(self, rows: Rows, key: str) -> None:
        self.key = key
        self.values = values_of(rows, key)
        self.numeric = all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values
        )
        if self.numeric:
            self.values = sorted(self.values)
        # Numbers that are far apart get a log axis, unless they are a course: many, evenly
        # spaced (every tenth step).
        wide = (
            self.numeric
            and self.values[0] > 0
            and self.values[-1] >= 4 * self.values[0]
            and not self._is_course()
        )
        self.log = self.numeric and self.values[0] > 0 and (wide or key == "context")

    def _is_course(self) -> bool:
        distances = {
            later - earlier for earlier, later in zip(self.values, self.values[1:], strict=False)
        }
        return len(self.values) >= _COURSE and len(distances) == 1

    def place(self, row: Mapping[str, Any]) -> float:
        value = row[self.key]
        if not self.numeric:
            return float(self.values.index(value))
        return math.log2(value) if self.log else float(value)

    def apply(self, panel: Axes) -> None:
        places = [self.place({self.key: value}) for value in self.values]
        margin = 0.08 * (places[-1] - places[0]) or 0.5
        panel.set_xlim(places[0] - margin, places[-1] + margin)
        named = figure_text(heading(self.key))
        panel.set_xlabel(f"{named} (tokens)" if self.key == "context" else named)
        labels = [self.label({self.key: value}) for value in self.values]
        few = self.numeric and ticks_at(panel, places, labels)
        if few or (self.numeric and not self.log):
            return  # a course of many points keeps the axis of round numbers
        # more than TICKS labels: every second or third, counted from the right so
        # that the end is labelled
        step = math.ceil(len(places) / TICKS)
        ticks = list(zip(places, labels, strict=True))[::-1][::step][::-1]
        panel.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
        panel.xaxis.set_minor_locator(NullLocator())

    def label(self, row: Mapping[str, Any]) -> str:
        value = row[self.key]
        return tokens_label(value) if self.numeric else figure_text(cell(self.key, value))


def tokens_label(value: float) -> str:
    """Format a number of tokens in units of 1024 if that is short (1K, 1.5K, 128K, 1M),
    else as a plain number."""
    for size, letter in ((1024**2, "M"), (1024, "K")):
        if value >= size and (value / size * 4).is_integer():
            return f"{value / size:g}{letter}"
    return cell("", value)


def _lines(rows: Rows, groups: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        # a number alone means nothing in a legend: it gets its key's heading
        parts = [cell(key, row.get(key)) for key in groups]
        named = [
            p if isinstance(row.get(k), str) else f"{heading(k)} {p}"
            for k, p in zip(groups, parts, strict=True)
        ]
        lines.setdefault(", ".join(named), []).append(row)
    return lines


def _name(name: str, rows: Rows, axis: _XAxis) -> str:
    """Return the text that names a line in a figure; if jobs failed, with their status and x."""
    failed = sorted(filter(has_failed, rows), key=axis.place)
    if not failed:
        return figure_text(name)
    at = "at " + ", ".join(dict.fromkeys(map(axis.label, failed)))
    if len(failed) > 1 and all(
        has_failed(row) for row in rows if axis.place(row) >= axis.place(failed[0])
    ):
        at = f"from {axis.label(failed[0])}"
    return figure_text(f"{name} ({status_text(failed[0])} {at})").strip()


def _draw_lines(
    panel: Axes, lines: Iterable[Rows], axis: _XAxis, measure: str, log_y: bool | None
) -> dict[int, tuple[float, float]]:
    """Draw the lines, and return the last point (x, y) of each, by the line's number from 0."""
    seen: list[float] = []
    ends: dict[int, tuple[float, float]] = {}
    for index, rows in enumerate(lines):
        points: dict[float, list[float]] = {}
        for row in rows:
            value = row.get(measure)
            if isinstance(value, (int, float)) and math.isfinite(value) and not has_failed(row):
                points.setdefault(axis.place(row), []).append(value)
        places = sorted(points)
        medians = [statistics.median(points[place]) for place in places]
        seen += medians
        if places:
            ends[index] = (places[-1], medians[-1])
        joined = "-" if axis.numeric else ""
        panel.plot(
            places, medians, joined, color=colour(index), marker=marker(index), zorder=3, **_POINTS
        )
        seen += _draw_intervals(panel, rows, axis, measure, colour(index))
    if not seen:
        panel.text(
            0.5,
            0.5,
            "not measured",
            transform=panel.transAxes,
            ha="center",
            va="center",
            color="#888888",
        )
        panel.set_yticks([])
        panel.grid(False)
        return ends
    if log_y is None:
        log_y = min(seen) > 0 and max(seen) >= LOG_FROM * min(seen)
    if log_y:
        panel.set_yscale("log")
        panel.set_ylim(min(seen) / 1.6, max(seen) * (max(seen) / min(seen)) ** 0.08)
        panel.yaxis.set_minor_locator(NullLocator())
    elif _is_loss(measure):
        low, high = lowest(min(seen), max(seen)), max(seen)
        panel.set_ylim(low, high + 0.12 * max(high - low, 1e-6))
    elif min(seen) >= 0:
        panel.yaxis.set_major_locator(MaxNLocator(6))
        panel.set_ylim(0, max(seen) * 1.08 or 1)
    if not _is_loss(measure):
        panel.yaxis.set_major_formatter(FuncFormatter(tick_label))
    return ends


def _name_lines(panel: Axes, ends: Mapping[int, tuple[float, float]], names: Sequence[str]) -> None:
    """Write each line's name beside its last point: right of the panel, without overlaps, if the
    line reaches the right edge, else within the panel."""
    # Of the panel in points, about: titles and names take their room later.
    height = panel.bbox.height * 72 / DPI
    to_panel = panel.transData + panel.transAxes.inverted()  # 0 to 1 in both directions
    at = {i: height * to_panel.transform(ends[i])[1] for i in ends}
    texts = {i: textwrap.fill(names[i], _LABEL_WIDTH) for i in ends}
    half = {i: 6.2 * (text.count("\n") + 1) for i, text in texts.items()}
    last = max((place for place, _ in ends.values()), default=0.0)
    # a line that ends early has its name below its end, or above where there is no room
    up = {
        i: 0.0 if ends[i][0] == last else (half[i] + 7) * (1 if at[i] < height / 3 else -1)
        for i in ends
    }
    order = sorted((i for i in ends if ends[i][0] == last), key=lambda i: at[i])
    for low, high in [*pairwise(order)] * 40:  # names that overlap move apart
        overlap = half[low] + half[high] + 2 - (at[high] + up[high] - at[low] - up[low])
        up[low], up[high] = up[low] - max(overlap, 0) / 2, up[high] + max(overlap, 0) / 2
    for i, text in texts.items():
        look: dict[str, Any] = {
            "textcoords": "offset points",
            "va": "center",
            "color": colour(i),
            "fontsize": 9.5,
        }
        # Right of an early end another line may go on.
        if ends[i][0] != last and to_panel.transform(ends[i])[0] > 0.5:
            look["ha"] = "right"
        where = (-14 if "ha" in look else 7, up[i])
        panel.annotate(text, ends[i], where, annotation_clip=False, **look)


def _draw_intervals(
    panel: Axes, rows: Rows, axis: _XAxis, measure: str, colour: str
) -> list[float]:
    """Draw a vertical bar from MEASURE_low to MEASURE_high for each row that has both keys, and
    return the y values of all bars' ends."""
    ends = []
    for row in rows:
        low, high = row.get(f"{measure}_low"), row.get(f"{measure}_high")
        ends_there = all(
            isinstance(end, (int, float)) and math.isfinite(end) for end in (low, high)
        )
        if low is not None and high is not None and ends_there and row.get(measure) is not None:
            panel.vlines(axis.place(row), low, high, color=colour, linewidth=1.2, zorder=2)
            ends += [low, high]
    return ends


def lowest(low: float, high: float) -> float:
    """Return where an axis of losses starts: at 0 if `low` is at most half of `high`,
    else a little below `low`."""
    # From zero, losses close to each other would be a flat line. The axis spans at
    # least 2% of the largest.
    if 0 <= low <= high / 2:
        return 0.0
    return low - 0.12 * max(high - low, 0.02 * abs(high), 1e-6)


def ticks_at(panel: Axes, places: Sequence[float], labels: Sequence[str]) -> bool:
    """Label the points at `places` on the x axis if there are at most TICKS of them, and return
    whether that was done.

    A label for which there is no room is left out; the last point always has a label.
    """
    if len(places) > TICKS:
        return False
    apart, labelled = (places[-1] - places[0]) / (TICKS + 3), list[int]()
    for at in reversed(range(len(places))):
        if not labelled or places[labelled[-1]] - places[at] >= apart:
            labelled.append(at)
    panel.set_xticks(
        [places[at] for at in sorted(labelled)], [labels[at] for at in sorted(labelled)]
    )
    panel.xaxis.set_minor_locator(NullLocator())
    return True


def tick_label(value: float, _: int = 0) -> str:
    """Format a number at an axis: 0.5, 250, 3.5k, 1M. matplotlib also passes the tick's
    position, which is not used."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def style(panel: Axes, title: str) -> None:
    """Give a panel its title, grid and colours."""
    panel.set_title(title, fontsize=10.5, color=INK, loc="left", pad=6)
    panel.grid(True, color=GRID, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9.5, colors=INK, length=0)
    panel.xaxis.label.set(size=9.5, color=INK)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#999999")


def _is_loss(measure: str) -> bool:
    return "loss" in measure or measure == "perplexity"


def colour(index: int) -> str:
    """Return the colour of a figure's line, by the line's number from 0."""
    return _COLOURS[index % len(_COLOURS)]


def marker(index: int) -> str:
    """Return the marker of a figure's line, by the line's number from 0."""
    # after eight lines colours repeat, with the next marker, so that no two lines look the same
    return _MARKERS[(index + index // len(_COLOURS)) % len(_MARKERS)]


def save(figure: Figure, path: Path) -> Path:
    """Save a figure as a PNG, make its folder if it is missing, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")
    return path
