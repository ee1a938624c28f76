"""Load batches in an order that can be resumed: which samples a step reads is a
function of the step alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from flashtrain.errors import UserError
from flashtrain_kernels.loss_head import IGNORED

log = logging.getLogger(__name__)


def epoch_order(samples: int, seed: int, epoch: int, *of: int) -> np.ndarray:
    """Draw the random order in which an epoch reads its samples.

    Args:
        samples: Number of samples of an epoch.
        seed, epoch: The run's seed, and the number of the epoch from 0.
        of: Further numbers that identify the permutation, if an epoch has several.

    Returns:
        (samples,) unsigned integers, a permutation that follows from the arguments alone.
    """
    # RandomState's stream is frozen: a run resumed under another version of numpy
    # reads the same samples.
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch, *of))))
    order = np.arange(samples, dtype=np.uint32 if samples < 2**32 else np.uint64)
    random.shuffle(order)
    return order


_latest_orders = lru_cache(maxsize=2)(epoch_order)  # a step may lie in two epochs


def in_epoch_order(numbers: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Map positions in a run's endless stream of samples to sample numbers, int64.

    Position n lies in epoch n // samples, and every epoch has its own random order.
    """
    epochs, places = np.divmod(numbers, samples)
    chosen = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        chosen[of_epoch] = _latest_orders(samples, seed, int(epoch))[places[of_epoch]]
    return chosen


