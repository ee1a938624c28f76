"""One figure of many shapes: a line for each, a dot for each implementation, forward and backward side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashtrain.errors import UserError
from flashtrain.report.figures import DPI, GRID, INK, WIDTH_INCHES, colour, marker, save
from flashtrain.report.formats import figure_text
from flashtrain.report.rows import values_of

Rows = Sequence[Mapping[str, Any]]
_INCHES_A_SHAPE = 0.21
_SHAPE = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "mask", "features", "dropout", "dtype")


def dot_figure(rows: Rows, path: str | Path) -> Path:
    """Draw TFLOP/s of every shape as a PNG at `path`, the first implementation of the rows on top of the others.

    Raises UserError for rows of which none has TFLOP/s in a direction.
    """
    measured = [row for row in rows if row.get("tflops") is not None and row.get("direction")]
    if not measured:
        raise UserError("no row has TFLOP/s of a direction: there is nothing to draw.")
    shapes = list(dict.fromkeys(_shape(row) for row in measured))
    names = [str(name) for name in values_of(measured, "implementation")]
    directions = [name for name in ("forward", "backward") if any(row["direction"] == name for row in measured)]
    height = 1.3 + _INCHES_A_SHAPE * len(shapes)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for place, direction in enumerate(directions):
        panel = figure.add_subplot(1, len(directions), place + 1)
        panel.set_title(f"{direction}, TFLOP/s", fontsize=9.5, color=INK)
        for number in range(len(shapes)):
            panel.axhline(number, color=GRID, linewidth=0.8, zorder=0)
        for number, name in reversed(list(enumerate(names))):
            own = [row for row in measured if row["implementation"] == name and row["direction"] == direction]
            at = [shapes.index(_shape(row)) for row in own]
            size = 52 if number == 0 else 26
            panel.scatter(
                [row["tflops"] for row in own], at, s=size, marker=marker(number), color=colour(number), zorder=2
            )
        panel.set_ylim(len(shapes) - 0.4, -0.6)
        panel.set_xlim(left=0)
        panel.set_yticks(range(len(shapes)), [figure_text(_label(shape)) for shape in shapes] if place == 0 else [])
        panel.tick_params(labelsize=7.5, colors=INK, length=0)
        for side in panel.spines.values():
            side.set_visible(False)
    handles = [
        Line2D([], [], color=colour(i), marker=marker(i), markersize=7 if i == 0 else 5, linestyle="", label=label)
        for i, label in enumerate(map(figure_text, names))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8, labelcolor=INK)
    return save(figure, Path(path))


def _shape(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in _SHAPE)


def _label(shape: tuple[Any, ...]) -> str:
    batch, heads, kv_heads, queries, keys, head_dim, mask, features, dropout, _dtype = shape
    length = f"{queries:,}" if keys in (None, queries) else f"{queries:,} x {keys:,}"
    grouped = f"{heads}/{kv_heads}" if kv_heads not in (None, heads) else f"{heads}"
    extra = "".join(f", {word}" for word in (features, f"dropout {dropout:g}" if dropout else None) if word)
    return f"{batch} x {length}, {grouped} heads of {head_dim}, {mask}{extra}"
