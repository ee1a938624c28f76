"""Figures of classifiers: accuracies next to the papers', and the learning
curve through all stages."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import INK, colour, legend, marker, new_figure, save, style
from flashtrain.report.rows import values_of
from flashtrain_recipes.arena.accuracy import accuracy_rows
from flashtrain_recipes.arena.pathfinder.parameters import CONTOURS
from flashtrain_recipes.arena.published import HARD, papers_task
from flashtrain_recipes.harness.figures import Bar, bar_figure
from flashtrain_recipes.harness.rows import Row, Rows

_BANDS = ("#f3f6f9", "#ffffff")  # behind one side of the images, and the next


def accuracy_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the accuracies of each task as bars in a PNG: measured ones with 95% intervals,
    the papers', and chance."""
    found = accuracy_rows(rows)
    groups: dict[str, list[Bar]] = {}
    marks: dict[str, float] = {}
    for task in values_of(found, "task"):
        of_task = [row for row in found if row["task"] == task]
        own = [row for row in of_task if row["implementation"] == "flashtrain"]
        more = ""
        if values_of(own, "shown_in_training"):
            more = "ours: trained on more than the task's images"
        words = papers_task(task) or more
        name = f"{task} ({words})" if words else task
        for row in of_task:
            share = 100 * row["accuracy"]
            if row["implementation"] == "chance":
                marks[name] = share
                continue
            ends = [
                100 * row[key]
                for key in ("accuracy_low", "accuracy_high")
                if row.get(key) is not None
            ]
            which = f", {row['weights']}" if len(own) > 1 and row.get("weights") else ""
            title = row["implementation"].removesuffix(" (paper)") + which
            groups.setdefault(name, []).append(Bar(title, share, f"{share:.1f}", row in own, ends))
    title = (
        "Test accuracy. Filled: measured, with 95% intervals. Outlined: published. Dotted: chance."
    )
    return bar_figure(
        groups, path, title=title, unit="test accuracy (%)", rows=rows, limit=104, marks=marks
    )


def curriculum_figure(rows: Rows, path: str | Path) -> Path:
    """Draw held-out accuracy against time as a PNG, a line for each stage of a training
    and a band for each side.

    Args:
        rows: a learning curve's rows in order, with side, contour, validation_accuracy
            and gpu_minutes or minutes; a new line begins where the value of contour or
            stage changes, or of `piece`, the number of the command in a training that
            several commands continued.

    Raises:
        UserError: no row has side, contour, validation_accuracy or a time.
    """
    time = "gpu_minutes" if values_of(rows, "gpu_minutes") else "minutes"
    missing = [
        key for key in (time, "side", "contour", "validation_accuracy") if not values_of(rows, key)
    ]
    if missing:
        raise UserError(
            f"no row has {', '.join(missing)}: expected the result.json of a run of recipe=pathx."
        )
    rows = _elapsed(rows, time)
    figure = new_figure(3.9, "Held-out accuracy through a training's stages; dotted: chance", rows)
    panel = figure.subplots()
    style(panel, "held-out accuracy (%)")
    began, whole = 0.0, float(rows[-1][time])
    # Sides' names have room.
    bottom = min(44.0, 100 * min(float(row["validation_accuracy"]) for row in rows) - 6)
    for number, (side, grouped) in enumerate(groupby(rows, lambda row: row["side"])):
        of_side = list(grouped)
        ended = float(of_side[-1][time])
        panel.axvspan(began, ended, color=_BANDS[number % 2], zorder=0)
        # A narrow band has no room for its name.
        upright = 90 if ended - began < 0.12 * whole else 0
        middle = (began + ended) / 2
        panel.text(
            middle,
            bottom + 1,
            f"side {side}",
            ha="center",
            va="bottom",
            rotation=upright,
            fontsize=9,
        )
        for (contour, *_), together in groupby(
            of_side, lambda row: (row["contour"], row.get("piece"), row.get("stage"))
        ):
            stage = list(together)
            minutes = [float(row[time]) for row in stage]
            shares = [100 * float(row["validation_accuracy"]) for row in stage]
            hard = str(contour) in HARD
            name = f"the task's contours, {CONTOURS['hard']} dashes" if hard else "shorter contours"
            look: dict[str, Any] = {"color": colour(hard), "marker": marker(hard), "label": name}
            panel.plot(minutes, shares, markersize=4, zorder=3, **look)
        began = ended
    panel.axhline(50, color=INK, linestyle=":", linewidth=1.2)
    panel.set_ylim(bottom, 102)
    panel.set_xlim(0, max(1.01 * whole, 0.01))
    panel.set_xlabel("GPU minutes" if time == "gpu_minutes" else "minutes")
    handles, names = panel.get_legend_handles_labels()
    different = dict(zip(names, handles, strict=True))
    legend(figure, list(different.values()), len(different))
    return save(figure, Path(path))


def _elapsed(rows: Rows, time: str) -> list[Row]:
    """Return the rows with column `time` counted from the start of the whole training, where each
    of several commands that continued it counted from its own start."""
    before, last, found = 0.0, 0.0, list[Row]()
    for row in rows:
        before += last if row[time] < last else 0.0
        last = float(row[time])
        found.append({**row, time: before + last})
    return found
