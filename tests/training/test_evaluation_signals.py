"""An evaluation ends on SIGTERM as the program around it would."""

from __future__ import annotations

import signal

import pytorch_lightning as pl
from torch.utils.data import DataLoader

from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.hardware import detect_hardware


class Waiting(pl.LightningModule):
    """Notes what a SIGTERM would do during its validation."""

    def validation_step(self, batch, batch_idx) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)


def test_a_sigterm_does_in_an_evaluation_what_it_does_before_it() -> None:
    module = Waiting()
    evaluating_trainer(detect_hardware("cpu")).validate(module, DataLoader([1.0]), verbose=False)
    assert module.handler == signal.getsignal(signal.SIGTERM)
