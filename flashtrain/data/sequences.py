"""Data of sequence classification, such as the tasks of the Long Range Arena (Tay et al. 2021).

N samples, W sequences of a sample (1, or 2 of a pair), T tokens in all, B samples of a batch (the micro-batch on this
device), S the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flashtrain.data.datamodule import ResumableDataModule
from flashtrain.data.loader import ResumableLoader, Samples
from flashtrain.errors import at_least

PADDING = 0
ROUNDED_TO = 64  # a batch is padded to a multiple of so many tokens, so that few shapes occur


class SequenceBatch(TypedDict, total=False):
    """A batch of labelled sequences.

    tokens (B, S), or (B, 2, S) of pairs: uint8 gray levels or token numbers, 0 for padding.
    labels (B,) int64. lengths (B,) or (B, 2) int64: tokens before the padding; absent if all have length S.
    """

    tokens: Tensor
    labels: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class SequenceShape:
    """The properties of a task's samples that a model needs.

    classes: number of classes. length: tokens of the longest sequence. vocab_size: number of tokens, with 0 (padding).
    side: side of square images, whose tokens are gray levels; None for other data. towers: W.
    """

    classes: int
    length: int
    vocab_size: int = 256
    side: int | None = None
    towers: int = 1


class SequenceSource(Protocol):
    """A task's data: `prepare` makes or reads it (in one process per machine), and `split` opens a split of it.

    A source whose samples are not tokens yet also has `finish`, which turns a loader's batch into a SequenceBatch on
    the device.
    """

    @property
    def shape(self) -> SequenceShape: ...

    def describe(self) -> str: ...

    def prepare(self) -> None: ...

    def split(self, name: str) -> Samples: ...


class Sequences(NamedTuple):
    """tokens (T,) uint8: all sequences end to end; offsets (N * W + 1,) int64: where each begins, and the last ends;
    labels (N,) uint8."""

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray

    def part(self, begin: int, end: int) -> Sequences:
        """The samples from begin to end; the tokens are shared and not copied."""
        if not len(self.labels):
            return self
        width = (len(self.offsets) - 1) // len(self.labels)
        return Sequences(self.tokens, self.offsets[begin * width : end * width + 1], self.labels[begin:end])

    def chosen(self, samples: np.ndarray) -> Sequences:
        """A copy of these samples, in this order."""
        width = (len(self.offsets) - 1) // max(1, len(self.labels))
        rows = (samples[:, None] * width + np.arange(width)).ravel()
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        pieces = [self.tokens[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        tokens = np.concatenate(pieces) if pieces else self.tokens[:0]
        return Sequences(tokens, np.concatenate([[0], np.cumsum(lengths)]), self.labels[samples])


class SequenceSamples:
    """Sequences as samples (flashtrain.data.loader.Samples).

    If all sequences are `context` tokens long, batches have no `lengths`.

    Args:
        context: Sequences are cut to so many tokens.
        fixed: Pad every batch to `context` and not only to its longest sequence, for models compiled for one shape.
    """

    def __init__(self, sequences: Sequences, context: int, *, fixed: bool = False) -> None:
        self.sequences = sequences
        self.context = context
        self.fixed = fixed
        count = len(sequences.labels)
        self.width = (len(sequences.offsets) - 1) // max(1, count)
        self._lengths = np.minimum(np.diff(sequences.offsets), context).astype(np.int64)
        self.tokens = int(self._lengths.sum())
        self.all_full = bool((self._lengths == context).all())

    def __len__(self) -> int:
        return len(self.sequences.labels)

    def __getitem__(self, samples: list[int]) -> SequenceBatch:
        """The batch of these samples, in this order. Raises IndexError for a sample that does not exist."""
        numbers = np.asarray(samples, dtype=np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} of {len(self)}")
        rows = (numbers[:, None] * self.width + np.arange(self.width)).ravel()
        lengths = self._lengths[rows]
        longest = self.context if self.fixed or not len(rows) else int(lengths.max())
        padded = min(self.context, -(-longest // ROUNDED_TO) * ROUNDED_TO)
        tokens = np.full((len(rows), padded), PADDING, dtype=np.uint8)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            begin = self.sequences.offsets[row]
            tokens[place, :length] = self.sequences.tokens[begin : begin + length]
        shape = (len(numbers), padded) if self.width == 1 else (len(numbers), self.width, padded)
        labels = torch.from_numpy(self.sequences.labels[numbers].astype(np.int64))
        batch = SequenceBatch(tokens=torch.from_numpy(tokens).view(shape), labels=labels)
        if not self.all_full:
            # An empty sequence counts as one token of padding, so that every row has something to pool.
            batch["lengths"] = torch.from_numpy(lengths.clip(min=1)).view(shape[:-1])
        return batch


class SequenceDataModule(ResumableDataModule):
    """The LightningDataModule of a task's SequenceBatches.

    A run is one Lightning epoch of total_steps * accumulate micro-batches, as with TextDataModule. A checkpoint resumes
    with exactly the next sample, on any number of devices.

    Args:
        batch_size: B.
        total_steps: Optimizer steps of the run.
        accumulate: Micro-batches of a step.
        seed: Seed of the order of samples.
        validation_samples: Read only the first so many samples of the validation split, over all devices (None: all).
        evaluation_batch: B in validation and test (None: batch_size).
        num_workers: Processes that build batches, on each device; 0: the training process builds them.

    Raises:
        UserError: Arguments out of range.
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
        evaluation_batch: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, given in (("batch_size", batch_size), ("total_steps", total_steps), ("accumulate", accumulate)):
            at_least(name, given, 1)
        self.source = source
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.accumulate = accumulate
        self.seed = seed
        self.validation_samples = validation_samples
        self.evaluation_batch = evaluation_batch or batch_size
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        """Make or read the data. Lightning calls this in one process per machine."""
        self.source.prepare()

    @property
    def held_out_samples(self) -> int:
        """Samples of each validation, over all devices. Needs prepare_data()."""
        count, limit = len(self.source.split("validation")), self.validation_samples
        return count if limit is None else min(limit, count)

    def train_dataloader(self) -> ResumableLoader:
        """The run's micro-batches for this device, from the trainer's current step on."""
        return self._training(self.source.split("train"))

    def val_dataloader(self) -> DataLoader[Any]:
        """This device's share of the validation samples."""
        return self._once(self.source.split("validation"), self.validation_samples, self.evaluation_batch)

    def test_dataloader(self) -> DataLoader[Any]:
        """This device's share of the test samples."""
        return self._once(self.source.split("test"), None, self.evaluation_batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> SequenceBatch:
        """Finish the batch on the device (such as drawing images), if the source has `finish`."""
        finish = getattr(self.source, "finish", None)
        return batch if finish is None else finish(batch)
