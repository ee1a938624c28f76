"""The heat map of RULER's scores, length by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.report.figures import INK, new_figure, save, style, tokens_label


def ruler_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the scores, 0 to 100, by task and length as a PNG, with a panel for each model."""
    keys = "model", "task", "length"
    models, tasks, lengths = (list(dict.fromkeys(one[key] for one in rows)) for key in keys)
    figure = new_figure(1.2 + 0.32 * len(tasks), "RULER: score by task and length", rows)
    for at, model in enumerate(models, start=1):
        panel = figure.add_subplot(1, len(models), at)
        style(panel, str(model))
        found = {
            (one["task"], one["length"]): one["score"] for one in rows if one["model"] == model
        }
        grid = [[found.get((task, length), float("nan")) for length in lengths] for task in tasks]
        panel.imshow(grid, cmap="YlGn", vmin=0, vmax=100, aspect="auto")
        panel.grid(visible=False)
        panel.set_xticks(range(len(lengths)), map(tokens_label, lengths))
        panel.set_yticks(range(len(tasks)), tasks if at == 1 else [""] * len(tasks))
        for (task, length), score in found.items():
            where = lengths.index(length), tasks.index(task)
            look = "white" if score > 75 else INK
            panel.text(*where, f"{score:.0f}", ha="center", va="center", fontsize=9, color=look)
    return save(figure, Path(path))
