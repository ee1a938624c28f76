"""Accuracies on the Long Range Arena: the interval of a measured accuracy, and tables with
the papers' accuracies."""

from __future__ import annotations

import math
from dataclasses import replace

from flashtrain.errors import UserError
from flashtrain.report.rows import Row, values_of
from flashtrain.report.table import Table, make_table
from flashtrain_recipes.arena.published import chance_of, paper_rows, papers_task, task_of
from flashtrain_recipes.harness.rows import Rows

Z = 1.959964  # quantile of the normal distribution, for 95%


def wilson(correct: int, count: int) -> tuple[float, float]:
    """Return the 95% confidence interval (low, high) of a share of `correct` out of
    `count` draws (Wilson 1927)."""
    if count < 1:
        return 0.0, 1.0
    share = correct / count
    middle = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    low, high = (middle - half) / scale, (middle + half) / scale
    return 0.0 if correct == 0 else low, 1.0 if correct == count else high


def accuracy_rows(rows: Rows) -> list[Row]:
    """Return rows of mode=evaluate grouped by task; after each task's rows come one for each
    published accuracy and one for guessing.

    Raises:
        UserError: the rows have no accuracies.
    """
    own = [
        {**row, "task": task_of(row)}
        for row in rows
        if row.get("accuracy") is not None and "task" in row
    ]
    found: list[Row] = []
    for task in dict.fromkeys(row["task"] for row in own):
        found += [row for row in own if row["task"] == task]
        found += paper_rows(task)
        if (chance := chance_of(task)) is not None:
            found.append({"implementation": "chance", "task": task, "accuracy": chance / 100})
    if not found:
        raise UserError(
            "no row has an accuracy: "
            "expected the result.json that mode=evaluate of a classifier writes."
        )
    return found


def accuracy_table(rows: Rows) -> Table:
    """Return the table of accuracies by task: measured ones with 95% intervals,
    the papers' and chance.

    A line below the table names each task that differs from the papers' task.
    """
    found = accuracy_rows(rows)
    columns = [
        "task",
        "implementation",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "samples",
        "seed",
        "parameters",
    ]
    table = make_table(
        found, [key for key in columns if values_of(found, key)], "test accuracy, and the papers'"
    )
    others = [
        f"{task}: {theirs}." for task in values_of(found, "task") if (theirs := papers_task(task))
    ]
    return replace(table, notes=(*table.notes, *others))
