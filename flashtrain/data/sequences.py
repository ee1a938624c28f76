"""Data of sequence classification: the interface of sources of labelled sequences, and
their LightningDataModule.

W sequences of a sample (1, or 2 for pairs), B samples of a batch (the micro-batch on this device),
S tokens of the longest sequence in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from torch import Tensor
from torch.utils.data import DataLoader

from flashtrain.data.datamodule import ResumableDataModule
from flashtrain.data.loader import ResumableLoader, Samples


class SequenceBatch(TypedDict, total=False):
    """A batch of labelled sequences."""

    # (B, S), or (B, 2, S) of pairs, uint8 gray levels or token numbers, 0 for padding.
    tokens: Tensor
    labels: Tensor  # (B,) int64
    lengths: Tensor  # (B,) or (B, 2) int64, tokens before the padding; absent if all have length S


@dataclass(frozen=True)
class SequenceShape:
    """The properties of a task's samples that a model needs: classes, length, vocabulary,
    image side, sequences."""

    classes: int
    length: int  # tokens of the longest sequence
    vocab_size: int = 256  # number of tokens, with 0 (padding)
    side: int | None = None  # of square images, whose tokens are gray levels; None for other data
    towers: int = 1  # W


class SequenceSource(Protocol):
    """Interface of the data of a sequence-classification task.

    If its samples are not tokens yet, a source also has `finish`, a method that turns a loader's
    batch into a SequenceBatch on the device.
    """

    @property
    def shape(self) -> SequenceShape: ...

    def describe(self) -> str: ...

    def prepare(self) -> None:
        """Make or read the data. Called in one process per machine."""

    def split(self, name: str) -> Samples:
        """Open the split "train", "validation" or "test"."""


class SequenceDataModule(ResumableDataModule):
    """The LightningDataModule of a sequence-classification task. Its batches are SequenceBatches.

    Args:
        source: The task's data.
        batch_size: B, samples of a micro-batch on each device.
        validation_samples: Number of samples, the first of the validation split, that all
            devices read (None: all).
        evaluation_batch: Samples of a micro-batch in validation and test (None: batch_size).
        **run: total_steps, accumulate, seed and num_workers: see ResumableDataModule.

    Raises:
        UserError: Arguments out of range.
    """

    def __init__(
        self,
        source: SequenceSource,
        batch_size: int = 32,
        *,
        validation_samples: int | None = None,
        evaluation_batch: int | None = None,
        **run: int,
    ) -> None:
        super().__init__(batch_size, **run)
        self.source = source
        self.validation_samples = validation_samples
        self.evaluation_batch = evaluation_batch or batch_size

    def prepare_data(self) -> None:
        """Make or read the data. Lightning calls this in one process per machine."""
        self.source.prepare()

    @property
    def held_out_samples(self) -> int:
        """The number of samples that each validation reads, over all devices.
        Needs prepare_data()."""
        count, limit = len(self.source.split("validation")), self.validation_samples
        return count if limit is None else min(limit, count)

    def train_dataloader(self) -> ResumableLoader:
        """Return the run's micro-batches for this device, from the trainer's current step on."""
        return self._training(self.source.split("train"))

    def val_dataloader(self) -> DataLoader[Any]:
        """Return this device's part of the validation samples."""
        return self._once(
            self.source.split("validation"), self.validation_samples, self.evaluation_batch
        )

    def test_dataloader(self) -> DataLoader[Any]:
        """Return this device's part of the test samples."""
        return self._once(self.source.split("test"), None, self.evaluation_batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> SequenceBatch:
        """Apply the source's `finish` to the batch on the device (for example, draw images),
        if it has that method."""
        finish = getattr(self.source, "finish", None)
        return batch if finish is None else finish(batch)
