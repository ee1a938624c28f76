"""Which samples each device reads in each micro-batch: a function of the step alone, so that any step can be resumed.

An optimiser step takes `samples_per_step` = batch_size x accumulate x world_size samples. Numbered through the whole
run, step s takes the numbers s * samples_per_step and up; number n is sample permutation[n % N] of epoch n // N, with N
the samples of an epoch and one random permutation an epoch. So the samples of a step depend on their count a step, and
not on how devices, micro-batches and accumulation share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

PERMUTATIONS_KEPT = 2


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """(samples,) unsigned: the order in which an epoch reads its samples, a random permutation."""
    # RandomState's stream is frozen: a run resumed under another version of numpy reads the same samples.
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch))))
    order = np.arange(samples, dtype=np.uint32 if samples < 2**32 else np.uint64)
    random.shuffle(order)
    return order


class StepSampler(DistributedSampler):
    """Hands out, for each micro-batch of a run, the list of sample numbers that this device reads.

    samples: N, the samples of an epoch. batch_size: samples a micro-batch a device. total_steps: optimiser steps of
    the run; the sampler's length is total_steps * accumulate micro-batches.

    `begin` is the micro-batch that the next iteration starts with, counted from the run's first.
    Being a DistributedSampler tells Lightning that it already knows its rank, and is to be left alone.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        total_steps: int,
        accumulate: int = 1,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(range(samples), num_replicas=world_size, rank=rank)  # type: ignore[arg-type]
        self.samples = samples
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.accumulate = accumulate
        self.samples_per_step = batch_size * accumulate * world_size
        self.seed = seed
        self.begin = 0
        self.end: int | None = None
        self._anchor_step = 0
        self._anchor_sample = 0
        self._permutations: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.total_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        end = self.begin + len(self) if self.end is None else self.end
        for micro_batch in range(self.begin, end):
            yield self.sample_numbers(micro_batch).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Nothing to set: the epoch follows from the step."""

    def first_number(self, step: int) -> int:
        """How many samples all devices together have read before this step."""
        return self._anchor_sample + (step - self._anchor_step) * self.samples_per_step

    def continue_from(self, step: int, number: int) -> None:
        """Let this step begin at this number: for a run that is resumed with another count of samples a step."""
        self._anchor_step, self._anchor_sample = step, number

    def sample_numbers(self, micro_batch: int) -> np.ndarray:
        """(batch_size,) int64: the samples that this device reads in a micro-batch, counted from the run's first."""
        step, within = divmod(micro_batch, self.accumulate)
        first = self.first_number(step) + (within * self.num_replicas + self.rank) * self.batch_size
        numbers = first + np.arange(self.batch_size)
        epochs, places = np.divmod(numbers, self.samples)
        chosen = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            chosen[of_epoch] = self._permutation(int(epoch))[places[of_epoch]]
        return chosen

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            while len(self._permutations) >= PERMUTATIONS_KEPT:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = epoch_order(self.samples, self.seed, epoch)
        return self._permutations[epoch]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_permutations": {}}


class FixedSampler(DistributedSampler):
    """The first `samples` samples in order, an equal share for each device, in micro-batches of one size.

    The same samples are read whatever the count of devices (up to a remainder that does not divide among them) and
    whatever the micro-batch: `batch_size` is only the most that a micro-batch may hold.
    """

    def __init__(self, samples: int, *, batch_size: int, world_size: int = 1, rank: int = 0) -> None:
        super().__init__(range(samples), num_replicas=world_size, rank=rank)  # type: ignore[arg-type]
        if samples >= world_size:
            share = samples // world_size
            mine = np.arange(rank * share, (rank + 1) * share)
        else:
            mine = np.array([rank % samples])  # every device must take part, or the others wait for ever
        # One size for all: a last, smaller batch would be one more shape to compile for.
        size = max(size for size in range(1, min(batch_size, len(mine)) + 1) if len(mine) % size == 0)
        if 2 * size < batch_size <= len(mine):
            size = batch_size
        self._batches = [mine[begin : begin + size].tolist() for begin in range(0, len(mine), size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Nothing to set: every epoch reads the same samples in the same order."""
