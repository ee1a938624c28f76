"""When an optimiser step has ended, and when values are read: what the callbacks of this package share."""

from __future__ import annotations

import pytorch_lightning as pl


class OptimizerStepCounter:
    """Tells, after each training batch, whether that batch ended an optimiser step.

    Lightning calls `on_train_batch_end` for every micro-batch; with accumulate_grad_batches=4 only every fourth ends
    a step (and the last of an epoch). The trainer's global_step advances exactly then.
    """

    def __init__(self) -> None:
        self.seen = 0

    def start(self, trainer: pl.Trainer) -> None:
        """To be called in on_train_start: a resumed run begins at its restored step."""
        self.seen = trainer.global_step

    def ended(self, trainer: pl.Trainer) -> bool:
        """True once after each optimiser step; to be called once in each on_train_batch_end."""
        advanced = trainer.global_step != self.seen
        self.seen = trainer.global_step
        return advanced


def log_interval(trainer: pl.Trainer) -> int:
    """Optimiser steps between two readings: Trainer(log_every_n_steps=...), or 50 where logging is off (0)."""
    return getattr(trainer, "log_every_n_steps", 0) or 50
