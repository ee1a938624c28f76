"""Labelled sequences in memory, and batches of them for a classifier.

N samples, W sequences of a sample (1, or 2 of a pair), T tokens in all, B samples of a batch,
S the longest of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flashtrain.data.sequences import SequenceBatch

PADDING = 0
ROUNDED_TO = 64  # a batch is padded to a multiple of so many tokens, so that few shapes occur


class Sequences(NamedTuple):
    """The sequences of a split, end to end in one array, with their labels."""

    tokens: np.ndarray  # (T,) uint8, all sequences end to end
    offsets: np.ndarray  # (N * W + 1,) int64, where each sequence begins, and the last one ends
    labels: np.ndarray  # (N,) uint8

    def chosen(self, samples: np.ndarray) -> Sequences:
        """Return a copy of the samples with these numbers, in this order."""
        width = (len(self.offsets) - 1) // max(1, len(self.labels))
        rows = (samples[:, None] * width + np.arange(width)).ravel()
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        pieces = [self.tokens[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        tokens = np.concatenate(pieces) if pieces else self.tokens[:0]
        return Sequences(tokens, np.concatenate([[0], np.cumsum(lengths)]), self.labels[samples])


class SequenceSamples:
    """Sequences as a dataset of samples (flashtrain.data.loader.Samples).

    If all sequences are `context` tokens long, batches have no `lengths`.

    Args:
        sequences: The split's sequences.
        context: Sequences are cut to this many tokens.
        fixed: Pad every batch to `context` and not only to its longest sequence, for models
            compiled for one shape.
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
        """Return the batch of the samples with these numbers, in this order."""
        numbers = np.asarray(samples, dtype=np.int64)
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
            # An empty sequence counts as one token of padding, so that every row
            # has something to pool.
            batch["lengths"] = torch.from_numpy(lengths.clip(min=1)).view(shape[:-1])
        return batch
