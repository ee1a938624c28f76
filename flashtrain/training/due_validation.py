"""No validation is lost: one that was due when a run died is made when it goes on."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from flashtrain.files.foreign_files import is_count


class DueValidation(pl.Callback):
    """Knows the step of the latest validation, which travels in the checkpoint, and validates at once where a run goes
    on from a step whose validation it has not: the checkpoint of a step is written before its validation.

    every: optimiser steps between two validations.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self.step: int | None = None

    def has(self, step: int) -> bool:
        """Whether the weights of this step were validated."""
        return self.step == step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        if step == 0:
            self.step = None
        elif step % self.every == 0 and not self.has(step):
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False
            trainer.validating = True
            loop.run()
            trainer.training = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step = state_dict.get("step")
        self.step = step if is_count(step) else None
