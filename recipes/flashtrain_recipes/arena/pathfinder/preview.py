"""mode=preview, recipe=pathfinder-preview: draw some Pathfinder images with labels as
one picture, samples.png."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.announce import say
from flashtrain.folders.run_folder import FINISHED, RUNNING, write_config, write_summary
from flashtrain.report.figures import INK, WIDTH_INCHES, new_figure, save
from flashtrain.run.fitting import run_loggers
from flashtrain.run.train import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import close_loggers, log_image
from flashtrain_recipes.arena.pathfinder.parameters import contour_words
from flashtrain_recipes.arena.pathfinder.raster import rasterise
from flashtrain_recipes.arena.pathfinder.store import ensure

IMAGES = 24  # images drawn where pathfinder.preview is not set
COLUMNS = 6  # of the picture
ANSWERS = {0: "no: two curves", 1: "yes: one curve"}


def preview(
    settings: Settings,
    hardware: Hardware,
    folder: Path,
    *,
    overrides: Sequence[str],
    started: float,
) -> dict[str, Any]:
    """Draw the first training images of the settings into `folder`, and return the summary row.

    Args:
        overrides: the command line's words.
        started: time.monotonic() at the command's start.
    """
    given = settings.pathfinder
    say(_describe(settings))
    folder.mkdir(parents=True, exist_ok=True)
    write_config(asdict(settings), folder)
    planned = planned_row(settings, hardware, overrides)
    write_summary(folder, {**planned, "status": RUNNING})
    images = ensure(
        given.side,
        given.seed,
        _count(settings),
        contour=given.contour,
        cache_dir=given.cache_dir,
    )
    strokes = images.strokes(slice(None))
    windows, markers = (strokes[name].to(hardware.kind) for name in ("windows", "markers"))
    drawn = rasterise(windows, markers, images.parameters).cpu().numpy()
    labels, contours = images.labels.tolist(), contour_words(given.contour)
    path = image_grid(
        drawn,
        [ANSWERS[label] for label in labels],
        folder / "samples.png",
        title=f"Pathfinder, side {given.side}, {contours}: do the two discs lie on one curve?",
    )
    say(
        f"wrote {len(labels)} images of {images.path}, {sum(labels)} with both discs on one curve, "
        f"to {path}"
    )
    loggers = run_loggers(settings, folder)
    log_image(loggers, "samples", path)
    close_loggers(loggers)
    columns = {
        "side": given.side,
        "contour": given.contour,
        "images": len(labels),
        "label_1": sum(labels),
    }
    return {
        **planned,
        "status": FINISHED,
        **columns,
        "seconds": round(time.monotonic() - started, 1),
    }


def preview_plan(settings: Settings, hardware: Hardware) -> str:
    """Return the text of mode=plan: what would be drawn."""
    return f"{_describe(settings)}\nnothing was started; leave out mode=plan to draw."


def _describe(settings: Settings) -> str:
    given = settings.pathfinder
    what = f"side {given.side}, {contour_words(given.contour)}, seed {given.seed}"
    return f"Pathfinder preview: {_count(settings)} images of {what}"


def _count(settings: Settings) -> int:
    return settings.pathfinder.preview or IMAGES


def image_grid(
    images: np.ndarray, captions: Sequence[str], path: str | Path, *, title: str
) -> Path:
    """Draw images (N, side, side) uint8 in rows of six, each below its caption, as one PNG
    that is 1200 pixels wide."""
    rows = math.ceil(len(images) / COLUMNS)
    cell = WIDTH_INCHES / COLUMNS
    figure = new_figure(rows * (cell + 0.16) + 0.4, title, ())
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for panel in panels:
        panel.set_axis_off()
    for panel, image, caption in zip(panels, images, captions, strict=False):
        panel.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        panel.set_title(caption, fontsize=8, color=INK)
    return save(figure, Path(path))
