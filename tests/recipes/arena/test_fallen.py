"""A stage that falls to chance ends the training, and what was learned before it is kept."""

from __future__ import annotations

import pytest
import torch
from test_classifier_runs import SignalAt, summary
from tiny_runs import TinyRuns

from flashtrain import registry
from flashtrain.command.compose import compose_settings
from flashtrain_recipes.arena.learning_curve import fell
from flashtrain_recipes.arena.stages import stages_of
from flashtrain_recipes.arena.weights import read_classifier

pytestmark = pytest.mark.integration  # whole runs

WORDS = ("recipe=pathx", "sequence.validation_samples=400", "curriculum.stages=[{side:32},{side:32},{side:32}]")


def rows(*accuracies: float) -> list[dict[str, float]]:
    """Of stages 1, 2, ...: a bad validation, then this one."""
    return [
        {"stage": stage, "validation_accuracy": found}
        for stage, best in enumerate(accuracies, start=1)
        for found in (0.5, best)
    ]


@pytest.mark.parametrize(
    ("accuracies", "fallen"),
    [
        ((0.9, 0.53), True),  # as many of 400 coins often fall
        ((0.9, 0.58), False),
        ((0.55, 0.5), False),  # nothing was learned that could be lost
        ((0.9,), False),
        ((0.9, 0.9, 0.5), False),  # nothing comes after the last
    ],
)
def test_a_stage_fell_where_its_best_is_chance_and_the_one_before_was_not(accuracies, fallen) -> None:
    stages = stages_of(compose_settings([*WORDS]))
    assert fell(rows(*accuracies), stages[len(accuracies) - 1]) is fallen


def test_masked_pixels_alone_have_no_chance_to_fall_to() -> None:
    stages = stages_of(compose_settings([*WORDS, "sequence.classification_weight=0"]))
    assert not fell(rows(0.9, 0.5), stages[1])


def test_the_training_ends_and_the_weights_before_the_fall_are_named(curriculum: TinyRuns, monkeypatch) -> None:
    monkeypatch.setattr("flashtrain_recipes.arena.learning_curve.fell", lambda rows, stage: stage.number == 1)
    stages = "curriculum.stages=[{side:24,steps:3,batch:4},{side:28,steps:3,batch:4},{side:32,steps:3,batch:4}]"
    status, folder = curriculum.run("fallen", stages)
    assert status == 2
    kept = folder / "checkpoints" / "before-stage-2.safetensors"
    assert f"weights={kept}" in summary(folder)["error"]
    saved = read_classifier(kept)
    assert (saved.config.side, saved.notes["stage"]) == (24, 0)
    last = read_classifier(folder / "checkpoints" / "last.ckpt")
    assert any(not torch.equal(value, last.state[name]) for name, value in saved.state.items())

    status, again = curriculum.run("fallen", stages, f"resume={folder}")
    assert (status, summary(folder)["status"]) == (2, "failed")
    assert "fell to chance" in summary(again)["error"]


def test_a_run_that_was_stopped_within_the_stage_names_them_too_and_a_good_stage_leaves_none(
    curriculum: TinyRuns, monkeypatch
) -> None:
    stages = "curriculum.stages=[{side:24,steps:3,batch:4},{side:28,steps:4,batch:4},{side:32,steps:3,batch:4}]"
    stop = SignalAt(5)  # of all stages: the second one's second
    monkeypatch.setitem(registry._components["callback"], "stop", lambda _: stop)
    status, folder = curriculum.run("fallen-later", stages, "trainer.callbacks=[stop]")
    assert status == 143
    kept = folder / "checkpoints" / "before-stage-2.safetensors"
    assert kept.is_file()
    with monkeypatch.context() as falls:
        falls.setattr("flashtrain_recipes.arena.learning_curve.fell", lambda rows, stage: stage.number == 1)
        status, _ = curriculum.run("fallen-later", stages, f"resume={folder}")
    assert status == 2
    assert f"weights={kept}" in summary(folder)["error"]
    status, folder = curriculum.run("fallen-not", stages)
    assert status == 0
    assert not list((folder / "checkpoints").glob("before-stage-*"))
