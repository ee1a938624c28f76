"""What stages train, how large their checkpoints are, and what intervals are worth."""

from __future__ import annotations

from dataclasses import fields

import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.options import REPLACES
from flashtrain.settings.schema import setting_names
from flashtrain.training.hardware import detect_hardware
from flashtrain_recipes.arena.accuracy import wilson
from flashtrain_recipes.arena.settings import StageSettings
from flashtrain_recipes.arena.stages import stages_of
from flashtrain_recipes.arena.words import plan_classifier


def test_a_growing_contour_is_a_stage_for_each_length() -> None:
    growing = "{side:32,contour:5..7,steps:9,stop_at_accuracy:0.9,schedule:constant,images:50}"
    stages = stages_of(
        compose_settings(["recipe=pathx", f"curriculum.stages=[{growing},{{side:64}}]"])
    )
    assert [stage.settings.pathfinder.contour for stage in stages] == ["5", "6", "7", "hard"]
    assert [(stage.number, stage.stop_at_accuracy) for stage in stages] == [
        (0, 0.9),
        (1, 0.9),
        (2, 0.9),
        (3, None),
    ]
    assert [stage.settings.schedule.name for stage in stages] == 3 * ["constant"] + ["cosine"]
    assert [stage.steps for stage in stages[:3]] == [9, 9, 9]


def test_tiles_that_do_not_fill_a_stages_images_are_refused_before_any_is_made() -> None:
    settings = compose_settings(
        ["recipe=path256", "curriculum.stages=[{side:256},{side:40,pattern:butterfly-tiles}]"]
    )
    with pytest.raises(UserError, match=r"side=40 .* multiple of 16"):
        stages_of(settings)


def test_what_a_stage_does_not_say_is_the_runs_own() -> None:
    words = [
        "recipe=pathx",
        "sequence.batch=24",
        "optimizer.learning_rate=0.002",
        "trainer.steps=9",
    ]
    (one, two) = stages_of(
        compose_settings([*words, "curriculum.stages=[{side:32},{side:48,images:40,steps:7}]"])
    )
    assert (one.steps, one.batch, one.settings.optimizer.learning_rate) == (9, 24, 0.002)
    assert (two.steps, two.settings.pathfinder.train_images) == (7, 40)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipe=pathx", "trainer.steps=10"), r"trainer\.steps changes nothing: .* its own steps"),
        (("recipe=pathx", "pathfinder.side=64"), r"pathfinder\.side changes nothing"),
    ],
)
def test_a_setting_that_every_stage_of_a_recipe_says_anew_is_refused(words, message) -> None:
    with pytest.raises(UserError, match=message):
        adapt_to_machine(
            compose_settings([*words, "hardware=cpu"]), CommandLine([*words, "hardware=cpu"])
        )


def test_whatever_a_stage_may_say_is_known_to_stand_in_a_runs_settings_place() -> None:
    # Of stages alone.
    places = {one.name: one.metadata[REPLACES] for one in fields(StageSettings) if one.metadata}
    assert set(places) == {one.name for one in fields(StageSettings)} - {"stop_at_accuracy"}
    assert set(places.values()) <= set(setting_names("classification"))


def test_a_setting_that_some_stage_takes_or_that_stands_beside_stages_of_ones_own_is_not() -> None:
    stages = "curriculum.stages=[{side:32,steps:5}]"
    for words in (
        ["recipe=path256", "optimizer.learning_rate=1e-4"],
        ["recipe=pathx", "trainer.steps=10", stages],
    ):
        given = CommandLine([*words, "hardware=cpu", "hardware.demo=never"])
        adapt_to_machine(compose_settings([*words, "hardware=cpu"]), given)


def test_the_plan_reports_every_stages_cost_and_starts_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path))
    text = plan_classifier(compose_settings(["recipe=pathx"]), detect_hardware("cpu"))
    assert text.count("TFLOP each") == 13
    assert "stages 15 to 25 of 32, side 64, contours of 3 to 13 dashes one after another: " in text
    assert "until 90% of held-out samples are right, at most 3,000 steps" in text
    assert not list(tmp_path.iterdir())


def test_intervals_hold_the_share_and_shrink_with_the_count() -> None:
    low, high = wilson(9000, 10_000)
    assert 0.893 < low < 0.9 < high < 0.906
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 0) == (0.0, 1.0)
