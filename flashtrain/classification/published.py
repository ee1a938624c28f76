"""What others have published of these tasks, to stand beside what is measured here. Accuracies in percent.

Each figure is of the source named beside it, as this project's notes and issue 6 quote it; a task whose figure was not
at hand has none.
"""

from __future__ import annotations

from typing import Any

FLASH_ATTENTION = "FlashAttention (Dao et al. 2022)"
BLOCK_SPARSE = "block-sparse FlashAttention (Dao et al. 2022)"
PRETRAINED = "Transformer pre-trained on masked pixels (Amos et al. 2023)"
PRETRAINED_ROTARY = "the same with rotary positions (Amos et al. 2023)"

PAPER_ACCURACY: dict[str, dict[str, float]] = {
    "pathx": {FLASH_ATTENTION: 61.4, PRETRAINED: 87.7, PRETRAINED_ROTARY: 93.0},
    "path256": {BLOCK_SPARSE: 63.1},
    "listops": {FLASH_ATTENTION: 37.6},
}
# Training speed-up over standard attention, the mean over the Long Range Arena's tasks.
PAPER_MEAN_SPEEDUP = {"flashtrain": 2.4, "flashtrain, block-sparse": 2.8}
CHANCE = {
    "pathfinder": 50.0,
    "pathx": 50.0,
    "path256": 50.0,
    "listops": 10.0,
    "text": 50.0,
    "retrieval": 50.0,
    "image": 10.0,
}
PATHFINDERS = {128: "pathx", 256: "path256"}


def task_of(row: dict[str, Any]) -> str:
    """The task's name in these tables: Path-X and Path-256 are pathfinder at side 128 and 256."""
    return PATHFINDERS.get(row.get("side") or 0, str(row["task"]))


def paper_rows(task: str) -> list[dict[str, Any]]:
    """The published accuracies of a task as rows: implementation, task, accuracy (0 to 1)."""
    return [
        {"implementation": f"{name} (paper)", "task": task, "accuracy": value / 100}
        for name, value in PAPER_ACCURACY.get(task, {}).items()
    ]
