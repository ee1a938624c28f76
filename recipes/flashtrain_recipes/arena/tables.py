"""Tables of accuracies, the papers' beside ours; and of training speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.rows import Row, values_of
from flashtrain.report.table import Table, make_table
from flashtrain_recipes.arena.published import (
    LENGTHS,
    MEAN_TASKS,
    PAPER_MEAN_SPEEDUP,
    chance_of,
    paper_rows,
    papers_task,
    task_of,
)

Rows = Sequence[Mapping[str, Any]]


def accuracy_rows(rows: Rows) -> list[Row]:
    """Rows of mode=evaluate with the papers' of the same tasks and chance beside them, task by task."""
    own = [{**row, "task": task_of(row)} for row in rows if row.get("accuracy") is not None and "task" in row]
    found: list[Row] = []
    for task in dict.fromkeys(row["task"] for row in own):
        found += [row for row in own if row["task"] == task]
        found += paper_rows(task)
        if (chance := chance_of(task)) is not None:
            found.append({"implementation": "chance", "task": task, "accuracy": chance / 100})
    return found


def accuracy_table(rows: Rows) -> Table:
    """Accuracy by task, ours with the 95% interval, the papers' and chance; below it, a line for each task that is not
    the papers'. UserError: rows of something else."""
    found = accuracy_rows(rows)
    if not found:
        raise UserError("these rows have no accuracies: mode=evaluate of a classifier writes such.")
    columns = ["task", "implementation", "accuracy", "accuracy_low", "accuracy_high", "samples", "seed", "parameters"]
    table = make_table(
        found, [key for key in columns if values_of(found, key)], "test accuracy, the papers' beside ours"
    )
    others = [f"{task}: {theirs}." for task in values_of(found, "task") if (theirs := papers_task(task))]
    return replace(table, notes=(*table.notes, *others))


def speed_rows(rows: Rows) -> list[Row]:
    """The rows with `speedup_over_standard`: over standard attention, as compiled as the row itself, at the same task
    and batch. None where that one has no figure.
    """
    found = []
    for row in rows:
        told = dict(row)
        if row.get("samples_per_second"):
            told["speedup_over_standard"] = None
            for other in rows:
                same = all(other.get(key) == row.get(key) for key in ("task", "length", "batch", "compiled"))
                if same and other.get("is_standard") and other.get("samples_per_second"):
                    told["speedup_over_standard"] = round(row["samples_per_second"] / other["samples_per_second"], 3)
        found.append(told)
    return found


def mean_speedups(rows: Rows) -> list[Row]:
    """The mean speed-up of each implementation over the tasks that the paper's mean is of, as far as they were
    measured, and the paper's mean beside it where it has one and the tasks are as long as its own.
    """
    found = []
    lengths = {**LENGTHS, "pathfinder": 32 * 32}
    for name in values_of(rows, "implementation"):
        own = [
            row
            for row in rows
            if row["implementation"] == name and row["task"] in MEAN_TASKS and row.get("speedup_over_standard")
        ]
        if own:
            mean = round(sum(row["speedup_over_standard"] for row in own) / len(own), 3)
            theirs = all(row.get("length") == lengths[row["task"]] for row in own)
            paper = PAPER_MEAN_SPEEDUP.get(str(name).removesuffix(", eager")) if theirs else None
            found.append({"implementation": name, "tasks": len(own), "mean_speedup": mean, "paper_mean_speedup": paper})
    return found


def speed_tables(rows: Rows) -> list[Table]:
    """Training speed by task and implementation; the mean speed-ups beside the paper's."""
    columns = [
        "task",
        "length",
        "batch",
        "implementation",
        "samples_per_second",
        "peak_memory_gib",
        "milliseconds",
        "speedup_over_standard",
    ]
    tables = [
        make_table(rows, [key for key in columns if values_of(rows, key)], "training speed, over standard attention")
    ]
    means = mean_speedups(rows)
    if means:
        keys = ["implementation", "tasks", "mean_speedup", "paper_mean_speedup"]
        tables.append(make_table(means, keys, "mean over the tasks; paper: FlashAttention (Dao et al. 2022), LRA"))
    return tables
