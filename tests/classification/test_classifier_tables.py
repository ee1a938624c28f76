"""Accuracies and speeds in tables, the papers' figures beside ours."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from flashtrain.classification.figures import accuracy_figure, curriculum_figure
from flashtrain.classification.tables import accuracy_rows, mean_speedups, speed_rows
from flashtrain.errors import UserError

PATHX = {"implementation": "flashtrain", "task": "pathfinder", "side": 128, "accuracy": 0.8, "accuracy_low": 0.79,
         "accuracy_high": 0.81}  # fmt: skip


def test_path_x_stands_beside_the_papers_and_chance() -> None:
    found = {row["implementation"]: row["accuracy"] for row in accuracy_rows([PATHX])}
    assert found["flashtrain"] == 0.8
    assert found["FlashAttention (Dao et al. 2022) (paper)"] == pytest.approx(0.614)
    assert found["chance"] == 0.5


def test_a_figure_is_drawn_of_accuracies_alone(tmp_path) -> None:
    assert accuracy_figure([PATHX], tmp_path / "x.png").stat().st_size > 5000
    with pytest.raises(UserError, match="no accuracies"):
        accuracy_figure([{"task": "x", "loss": 1.0}], tmp_path / "y.png")


def test_a_curriculums_accuracy_is_drawn_stage_by_stage(tmp_path) -> None:
    def row(side: int, contour: str, minutes: float) -> dict:
        return {"side": side, "contour": contour, "validation_accuracy": 0.8, "minutes": minutes}

    rows = [row(32, "3", 1.0), row(32, "hard", 2.0), row(64, "3", 2.05), row(128, "hard", 4.0)]
    assert curriculum_figure(rows, tmp_path / "x.png").stat().st_size > 5000
    with pytest.raises(UserError, match="no contour"):
        curriculum_figure([{"side": 32, "validation_accuracy": 0.5, "minutes": 1.0}], tmp_path / "y.png")


@pytest.mark.parametrize(("accuracy", "bottom"), [(0.8, 41), (0.41, 41), (0.37, 32), (0.0, -5)])
def test_no_point_of_a_curriculum_is_below_its_axis(tmp_path, monkeypatch, accuracy, bottom) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    points = [{"side": 32, "contour": "3", "validation_accuracy": share, "minutes": 1.0} for share in (accuracy, 0.9)]
    curriculum_figure(points, tmp_path / "x.png")
    assert drawn[0].axes[0].get_ylim() == (pytest.approx(bottom), 104)


def test_speed_is_told_over_standard_attention_at_the_same_task_batch_and_compilation() -> None:
    def row(name: str, rate: float, compiled: bool, task: str = "text") -> dict:
        return {"implementation": name, "task": task, "length": 8, "batch": 2, "compiled": compiled,
                "is_standard": name == "standard", "samples_per_second": rate}  # fmt: skip

    rows = [row("flashtrain", 30.0, True), row("standard", 10.0, True), row("standard", 5.0, False),
            row("flashtrain", 8.0, True, "image"), row("standard", 8.0, True, "image"),
            row("flashtrain", 9.0, True, "pathx"), row("standard", 1.0, True, "pathx")]  # fmt: skip
    judged = speed_rows(rows)
    assert [one["speedup_over_standard"] for one in judged] == [3.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0]
    (ours, _) = mean_speedups(judged)  # of the paper's five: Path-X is not among them
    assert (ours["mean_speedup"], ours["paper_mean_speedup"], ours["tasks"]) == (2.0, 2.4, 2)
