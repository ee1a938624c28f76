"""Labelled sequences as a LightningDataModule: seeded, resumable, divided over devices.

B samples of a micro-batch on this device.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from flashtrain.data.loader import ResumableLoader, Samples, packed_loader
from flashtrain.data.sampler import FixedSampler, StepSampler
from flashtrain.data.sequences.batch import SequenceBatch
from flashtrain.data.sequences.source import SequenceSource
from flashtrain.errors import UserError


class SequenceDataModule(pl.LightningDataModule):
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
        self._loader: ResumableLoader | None = None

    def prepare_data(self) -> None:
        """Make or read what is missing. Lightning calls this in one process a machine."""
        self.source.prepare()

    @property
    def epochs_seen(self) -> float:
        """How often the training samples have been read so far, 1.0 being every one once."""
        return 0.0 if self._loader is None else self._loader.samples_read / self._loader.steps.samples

    def train_dataloader(self) -> ResumableLoader:
        """The run's micro-batches for this device, from the step that the trainer stands at."""
        samples = self.source.split("train")
        world_size, rank = self._place()
        sampler = StepSampler(
            len(samples),
            batch_size=self.batch_size,
            total_steps=self.total_steps,
            accumulate=self.accumulate,
            world_size=world_size,
            rank=rank,
            seed=self.seed,
        )
        self._loader = ResumableLoader(
            samples, sampler, trainer=self.trainer, num_workers=self.num_workers, pin_memory=self._pin_memory()
        )
        return self._loader

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
        samples: Samples = self.source.split(split)
        world_size, rank = self._place()
        limit = self.limits[split]
        count = len(samples) if limit is None else min(limit, len(samples))
        sampler = FixedSampler(count, batch_size=self.evaluation_batch, world_size=world_size, rank=rank)
        return packed_loader(samples, sampler, num_workers=self.num_workers, pin_memory=self._pin_memory())

    def _place(self) -> tuple[int, int]:
        """How many data-parallel devices there are, and which of them this is."""
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (shares["num_replicas"], shares["rank"]) if shares else (1, 0)

    def _pin_memory(self) -> bool:
        if self.trainer is not None:
            return self.trainer.strategy.root_device.type == "cuda"
        return torch.cuda.is_available()
