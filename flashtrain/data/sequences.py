"""Labelled sequences: what a step receives, samples by number, the source that a task offers, and the data module.

The tasks of the Long Range Arena (Tay et al. 2021) are such sources. A task's data knows nothing of models.

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


class SequenceBatch(TypedDict, total=False):
    """tokens (B, S), or (B, 2, S) where a sample is two sequences: uint8 grey levels, or token numbers, 0 for padding.

    labels (B,) int64. lengths (B,) or (B, 2) int64: tokens before the padding; absent where all are S long.
    """

    tokens: Tensor
    labels: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class SequenceShape:
    """What a model needs to know of a task's samples.

    classes: answers. length: tokens of the longest sequence. vocab_size: token numbers, 0 (padding) included. side: of
    square images, whose tokens are grey levels; None for others. towers: sequences of a sample.
    """

    classes: int
    length: int
    vocab_size: int = 256
    side: int | None = None
    towers: int = 1


class SequenceSource(Protocol):
    """A task's data: `prepare` makes or reads it (in one process a machine), and `split` opens a part of it.

    One whose samples are not tokens yet also has `finish`, which turns what a loader handed over, on the device by now,
    into a SequenceBatch.
    """

    @property
    def shape(self) -> SequenceShape: ...

    def describe(self) -> str: ...

    def prepare(self) -> None: ...

    def split(self, name: str) -> Samples: ...


PADDING = 0
ROUNDED_TO = 64  # a batch is padded to a multiple of so many tokens, so that few shapes occur


class Sequences(NamedTuple):
    """tokens (T,) uint8, one sequence after another; offsets (N * W + 1,) int64, where each begins, and the end;
    labels (N,) uint8."""

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray

    def part(self, begin: int, end: int) -> Sequences:
        """Samples begin to end; what is not read is shared."""
        if not len(self.labels):
            return self
        width = (len(self.offsets) - 1) // len(self.labels)
        return Sequences(self.tokens, self.offsets[begin * width : end * width + 1], self.labels[begin:end])

    def chosen(self, samples: np.ndarray) -> Sequences:
        """These samples, in this order, copied."""
        width = (len(self.offsets) - 1) // max(1, len(self.labels))
        rows = (samples[:, None] * width + np.arange(width)).ravel()
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        pieces = [self.tokens[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        tokens = np.concatenate(pieces) if pieces else self.tokens[:0]
        return Sequences(tokens, np.concatenate([[0], np.cumsum(lengths)]), self.labels[samples])


class SequenceSamples:
    """Batches of Sequences by their numbers (what flashtrain.data.loader calls Samples).

    context: sequences are cut to so many tokens. fixed: pad every batch to `context`, for programs that are compiled
    for one shape, and not only to its longest. Rows that are all `context` long come without `lengths`.
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
        """The batch of these samples, in this order. Raises IndexError for one that does not exist."""
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
            # An empty sequence is one token of padding: every row has something to pool.
            batch["lengths"] = torch.from_numpy(lengths.clip(min=1)).view(shape[:-1])
        return batch


class SequenceDataModule(ResumableDataModule):
    """SequenceBatches of a task.

    source: the task's data. batch_size: B. total_steps, accumulate: optimiser steps of the run, micro-batches of each.
    seed: of the order of samples. validation_samples: the first so many of that split, over all devices (None: all).
    evaluation_batch: B where nothing is trained (None: batch_size). num_workers: processes that build
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
        """Make or read what is missing. Lightning calls this in one process a machine."""
        self.source.prepare()

    @property
    def held_out_samples(self) -> int:
        """Samples of each validation, over all devices. Needs prepare_data()."""
        count, limit = len(self.source.split("validation")), self.validation_samples
        return count if limit is None else min(limit, count)

    def train_dataloader(self) -> ResumableLoader:
        """The run's micro-batches for this device, from the step that the trainer stands at."""
        return self._training(self.source.split("train"))

    def val_dataloader(self) -> DataLoader[Any]:
        """This device's share of the validation samples."""
        return self._once(self.source.split("validation"), self.validation_samples, self.evaluation_batch)

    def test_dataloader(self) -> DataLoader[Any]:
        """This device's share of the test samples."""
        return self._once(self.source.split("test"), None, self.evaluation_batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> SequenceBatch:
        """What is left to do on the device, such as drawing."""
        finish = getattr(self.source, "finish", None)
        return batch if finish is None else finish(batch)
