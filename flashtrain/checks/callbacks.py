"""The check of a training's first batch: callbacks of Lightning's Trainer, and of transformers' and
trl's. UserError, before a step is taken, if there is a fault."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.checks.check import check


class LightningCheck(pl.Callback):
    """Checks a LightningModule on its first training batch."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _check_first(pl_module, trainer.train_dataloader)


def trainer_check() -> Any:
    """Return a callback for transformers' Trainer and trl's, which checks the model on its first
    training batch."""
    from transformers import TrainerCallback

    class TrainerCheck(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            _check_first(given["model"], given["train_dataloader"])

    return TrainerCheck()


def _check_first(model: Any, loader: Any) -> None:
    report = check(model, next(iter(loader)))
    say(f"checked the first batch:\n{report}")
    report.require()
