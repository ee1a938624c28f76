"""The learning curve's file, and what a checkpoint from anywhere may hold in its place."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.arena.learning_curve import COLUMNS, LearningCurve

ROW: dict[str, Any] = {
    "stage": 1, "side": 24, "contour": "hard", "step": 3, "images": 12, "train_accuracy": 0.5,
    "validation_accuracy": 0.5, "validation_loss": float("nan"), "minutes": 0.1,
}  # fmt: skip


def test_the_state_of_a_curve_is_taken_up_again_a_loss_that_is_no_number_too(tmp_path: Path) -> None:
    curve = LearningCurve(tmp_path / "curve.csv")
    older = {**ROW, "drawn_as": ""}  # what its images were drawn like, a column of before
    curve.load_state_dict({"rows": [ROW, older], "seconds": 60.0})
    assert (len(curve.rows), curve.minutes) == (2, 1.0)
    curve.write()
    with (tmp_path / "curve.csv").open(newline="") as file:
        assert [list(row) for row in csv.DictReader(file)] == 2 * [list(COLUMNS)]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"rows": None, "seconds": 1.0},
        {"rows": [[1]], "seconds": 1.0},
        {"rows": [ROW], "seconds": "long"},
        {"rows": [{**ROW, "step": "3"}], "seconds": 1.0},
        {"rows": [{**ROW, "images": 10**400}], "seconds": 1.0},
        {"rows": [{**ROW, "contour": ["hard"]}], "seconds": 1.0},
        {"rows": [{**ROW, "contour": "x" * 10**6}], "seconds": 1.0},
        {"rows": [{**ROW, "more": 1}], "seconds": 1.0},
        {"rows": [{"step": 1}], "seconds": 1.0},
    ],
)
def test_a_damaged_curve_is_one_line(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="learning curve is damaged") as caught:
        LearningCurve(tmp_path / "curve.csv").load_state_dict(state)
    assert "\n" not in str(caught.value)


def test_a_spreadsheet_computes_nothing_of_it(tmp_path: Path) -> None:
    curve = LearningCurve(tmp_path / "curve.csv")
    curve.load_state_dict({"rows": [{**ROW, "contour": "=1+1\x1b[2J"}], "seconds": 1.0})
    curve.write()
    with (tmp_path / "curve.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert set(row) == set(COLUMNS)
    assert row["contour"] == "'=1+1\\x1b[2J"
