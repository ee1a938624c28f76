"""Stopping where the loss or the weights are no longer finite."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from tiny_training import TinyTask, tiny_fit

from flashtrain.errors import UserError
from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain.training.early_stopping import StopOnNonFinite


def fit(folder, task, *callbacks, **options):
    tiny_fit(folder, StopOnNonFinite(), *callbacks, task=task, **options)


@pytest.mark.parametrize(("poison", "accumulated"), [(1, 1), (3, 1), (4, 1), (7, 1), (3, 2)])
def test_the_first_bad_optimizer_step_is_named_wherever_it_lies_in_the_interval(
    tmp_path, poison, accumulated
):
    options = {"log_every_n_steps": 4, "accumulate_grad_batches": accumulated}
    with pytest.raises(UserError, match=f"loss became nan at step {poison}; ") as error:
        fit(tmp_path, TinyTask(poison=poison), max_steps=7, **options)
    assert "\n" not in str(error.value)


def test_no_checkpoint_is_written_after_the_bad_step_and_the_good_one_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nan at step 3; last good checkpoint: .*last\.ckpt"):
        fit(tmp_path, TinyTask(poison=3), SaveLast(tmp_path, 2), max_steps=8, log_every_n_steps=100)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2


def test_weights_that_are_no_longer_finite_are_not_saved_over_good_ones(tmp_path):
    class Spoil(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 4:
                with torch.no_grad():
                    pl_module.model.norm.weight[0] = float("inf")

    with pytest.raises(
        UserError, match=r"weights were no longer finite after step 4 .*last good checkpoint"
    ):
        fit(tmp_path, TinyTask(), Spoil(), SaveLast(tmp_path, 2), max_steps=8)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2
