"""A stage that fell back hands on what it had learned; resumed or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flashtrain_recipes.arena.learning_curve import BestOfStage


def validated(best: BestOfStage, step: int, score: float) -> None:
    """A validation of weights that all are `step`."""
    nn.init.constant_(best.model.weight, step)
    metrics = {"validation_accuracy": torch.tensor(score)}
    best.on_validation_end(
        SimpleNamespace(callback_metrics=metrics, global_step=step, sanity_checking=False), None
    )


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("max", (0.6, 0.8, 0.5), 2),
        ("max", (0.6, 0.8), None),
        ("max", (), None),
        ("min", (0.5, 0.7), 1),
    ],
)
def test_the_best_weights_come_back_where_the_latest_are_worse(mode, scores, best) -> None:
    kept = BestOfStage(nn.Linear(2, 1), "validation_accuracy", mode)
    for step, score in enumerate(scores, start=1):
        validated(kept, step, score)
    assert kept.restore() == (best is not None)
    if scores:
        assert (kept.model.weight == (best or len(scores))).all()


def test_they_travel_in_the_checkpoint() -> None:
    first, second = (BestOfStage(nn.Linear(2, 1), "validation_accuracy", "max") for _ in range(2))
    validated(first, 1, 0.9)
    second.load_state_dict(first.state_dict())
    validated(second, 2, 0.4)
    assert second.restore()
    assert (second.model.weight == 1).all()
