"""What the data modules share: a run's micro-batches for each device, from the step that the trainer stands at.

B samples of a micro-batch on this device.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from flashtrain.data.loader import ResumableLoader, Samples, packed_loader
from flashtrain.data.sampler import FixedSampler, StepSampler


class ResumableDataModule(pl.LightningDataModule):
    """A subclass sets batch_size (B), total_steps, accumulate, seed and num_workers, and says which samples there are.

    A run is one Lightning epoch of total_steps * accumulate micro-batches. A checkpoint resumes with exactly the next
    sample, however many devices it goes on with.
    """

    batch_size: int
    total_steps: int
    accumulate: int
    seed: int
    num_workers: int

    def __init__(self) -> None:
        super().__init__()
        self._train_loader: ResumableLoader | None = None

    @property
    def epochs_seen(self) -> float:
        """How often the training samples have been read so far, 1.0 being every one once."""
        if self._train_loader is None:
            return 0.0
        return self._train_loader.samples_read / self._train_loader.steps.samples

    def _training(self, samples: Samples) -> ResumableLoader:
        """The run's micro-batches of these samples for this device."""
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
        self._train_loader = ResumableLoader(
            samples, sampler, trainer=self.trainer, num_workers=self.num_workers, pin_memory=self._pin_memory()
        )
        return self._train_loader

    def _once(self, samples: Samples, count: int | None, batch_size: int) -> DataLoader[Any]:
        """This device's share of the first `count` of these samples (None: all), each once."""
        world_size, rank = self._place()
        count = len(samples) if count is None else min(count, len(samples))
        sampler = FixedSampler(count, batch_size=batch_size, world_size=world_size, rank=rank)
        return packed_loader(samples, sampler, num_workers=self.num_workers, pin_memory=self._pin_memory())

    def _place(self) -> tuple[int, int]:
        """How many data-parallel devices there are, and which of them this is."""
        # A strategy that shares one sample among devices (context, tensor parallelism) counts those as one here.
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (shares["num_replicas"], shares["rank"]) if shares else (1, 0)

    def _pin_memory(self) -> bool:
        if self.trainer is not None:
            return self.trainer.strategy.root_device.type == "cuda"
        return torch.cuda.is_available()
