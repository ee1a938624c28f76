"""What ends a training early: the target, and the time that it took."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from flashtrain.training.early_stopping import StopAtTarget


def test_the_seconds_to_a_target_are_those_of_all_parts_of_a_resumed_run(passing) -> None:
    def trainer(accuracy: float) -> SimpleNamespace:
        metrics = {"validation_accuracy": torch.tensor(accuracy)}
        return SimpleNamespace(
            sanity_checking=False, callback_metrics=metrics, global_step=1, should_stop=False
        )

    first, second = StopAtTarget(0.9), StopAtTarget(0.9)
    first.on_train_start(trainer(0.1), None)
    passing(10)
    first.on_validation_end(trainer(0.1), None)
    assert first.seconds is None
    second.load_state_dict(first.state_dict())
    passing(1000)  # between the two
    second.on_train_start(trainer(0.1), None)
    passing(5)
    second.on_validation_end(reached := trainer(0.95), None)
    assert (second.seconds, reached.should_stop) == (15, True)
