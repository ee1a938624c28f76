"""A grid of test images with the model's answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.report.formats import figure_text

COLUMNS = 6
RIGHT, WRONG = "#1a7f37", "#cf222e"


def answers_picture(
    pixels: Tensor, labels: Tensor, logits: Tensor, path: str | Path, *, names: Sequence[str], title: str
) -> Path:
    """Draw images (N, S) uint8 with what the model answers and how sure it is: green where it is right, red where not.

    labels (N,), logits (N, classes); names: of the classes. Returns the path. UserError: it cannot be written.
    """
    side = math.isqrt(pixels.shape[1])
    sure, answers = torch.softmax(logits.float(), dim=1).max(dim=1)
    rows = max(1, math.ceil(len(pixels) / COLUMNS))
    figure = Figure(figsize=(2.1 * COLUMNS, 2.35 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for place, axis in enumerate(axes):
        axis.set_axis_off()
        if place >= len(pixels):
            continue
        axis.imshow(pixels[place].view(side, side), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        answer, label = int(answers[place]), int(labels[place])
        words = f"{names[answer]} ({float(sure[place]):.0%})"
        right = answer == label
        axis.set_title(words if right else f"{words}, is {names[label]}", fontsize=8, color=RIGHT if right else WRONG)
    figure.suptitle(figure_text(title), fontsize=10)
    path = Path(path)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
    return path
