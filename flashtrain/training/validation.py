"""Make a validation that a resumed run missed, and choose how many samples a validation reads."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

SHARE = 0.1  # of the training's FLOPs that validations may take
STEP_TO_FORWARD = 3  # a sample's forward and backward cost three forwards, in FLOPs


class DueValidation(pl.Callback):
    """When a run resumes, makes the validation that the run before missed: a step's checkpoint is
    written before its validation.

    The checkpoint holds the step of the latest validation. A run that resumes at a step whose
    validation is missing validates before it trains.

    Args:
        every: optimizer steps between two validations.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self.step: int | None = None  # after which the latest validation was
        self.made = False  # a validation, in this process: its figures are known

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        if step == 0:
            self.step = None
        elif step % self.every == 0 and step != self.step:
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False
            trainer.validating = True
            loop.run()
            trainer.training = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.step, self.made = trainer.global_step, True

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def held_out_samples(
    requested: int | None, every: int, batch: int, *, maximum: int | None = None
) -> int:
    """Return the number of samples that each validation reads.

    Args:
        requested: the number that was set; None: as many as cost a tenth of the training's FLOPs.
        every: optimizer steps between two validations.
        batch: samples of an optimizer step.
        maximum: an upper bound if `requested` is None.
    """
    if requested is not None:
        return requested
    # In FLOPs, not in seconds: the same settings always read the same samples.
    share = max(1, round(SHARE * STEP_TO_FORWARD * every * batch))
    return share if maximum is None else min(maximum, share)


def describe_validation(samples: int, requested: int | None, every: int, setting: str) -> str:
    """Return a line on how many samples each validation reads; it names `setting` if that is not
    set (`requested` is None)."""
    bound = ""
    if requested is None:
        bound = f" (at most about a tenth of the training time; change it with {setting}=)"
    return (
        "validation: "
        f"{samples:,} held-out sample{'s' * (samples != 1)} every {every:,} steps{bound}"
    )
