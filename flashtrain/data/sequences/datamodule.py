"""Labelled sequences as a LightningDataModule: seeded, resumable, divided over devices.

B samples of a micro-batch on this device.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from flashtrain.data.loader import ResumableLoader
from flashtrain.data.resumable_datamodule import ResumableDataModule
from flashtrain.data.sequences.batch import SequenceBatch
from flashtrain.data.sequences.source import SequenceSource
from flashtrain.errors import UserError


class SequenceDataModule(ResumableDataModule):
    """SequenceBatches of a task.

    source: the task's data. batch_size: B. total_steps, accumulate: optimiser steps of the run, micro-batches of each.
    seed: of the order of samples. validation_samples, test_samples: the first so many of those splits, over all devices
    (None: all). evaluation_batch: B where nothing is trained (None: batch_size). num_workers: processes that build
    batches, on each device; 0: in the training process.

    A run is one Lightning epoch of total_steps * accumulate micro-batches, as with TextDataModule. A checkpoint resumes
    with exactly the next sample, however many devices it goes on with. UserError: arguments out of range.
    """

    def __init__(
        self,
        source: SequenceSource,
        batch_size: int = 32,
        *,
        total_steps: int = 100,
        accumulate: int = 1,
        seed: int = 0,
        validation_samples: int | None = None,
        test_samples: int | None = None,
        evaluation_batch: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, given in (("batch_size", batch_size), ("total_steps", total_steps), ("accumulate", accumulate)):
            if given < 1:
                raise UserError(f"{name}={given} must be at least 1.")
        self.source = source
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.accumulate = accumulate
        self.seed = seed
        self.limits = {"validation": validation_samples, "test": test_samples}
        self.evaluation_batch = evaluation_batch or batch_size
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        """Make or read what is missing. Lightning calls this in one process a machine."""
        self.source.prepare()

    @property
    def held_out_samples(self) -> int:
        """Samples of each validation, over all devices. Needs prepare_data()."""
        count, limit = len(self.source.split("validation")), self.limits["validation"]
        return count if limit is None else min(limit, count)

    def train_dataloader(self) -> ResumableLoader:
        """The run's micro-batches for this device, from the step that the trainer stands at."""
        return self._training(self.source.split("train"))

    def val_dataloader(self) -> DataLoader[Any]:
        """This device's share of the validation samples."""
        return self._fixed("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """This device's share of the test samples."""
        return self._fixed("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> SequenceBatch:
        """What is left to do on the device, such as drawing."""
        return self.source.finish(batch)

    def _fixed(self, split: str) -> DataLoader[Any]:
        return self._once(self.source.split(split), self.limits[split], self.evaluation_batch)
