"""A stage that fell back hands on what it had learned; resumed or not."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from flashtrain_recipes.arena.learning_curve import BestOfStage


def validated(best: BestOfStage, step: int, score: float) -> None:
    """A validation of weights that all are `step`."""
    nn.init.constant_(best.model.weight, step)
    metrics = {"validation_accuracy": torch.tensor(score)}
    best.on_validation_end(SimpleNamespace(callback_metrics=metrics, global_step=step, sanity_checking=False), None)


def test_the_best_weights_come_back_where_the_latest_are_worse() -> None:
    best = BestOfStage(nn.Linear(2, 1), "validation_accuracy", "max")
    for step, score in ((1, 0.6), (2, 0.8), (3, 0.5)):
        validated(best, step, score)
    assert best.restore()
    assert best.step == 2
    assert (best.model.weight == 2).all()


def test_the_latest_stay_where_they_are_the_best() -> None:
    best = BestOfStage(nn.Linear(2, 1), "validation_accuracy", "max")
    assert not best.restore()
    for step, score in ((1, 0.6), (2, 0.8)):
        validated(best, step, score)
    assert not best.restore()
    assert (best.model.weight == 2).all()


def test_a_loss_is_best_where_it_is_lowest() -> None:
    best = BestOfStage(nn.Linear(2, 1), "validation_accuracy", "min")
    validated(best, 1, 0.5)
    validated(best, 2, 0.7)
    assert best.restore()
    assert (best.model.weight == 1).all()


def test_they_travel_in_the_checkpoint() -> None:
    first = BestOfStage(nn.Linear(2, 1), "validation_accuracy", "max")
    validated(first, 1, 0.9)
    second = BestOfStage(nn.Linear(2, 1), "validation_accuracy", "max")
    second.load_state_dict(first.state_dict())
    validated(second, 2, 0.4)
    assert second.restore()
    assert (second.model.weight == 1).all()
