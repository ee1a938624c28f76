"""Published accuracies on the Long Range Arena, in percent, and the tasks that
they were measured on.

Sources: FlashAttention (Dao et al. 2022, arXiv 2205.14135), tables 3 and 6; Amos et al. 2023
(arXiv 2310.02980), their Transformer with rotary positions, pre-trained on the task's own inputs
or trained from scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashtrain_recipes.arena import image, listops, papers, reviews
from flashtrain_recipes.arena.pathfinder.parameters import CONTOURS, contour_words

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
CHANCE = {task: 10.0 if task in ("listops", "image") else 50.0 for task in PAPER_ACCURACY}
# What the papers' tasks are: Pathfinder of hard contours at these sides, the
# others of these lengths.
PATHFINDERS = {32: "pathfinder", 128: "pathx", 256: "path256"}
HARD = ("hard", str(CONTOURS["hard"]))
# What a row says under "images" of those that the original program
# (github.com/drewlinsley/pathfinder) drew, or that equal them, as all drawn here do: the papers'
# figures are compared with rows of such images only.
ORIGINAL = "original"
LENGTHS = {
    "listops": listops.MAX_LENGTH,
    "text": reviews.LENGTH,
    "retrieval": papers.LENGTH,
    "image": image.SIDE**2,
}


def task_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row's task in tables: Path-X and Path-256 are
    pathfinder at sides 128 and 256.

    The name of a task that differs from the papers' says how, as in "listops, length 128" or
    "pathx, blender images".
    """
    task = str(row["task"])
    if task == "pathfinder":
        side, contour = row.get("side"), row.get("contour")
        if side in PATHFINDERS and contour in HARD:
            images = row.get("images") or "unknown"
            return (
                PATHFINDERS[side] if images == ORIGINAL else f"{PATHFINDERS[side]}, {images} images"
            )
        return f"{task}, side {side}, {contour_words(contour or 'unknown')}"
    length = row.get("length")
    return task if length == LENGTHS.get(task, length) else f"{task}, length {length or 'unknown'}"


def papers_task(task: str) -> str:
    """Return how the papers' task differs from a task named by `task_of`, in
    words; "" where it does not."""
    kind, _, difference = task.partition(", ")
    if difference and kind in PATHFINDERS.values() and difference.endswith(" images"):
        return "the papers' task has the images of its original program"
    if difference and kind == "pathfinder":
        return (
            "the papers' task has hard contours and side 32, 128 or 256, "
            "drawn as its own by the original program"
        )
    return (
        f"the papers' task has {LENGTHS[kind]:,} tokens" if difference and kind in LENGTHS else ""
    )


def chance_of(task: str) -> float | None:
    """Return the accuracy of guessing, in percent, for a task named by `task_of`;
    None for an unknown task."""
    return CHANCE.get(task.partition(", ")[0])


def paper_rows(task: str) -> list[dict[str, Any]]:
    """Return the published accuracies of a task as rows with implementation, task
    and accuracy (0 to 1)."""
    return [
        {"implementation": f"{name} (paper)", "task": task, "accuracy": value / 100}
        for name, value in PAPER_ACCURACY.get(task, {}).items()
    ]
