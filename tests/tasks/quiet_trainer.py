"""A Trainer on the CPU that writes and draws nothing, and a step in which it fails."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


def quiet_trainer(steps: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


class FailsInStep3(pl.Callback):
    """Raises in the second micro-batch of the third step, of two micro-batches each."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 5:
            raise ArithmeticError
