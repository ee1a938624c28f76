"""A grid of grey images, each with a line below it, as one PNG 1200 pixels wide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flashtrain.errors import UserError

_WIDTH_INCHES, _DPI = 8.0, 150
_INK = "#333333"
_MOST_COLUMNS = 6


def image_grid(
    images: np.ndarray,
    captions: Sequence[str],
    path: str | Path,
    *,
    title: str = "",
    colours: Sequence[str] | None = None,
) -> Path:
    """Draw images (B, side, side) uint8 in rows of at most six, `captions` below them, in `colours` where given.

    Raises UserError where the file cannot be written.
    """
    columns = min(len(images), _MOST_COLUMNS)
    rows = math.ceil(len(images) / columns)
    cell = _WIDTH_INCHES / max(columns, 3)
    figure = Figure(figsize=(_WIDTH_INCHES, rows * (cell + 0.12) + (0.4 if title else 0.1)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels:
        panel.axis("off")
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        panels[number].imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        colour = _INK if colours is None else colours[number]
        panels[number].set_title(caption, y=-0.02, va="top", fontsize=8, color=colour, pad=0)
    if title:
        figure.suptitle(title, fontsize=10, color=_INK)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=_DPI, facecolor="white")
    except OSError as error:
        raise UserError(f"cannot write the figure {path}: {error.strerror}.") from error
    return path
