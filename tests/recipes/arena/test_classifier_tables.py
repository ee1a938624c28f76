"""Accuracies in tables, the papers' figures beside ours, and speed-ups."""

from __future__ import annotations

import pytest

from flashtrain_recipes.arena.accuracy import accuracy_rows, accuracy_table
from flashtrain_recipes.arena.speed import SPEEDUP

PATHX = {"implementation": "flashtrain", "task": "pathfinder", "side": 128, "contour": "hard",
         "accuracy": 0.8,
         "accuracy_low": 0.79, "accuracy_high": 0.81}  # fmt: skip


ORIGINAL = {**PATHX, "images": "original"}


def test_path_x_on_the_tasks_original_images_stands_beside_the_papers_and_chance() -> None:
    found = {row["implementation"]: row["accuracy"] for row in accuracy_rows([ORIGINAL])}
    assert found["flashtrain"] == 0.8
    assert found["FlashAttention (Dao et al. 2022) (paper)"] == pytest.approx(0.614)
    assert found["chance"] == 0.5
    assert accuracy_table([ORIGINAL]).notes == ()


@pytest.mark.parametrize(("images", "named"), [({"images": "blender"}, "blender"), ({}, "unknown")])
def test_on_images_of_another_program_no_paper_stands_beside_it_and_the_table_says_why(
    images, named
) -> None:
    table = accuracy_table([{**PATHX, **images}])
    assert [row["task"] for row in table.rows] == [f"pathx, {named} images"] * 2
    assert [row["implementation"] for row in table.rows] == ["flashtrain", "chance"]
    assert "of its original program" in table.notes[0]


HARD = {"contour": "hard", "images": "original"}


@pytest.mark.parametrize(
    ("task", "same", "others"),
    [
        ("pathfinder", {"side": 32, **HARD}, [{"side": 32, "contour": "easy"}, {"side": 32}]),
        ("pathfinder", {"side": 128, **HARD}, [{"side": 24, **HARD}]),
        (
            "pathfinder",
            {"side": 256, **HARD, "contour": "14"},
            [{"side": 256, **HARD, "contour": "3-6"}],
        ),
        ("listops", {"length": 2000}, [{"length": 128}, {}]),
        ("text", {"length": 4096}, [{"length": 256}, {"length": 8192}]),
        ("retrieval", {"length": 4000}, [{"length": 256}]),
        ("image", {"length": 1024}, [{}]),
    ],
)
def test_the_papers_stand_beside_their_own_task_only(task, same, others) -> None:
    row = {"implementation": "flashtrain", "task": task, "accuracy": 0.8}
    own = accuracy_table([{**row, **same}])
    assert any("(paper)" in line["implementation"] for line in own.rows)
    assert own.notes == ()
    for other in others:
        table = accuracy_table([{**row, **other}])
        assert [line["implementation"] for line in table.rows] == ["flashtrain", "chance"]
        assert len(table.notes) == 1


def test_speed_is_reported_over_standard_attention_at_the_same_task_batch_and_compilation() -> None:
    def row(name: str, rate: float, compiled: bool, task: str = "text") -> dict:
        length = {"text": 4096, "image": 1024}.get(task, 8)
        return {"implementation": name, "task": task, "length": length, "batch": 2,
                "compiled": compiled,
                "is_standard": name == "standard", "samples_per_second": rate}  # fmt: skip

    rows = [row("flashtrain", 30.0, True), row("standard", 10.0, True), row("standard", 5.0, False),
            row("flashtrain", 8.0, True, "image"), row("standard", 8.0, True, "image"),
            row("flashtrain", 9.0, True, "pathx"), row("standard", 1.0, True, "pathx")]  # fmt: skip
    assert [SPEEDUP.of(one, rows)["speedup_over_standard"] for one in rows] == [
        3.0,
        1.0,
        1.0,
        1.0,
        1.0,
        9.0,
        1.0,
    ]
