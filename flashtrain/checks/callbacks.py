"""The check of the first batch of a training: callbacks of Lightning's Trainer, and of
transformers' and trl's."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.checks.check import check


class LightningCheck(pl.Callback):
    """Checks a LightningModule on its first training batch; UserError, before a step is taken, if
    there is a fault.

    Args:
        options: as of flashtrain.check, such as lengths.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        _check_first(pl_module, loader, self.options)


def trainer_check(**options: Any) -> Any:
    """Return a callback for transformers' Trainer and trl's, which checks the model on its first
    training batch; UserError, before a step is taken, if there is a fault.

    Args:
        options: as of flashtrain.check, such as lengths.
    """
    from transformers import TrainerCallback

    class TrainerCheck(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            _check_first(given["model"], given["train_dataloader"], options)

    return TrainerCheck()


def _check_first(model: Any, loader: Any, options: dict[str, Any]) -> None:
    report = check(model, next(iter(loader)), **options)
    say(f"checked the first batch:\n{report}")
    report.require()
