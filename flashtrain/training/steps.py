"""Count optimizer steps among the micro-batches that Lightning counts."""

from __future__ import annotations

import pytorch_lightning as pl


class OptimizerStepCounter:
    """Detects whether a training batch ended an optimizer step.

    Lightning calls `on_train_batch_end` for every micro-batch; with
    accumulate_grad_batches=4 only every fourth (and the last of an epoch) ends a step.
    Exactly then the trainer's global_step advances.
    """

    def __init__(self) -> None:
        self.seen = 0

    def start(self, trainer: pl.Trainer) -> None:
        """Start counting at the trainer's step. Call in on_train_start, when a resumed
        run's step is restored."""
        self.seen = trainer.global_step

    def ended(self, trainer: pl.Trainer) -> bool:
        """Return whether an optimizer step has ended since the last call. Call once in
        each on_train_batch_end."""
        advanced = trainer.global_step != self.seen
        self.seen = trainer.global_step
        return advanced


def log_interval(trainer: pl.Trainer) -> int:
    """Return the optimizer steps between two logged values:
    Trainer(log_every_n_steps=...), or 50 if it is 0."""
    return trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
