"""What ends a training early: a target and the time that it took, or validations that no longer
improve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping
from tiny_training import TinyTask, tiny_fit

from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.settings.training import TrainerSettings
from flashtrain.tasks.language.spec import LanguageTask
from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.early_stopping import StopAtTarget, StopWithoutGain
from flashtrain.training.validation import DueValidation


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


class Told(TinyTask):
    """Its validations after 3, 6, 9 ... steps have these losses; `steps` has those that trained."""

    LOSSES = (0.9, 0.5, 0.7, 0.6, 0.4, 0.8, 0.8, 0.8, 0.1)

    def __init__(self) -> None:
        super().__init__(total_steps=27)
        self.steps: list[int] = []

    def training_step(self, batch, batch_idx):
        self.steps.append(self.trainer.global_step + 1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", torch.tensor(self.LOSSES[self.trainer.global_step // 3 - 1]))


def trained(folder, patience: int, *, resume=None, steps=27, every=1, stops=None) -> list[int]:
    """The steps that a run makes, of at most so many, whose checkpoint is written every so many."""
    task = Told()
    stops = stops or StopWithoutGain("validation_loss", "min", patience)
    callbacks = (DueValidation(3), stops, SaveLast(folder, every))
    validates = {"limit_val_batches": 1, "val_check_interval": 3}
    tiny_fit(folder, *callbacks, task=task, resume=resume, max_steps=steps, **validates)
    return task.steps


def test_a_training_ends_after_so_many_validations_without_a_better_one(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    for patience, last in ((2, 12), (3, 24), (4, 27)):
        theirs = EarlyStopping("validation_loss", patience=patience)
        alone = trained(tmp_path / "theirs", patience, stops=theirs)
        assert trained(tmp_path / "ours", patience) == alone == [*range(1, last + 1)]
    line = "training ends at step 24: validation_loss was not better than 0.4 in 3 validations"
    assert line in caplog.messages


def test_a_training_ends_also_where_each_micro_batch_is_validated(tmp_path) -> None:
    class Same(TinyTask):
        def validation_step(self, batch, batch_idx):
            self.log("validation_loss", torch.tensor(1.0))

    task, validates = Same(), {"limit_val_batches": 1, "val_check_interval": 1}
    tiny_fit(
        tmp_path, StopWithoutGain("validation_loss", "min", 2), task=task, max_steps=9, **validates
    )
    assert len(task.losses) == 3


# Of 100: its checkpoint is that of the end alone, which has the validation. Else it is written
# before the validation of its step.
@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("stopped", [7, 9, 10, 12, 24])
def test_a_resumed_run_ends_where_it_would_have_ended(tmp_path, stopped: int, every: int) -> None:
    begun = trained(tmp_path, 3, steps=stopped, every=every)
    more = trained(tmp_path, 3, resume=tmp_path / "last.ckpt")
    assert [*begun, *more] == [*range(1, 25)]


def test_a_run_that_ended_goes_on_with_more_patience_alone(tmp_path) -> None:
    assert trained(tmp_path, 3, every=100)[-1] == 24
    last = tmp_path / "last.ckpt"
    assert trained(tmp_path, 3, resume=last, every=100) == []
    assert trained(tmp_path, 4, resume=last) == [25, 26, 27]


def test_a_figure_that_no_validation_logs_and_a_run_without_validations_are_refused(tmp_path):
    stops = StopWithoutGain("validation_los", "min", 3)
    with pytest.raises(UserError, match=r"early_stopping_monitor 'validation_los'. Did you mean"):
        trained(tmp_path, 3, stops=stops)
    with pytest.raises(UserError, match=r"early_stopping_patience needs held-out data"):
        tiny_fit(tmp_path, stops)


@pytest.mark.parametrize(
    ("recipe", "score"),
    [("gpt2", "loss"), ("bert", "accuracy"), ("bert-finetune", "micro_f1"), ("pathx", "accuracy")],
)
def test_a_figure_that_the_task_does_not_log_is_refused_before_anything_is_built(recipe, score):
    def settings(monitor: str):
        words = ["trainer.early_stopping_patience=2", f"trainer.early_stopping_monitor={monitor}"]
        return settings_of([f"recipe={recipe}", *words])

    with pytest.raises(UserError, match=r"early_stopping_monitor 'eval_loss'. Did you mean 'valid"):
        settings("eval_loss")
    assert settings(f"validation_{score}")


def test_a_derived_task_may_log_figures_of_its_own() -> None:
    class Derived(LanguageTask):
        pass

    trainer = {"trainer.early_stopping_patience=2", "trainer.early_stopping_monitor=train_loss"}
    settings = settings_of(["recipe=gpt2", *trainer])
    settings.trainer.early_stopping_monitor = "validation_ndcg"
    Derived().check(settings)
    with pytest.raises(UserError, match=r"'validation_ndcg'"):
        LanguageTask().check(settings)


def test_a_figure_to_follow_without_a_patience_is_refused() -> None:
    settings = TrainerSettings(early_stopping_monitor="validation_loss")
    with pytest.raises(UserError, match=r"monitor needs trainer.early_stopping_patience"):
        settings.check()
