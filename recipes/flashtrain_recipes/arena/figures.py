"""Figures of classifiers: accuracies next to the papers', and the learning curve through all stages."""

from __future__ import annotations

import textwrap
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from flashtrain.errors import UserError
from flashtrain.report.figures import save
from flashtrain.report.formats import figure_text
from flashtrain.report.rows import values_of
from flashtrain_recipes.arena.accuracy import accuracy_rows
from flashtrain_recipes.arena.published import chance_of, papers_task
from flashtrain_recipes.harness.rows import Rows

_OURS, _OTHERS, _GRID = "#0969da", "#afb8c1", "#e3e3e3"
_TITLE_WIDTH = 70  # characters above a panel, which is half of the figure
_BANDS = ("#f3f6f9", "#ffffff")  # behind one side of the images, and the next


def accuracy_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the accuracies of each task as bars in a PNG: measured ones with 95% intervals, the papers', and chance.

    Raises:
        UserError: the rows have no accuracies.
    """
    found = accuracy_rows(rows)
    if not found:
        raise UserError("no row has an accuracy: expected the result.json that mode=evaluate of a classifier writes.")
    tasks = list(dict.fromkeys(row["task"] for row in found))
    bars = {task: [row for row in found if row["task"] == task and row["implementation"] != "chance"] for task in tasks}
    sizes = [len(bars[task]) for task in tasks]
    figure = Figure(figsize=(8.0, 0.6 * len(tasks) + 0.32 * sum(sizes) + 0.3), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False, sharex=True, height_ratios=sizes)[:, 0]
    for axis, task in zip(panels, tasks, strict=True):
        for place, row in enumerate(bars[task]):
            share = 100 * row["accuracy"]
            ours = not str(row["implementation"]).endswith("(paper)")
            axis.barh(place, share, color=_OURS if ours else _OTHERS)
            if row.get("accuracy_low") is not None:
                error = [[share - 100 * row["accuracy_low"]], [100 * row["accuracy_high"] - share]]
                axis.errorbar(share, place, xerr=error, color="black", capsize=3)
            axis.annotate(f"{share:.1f}", (share, place), (8, 0), textcoords="offset points", va="center", fontsize=8)
        if (chance := chance_of(task)) is not None:
            axis.axvline(chance, color="black", linestyle=":", linewidth=1)
        axis.set_yticks(
            range(len(bars[task])), [figure_text(str(row["implementation"])) for row in bars[task]], fontsize=8
        )
        axis.invert_yaxis()
        theirs = papers_task(task)
        named = figure_text(task)
        below = "\n".join(textwrap.wrap(f"({theirs})", _TITLE_WIDTH)) if theirs else ""
        axis.set_title(f"{named}\n{below}" if below else named, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlim(0, 104)
    panels[-1].set_xlabel("test accuracy, % (dotted: chance)")
    return save(figure, Path(path))


def curriculum_figure(rows: Rows, path: str | Path) -> Path:
    """Draw held-out accuracy against time as a PNG, a line for each stage of a training and a band for each side.

    Args:
        rows: a learning curve's rows in order, with side, contour, validation_accuracy and gpu_minutes or minutes; a
            new line begins where the value of contour, piece or stage changes.

    Raises:
        UserError: the rows lack such a column.
    """
    time = "gpu_minutes" if values_of(rows, "gpu_minutes") else "minutes"
    missing = [key for key in (time, "side", "contour", "validation_accuracy") if not values_of(rows, key)]
    if missing:
        raise UserError(f"no row has {', '.join(missing)}: expected the result.json of a run of recipe=pathx.")
    figure = Figure(figsize=(8.0, 3.8), layout="constrained")
    axis = figure.subplots()
    began, whole = 0.0, float(rows[-1][time])
    lowest = 100 * min(float(row["validation_accuracy"]) for row in rows)
    bottom = 41.0 if lowest >= 41 else lowest - 5  # below it the sides' names have room
    for number, (side, grouped) in enumerate(groupby(rows, lambda row: row["side"])):
        of_side = list(grouped)
        ended = float(of_side[-1][time])
        axis.axvspan(began, ended, color=_BANDS[number % 2], zorder=0)
        upright = 90 if ended - began < 0.1 * whole else 0  # a narrow band has no room for its name
        axis.annotate(
            figure_text(f"side {side}"),
            ((began + ended) / 2, bottom + 1),
            ha="center",
            va="bottom",
            rotation=upright,
            fontsize=8,
        )
        stages = groupby(of_side, lambda row: (row["contour"], row.get("piece"), row.get("stage")))
        for (contour, *_), together in stages:
            stage = list(together)
            minutes = [float(row[time]) for row in stage]
            shares = [100 * float(row["validation_accuracy"]) for row in stage]
            named = "14" if contour == "hard" else figure_text(str(contour))
            color = "#cf222e" if contour == "hard" else _OURS
            axis.plot(minutes, shares, marker="o", markersize=3, color=color, zorder=3)
            axis.annotate(
                named, (minutes[-1], max(shares)), (0, 5),
                textcoords="offset points", ha="center", va="bottom", fontsize=6,
            )  # fmt: skip
        began = ended
    axis.axhline(50, color="black", linestyle=":", linewidth=1)
    axis.set_ylim(bottom, 104)
    axis.set_xlim(0, max(1.01 * whole, 0.01))
    axis.set_xlabel("GPU minutes" if time == "gpu_minutes" else "minutes")
    axis.set_ylabel("held-out accuracy, %")
    axis.set_title("numbers: dashes of the contours; red: 14, as the Arena's", fontsize=8, loc="left")
    axis.grid(axis="y", color=_GRID, zorder=1)
    axis.spines[["top", "right"]].set_visible(False)
    return save(figure, Path(path))
