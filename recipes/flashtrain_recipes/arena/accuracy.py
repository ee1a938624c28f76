"""Accuracies of the Long Range Arena: how sure a measured one is, what others published, and the tables.

Published are, in percent, of FlashAttention (Dao et al. 2022, arXiv 2205.14135) tables 3 and 6; of Amos et al. 2023
(arXiv 2310.02980) their Transformer with rotary positions, pre-trained on the task's own inputs, and the same trained
from scratch.

The papers' Pathfinder images are the original program's (github.com/drewlinsley/pathfinder), to which those drawn here
are equal: the papers' figures of Pathfinder, Path-X and Path-256 stand beside rows of such images only (`images` of a
row), and not beside those of a file that another program drew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.rows import Row, values_of
from flashtrain.report.table import Table, make_table
from flashtrain_recipes.arena import image, listops, papers, reviews
from flashtrain_recipes.arena.pathfinder.parameters import CONTOURS, contour_words

Z95 = 1.959964


def wilson(correct: int, count: int, z: float = Z95) -> tuple[float, float]:
    """The interval of a share of `correct` out of `count` draws (Wilson 1927); z: 1.96 for 95%. Within [0, 1]."""
    if count < 1:
        return 0.0, 1.0
    share = correct / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (middle - half) / scale, (middle + half) / scale
    return 0.0 if correct == 0 else low, 1.0 if correct == count else high


STANDARD = "Transformer (Dao et al. 2022)"
FLASH_ATTENTION = "FlashAttention (Dao et al. 2022)"
BLOCK_SPARSE = "block-sparse FlashAttention (Dao et al. 2022)"
PRETRAINED = "pre-trained Transformer, rotary (Amos et al. 2023)"
FROM_SCRATCH = "Transformer from scratch, rotary (Amos et al. 2023)"

PAPER_ACCURACY: dict[str, dict[str, float]] = {
    "listops": {STANDARD: 36.0, FLASH_ATTENTION: 37.6, BLOCK_SPARSE: 37.0, PRETRAINED: 61.5},
    "text": {STANDARD: 63.6, FLASH_ATTENTION: 63.9, BLOCK_SPARSE: 63.0, PRETRAINED: 91.0},
    "retrieval": {STANDARD: 81.6, FLASH_ATTENTION: 81.4, BLOCK_SPARSE: 81.3, PRETRAINED: 91.6},
    "image": {STANDARD: 42.3, FLASH_ATTENTION: 43.5, BLOCK_SPARSE: 43.6, PRETRAINED: 86.0},
    "pathfinder": {STANDARD: 72.7, FLASH_ATTENTION: 72.7, BLOCK_SPARSE: 73.3, PRETRAINED: 94.2},
    "pathx": {FLASH_ATTENTION: 61.4, BLOCK_SPARSE: 56.0, FROM_SCRATCH: 84.7, PRETRAINED: 93.0},
    "path256": {BLOCK_SPARSE: 63.1},
}
CHANCE = {
    "pathfinder": 50.0,
    "pathx": 50.0,
    "path256": 50.0,
    "listops": 10.0,
    "text": 50.0,
    "retrieval": 50.0,
    "image": 10.0,
}
# What the papers' tasks are: Pathfinder of hard contours at these sides, the others of these lengths.
PATHFINDERS = {32: "pathfinder", 128: "pathx", 256: "path256"}
HARD = ("hard", str(CONTOURS["hard"]))
ORIGINAL = "original"  # what a row of Pathfinder says under "images": the original program's, or equal to them
LENGTHS = {"listops": listops.LONGEST, "text": reviews.LENGTH, "retrieval": papers.LENGTH, "image": image.SIDE**2}


def task_of(row: Mapping[str, Any]) -> str:
    """The name of a row's task in these tables: Path-X and Path-256 are pathfinder at side 128 and 256.

    A task that is not the papers' says in what, such as "listops, length 128" or "pathx, blender images": no figure
    of theirs goes by that name.
    """
    task = str(row["task"])
    if task == "pathfinder":
        side, contour = row.get("side"), row.get("contour")
        if side in PATHFINDERS and contour in HARD:
            images = row.get("images") or "unknown"
            return PATHFINDERS[side] if images == ORIGINAL else f"{PATHFINDERS[side]}, {images} images"
        return f"{task}, side {side}, {contour_words(contour or 'unknown')}"
    length = row.get("length")
    return task if length == LENGTHS.get(task, length) else f"{task}, length {length or 'unknown'}"


def papers_task(task: str) -> str:
    """What the papers' task is, for a name of `task_of` that says it is another; "" for all other names."""
    kind, _, difference = task.partition(", ")
    if difference and kind in PATHFINDERS.values() and difference.endswith(" images"):
        return "the papers' task has the images of its original program"
    if difference and kind == "pathfinder":
        return "the papers' task has hard contours and side 32, 128 or 256, drawn as its own by the original program"
    return f"the papers' task has {LENGTHS[kind]:,} tokens" if difference and kind in LENGTHS else ""


def chance_of(task: str) -> float | None:
    """The accuracy of a guess in percent, for a name of `task_of`; None for an unknown task."""
    return CHANCE.get(task.partition(", ")[0])


def paper_rows(task: str) -> list[dict[str, Any]]:
    """The published accuracies of a task as rows: implementation, task, accuracy (0 to 1)."""
    return [
        {"implementation": f"{name} (paper)", "task": task, "accuracy": value / 100}
        for name, value in PAPER_ACCURACY.get(task, {}).items()
    ]


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
