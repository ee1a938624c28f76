"""The learning curve's file, and its state in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashtrain_recipes.arena.learning_curve import LearningCurve

ROW: dict[str, Any] = {
    "stage": 1, "side": 24, "contour": "hard", "step": 3, "images": 12, "train_accuracy": 0.5,
    "validation_accuracy": 0.5, "validation_loss": 0.7, "minutes": 0.1,
}  # fmt: skip


def test_the_state_of_a_curve_is_taken_up_again(tmp_path: Path) -> None:
    curve = LearningCurve(tmp_path / "curve.jsonl")
    curve.load_state_dict({"rows": [ROW], "seconds": 60.0})
    assert curve.minutes == 1.0
    curve.write()
    assert [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()] == [ROW]
    assert curve.state_dict()["rows"] == [ROW]