class StepSampler(DistributedSampler):
    """Yields, for each micro-batch of a run, the list of sample numbers that this device reads.

    An optimizer step takes samples_per_step = batch_size * accumulate * world_size samples.
    Samples are numbered through the whole run, and step s takes the numbers from s *
    samples_per_step on. So the samples of a step depend on how many it takes, and not on how they
    are sharded over devices and micro-batches. Lightning keeps this sampler as it is, since a
    DistributedSampler knows its rank.

    Args:
        samples: N, the samples of an epoch.
        batch_size: Samples of a micro-batch on one device.
        total_steps: Optimizer steps of the run.
        accumulate: Micro-batches of a step.
        world_size: Number of data-parallel devices.
        rank: This device's number among them.
        seed: Seed of the order of samples.
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
        self.begin = 0  # first micro-batch of the next iteration, counted from the run's first
        self.end = len(self)  # where the next iteration stops
        self._anchor_step = 0
        self._anchor_sample = 0

    def __len__(self) -> int:
        return self.total_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for micro_batch in range(self.begin, self.end):
            yield self.sample_numbers(micro_batch).tolist()

    def first_number(self, step: int) -> int:
        """Return the number of samples that all devices together have read before this step."""
        return self._anchor_sample + (step - self._anchor_step) * self.samples_per_step

    def steps_of(self, epochs: float) -> int:
        """Return the number of steps that read all samples `epochs` times."""
        return max(1, math.ceil(round(epochs * self.samples / self.samples_per_step, 6)))

    def place(self, step: int) -> dict[str, Any]:
        """Return plain values for a checkpoint that say at which sample of the stream a step
        begins."""
        return {"samples_read": self.first_number(step)}

    def continue_from(self, step: int, place: dict[str, Any]) -> None:
        """Let step `step` begin at a saved `place` (see `place`), also if steps now take another
        number of samples."""
        # The place is not step * samples_per_step: the run may have changed its batch size before.
        self._anchor_step, self._anchor_sample = step, place["samples_read"]

    def sample_numbers(self, micro_batch: int) -> np.ndarray:
        """Return the samples, (batch_size,) int64, that this device reads in a
        micro-batch of the run."""
        step, within = divmod(micro_batch, self.accumulate)
        first = self.first_number(step) + (within * self.num_replicas + self.rank) * self.batch_size
        return self.chosen(first + np.arange(self.batch_size))

    def chosen(self, numbers: np.ndarray) -> np.ndarray:
        """Map positions in the run's stream of samples to sample numbers, as
        `in_epoch_order` does."""
        return in_epoch_order(numbers, self.samples, self.seed)


class EvaluationSampler(DistributedSampler):
    """Yields the same list of micro-batches, those of this device, at every evaluation."""

    def __init__(self, batches: Sequence[Any], *, world_size: int, rank: int) -> None:
        super().__init__(range(len(batches)), num_replicas=world_size, rank=rank)  # type: ignore[arg-type]
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def equal_batches(
    samples: int, *, batch_size: int, world_size: int = 1, rank: int = 0
) -> list[list[int]]:
    """Divide the first `samples` samples among devices, and list this device's
    micro-batches, all of one size.

    Each sample is read once, however many devices there are. Where the samples do not divide
    evenly, micro-batches are filled up with the number -1.

    Args:
        samples: Number of samples, over all devices.
        batch_size: Maximum number of samples in a micro-batch.
    """
    share = -(-samples // world_size)
    # All have one size: a smaller last batch would be one more shape to compile for.
    count = -(-share // batch_size)
    size = -(-share // count)
    mine = np.full(count * size, -1)
    own = np.array_split(np.arange(samples), world_size)[rank]
    mine[: len(own)] = own
    return mine.reshape(count, size).tolist()


def even_batches(
    samples: int, *, batch_size: int, world_size: int = 1, rank: int = 0
) -> list[list[int]]:
    """Divide the first `samples` samples among devices as equal_batches does, but leave out a
    remainder instead of filling up.

    For data whose samples, not tokens, have labels: no row can stand for a missing sample there.
    """
    if samples >= world_size:
        share = samples // world_size
        mine = np.arange(rank * share, (rank + 1) * share)
    else:
        mine = np.array([rank % samples])  # every device must read one, or the others wait for ever
    size = max(size for size in range(1, min(batch_size, len(mine)) + 1) if len(mine) % size == 0)
    if 2 * size < batch_size <= len(mine):
        size = batch_size
    return [mine[begin : begin + size].tolist() for begin in range(0, len(mine), size)]


@dataclass(eq=False)
class FilledUp(Dataset[Any]):
    """A Dataset that adds to samples of text the number -1, a row without labels, with which
    equal_batches fills up."""

    samples: Any  # PackedSamples or MixedSamples

    def __getitem__(self, numbers: list[int]) -> Any:
        batch = self.samples[[max(0, number) for number in numbers]]
        batch["labels"][torch.tensor(numbers) < 0] = IGNORED
        return batch


class Samples(Protocol):
    """Data that a loader reads, such as PackedSamples: indexed by a list of sample
    numbers, it returns a batch."""

    context: int  # maximum tokens of a sample
    tokens: int  # of all samples

    def __len__(self) -> int: ...

    def __getitem__(self, samples: list[int]) -> Any: ...


# Why not StatefulDataLoader of torchdata 0.11: after a checkpoint on an epoch's last batch the
# losses are different, and all ranks resume at rank 0's place. Here the place follows from the
# optimizer steps, not from what workers read ahead.
class ResumableLoader(DataLoader[Any]):
    """A DataLoader of training batches from the run's current step to its end.

    `len()` is always that of the whole run; after a resume the iterator yields what is left of it.
    Lightning saves the loader's state in its checkpoints by state_dict and load_state_dict. A
    checkpoint between the micro-batches of a step holds no gradients, so that step is read again
    from its first micro-batch.

    Args:
        samples: Makes the batches.
        sampler: Chooses the samples of each micro-batch.
        trainer: Its global_step is the current step. None: for a loop without Lightning, steps are
            counted by the micro-batches that the loop has taken from the iterator.
        num_workers: Processes that build batches; 0: the training process builds them.
        pin_memory: Whether batches are copied to page-locked memory, as in torch's DataLoader.
    """

    text: str | None = None  # what identifies the content that is read; None where it is not known

    def __init__(
        self,
        samples: Samples,
        sampler: StepSampler,
        *,
        trainer: pl.Trainer | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(samples, sampler=sampler, **loader_options(num_workers, pin_memory))  # type: ignore[arg-type]
        self.steps = sampler
        self.packed = samples
        self.trainer = trainer
        self._begin = 0
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        length = len(self)
        if self.trainer is not None:
            self._begin = self.trainer.global_step * self.steps.accumulate
        elif self._begin % length + self._taken == length:
            self._begin += self._taken  # the last pass was read to its end
        self._taken = 0
        self.steps.begin = self._begin
        self.steps.end = self._begin + length - self._begin % length
        if self.trainer is not None and self.trainer.limit_train_batches != 1.0:
            # Lightning's epochs are shorter, and stop by themselves.
            self.steps.end = self._begin + length
        for batch in super().__iter__():
            self._taken += 1
            yield batch

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        if self.trainer is not None:
            return self.trainer.global_step
        return (self._begin + self._taken) // self.steps.accumulate

    @property
    def epochs(self) -> float:
        """The number of times that the samples have been read in the steps done so far."""
        return self.steps.first_number(self.step) / len(self.packed)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, its place in the stream of samples, and values that identify the stream;
        equal on all ranks."""
        return {
            "step": self.step,
            "accumulate": self.steps.accumulate,
            "seed": self.steps.seed,
            "samples": len(self.packed),
            "tokens": self.packed.tokens,
            "context": getattr(self.packed, "context", None),
            "text": self.text,
            **self.steps.place(self.step),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the state's steps with exactly the next sample, also
        at another batch size.

        If the data, context or seed has changed, samples may repeat, and a warning is logged.
        Raises UserError if the state is that of another kind of data.
        """
        now = self.state_dict()
        missing = self.steps.place(self.step).keys() - state_dict.keys()
        if missing:
            raise UserError(
                "the checkpoint was saved with another kind of data: its state has "
                f"no {', '.join(sorted(missing))}. Resume with the data settings of "
                "the run that saved it."
            )
        changed = [
            f"{name} {state_dict[name]} -> {now[name]}"
            for name in ("seed", "context", "samples", "tokens", "mixture", "text")
            if name in now and state_dict.get(name, now[name]) != now[name]
        ]
        if changed:
            log.warning(
                "resuming with data that has changed (%s): samples may repeat", ", ".join(changed)
            )
        self.steps.continue_from(state_dict["step"], state_dict)
        self._begin, self._taken = state_dict["step"] * self.steps.accumulate, 0
        if self.trainer is not None:
            align_batch_counts(
                self.trainer, len(self), state_dict["accumulate"], self.steps.accumulate
            )


def align_batch_counts(
    trainer: pl.Trainer, length: int, accumulate_then: int, accumulate_now: int
) -> None:
    """Make Lightning's count of micro-batches agree with its count of optimizer steps.

    The counts differ if a checkpoint was saved between the micro-batches of a step (time-based, or
    after an exception), or if the run resumes with another accumulation. Later steps would then be
    made of the wrong micro-batches.

    Args:
        length: Micro-batches of the whole run.
        accumulate_then: Micro-batches of a step in the run that saved the checkpoint.
        accumulate_now: Micro-batches of a step in this run.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current, total = progress.current, progress.total
    before_epoch = total.completed - current.completed
    steps = trainer.global_step - before_epoch // accumulate_then
    # A checkpoint written in on_train_batch_end has not counted its batch as completed yet;
    # Lightning corrects that.
    in_batch_end = (
        current.ready == current.completed + 1
        and getattr(current, "processed", None) == current.ready
    )
    done = current.ready if in_batch_end else current.completed
    if done != steps * accumulate_now:
        for tracker, value in (
            (current, steps * accumulate_now),
            (total, before_epoch + steps * accumulate_now),
        ):
            tracker.reset()
            tracker.increment_by(value)
        # The step at which Lightning logs: Lightning counts the last step only if it finds the
        # counts that it saved.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
    if steps * accumulate_now < length:
        progress.is_last_batch = False  # the last batch of a shorter run


def loader_options(num_workers: int, pin_memory: bool) -> dict[str, Any]:
    """Return the arguments of torch's DataLoader that all our loaders share."""
    return {
        "batch_size": None,  # the sampler yields whole micro-batches, and the samples build them
        "collate_fn": _as_it_is,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": pin_memory,
        # A separate generator: the loader draws a number from it, which must not change the
        # run's random stream.
        "generator": torch.Generator(),
    }


def _as_it_is(batch: Any) -> Any:
    return batch
