"""Labelled documents and batches of them, for training and testing classifiers.

L labels, B documents of a batch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flashtrain.data.wordpiece import SpecialTokens
from flashtrain_kernels.loss_head import IGNORED


class LabelledDocuments(Protocol):
    """Labelled documents, numbered from 0: each has any number of the L labels, or each of its
    tokens has at most one."""

    label_names: tuple[str, ...]

    def __len__(self) -> int:
        """The number of documents."""

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens of each document."""

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and labels of a document.

        Returns:
            The tokens, (length,) integers; and the labels: (L,) bool, true for the document's
            labels, or (length,) integers, the label number of each token, -100 for none.
        """


@dataclass
class LabelledTexts:
    """LabelledDocuments held in memory; `tokens` and `labels` have an array for each document."""

    tokens: Sequence[np.ndarray]
    labels: Sequence[np.ndarray]
    label_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens of each document."""
        return np.array([len(tokens) for tokens in self.tokens], dtype=np.int64)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and labels of a document."""
        return self.tokens[number], self.labels[number]


class ClassificationBatch(TypedDict):
    """A batch of documents, [CLS] tokens [SEP], with labels: arguments of
    SequenceClassifier.loss, and counts."""

    tokens: Tensor  # (T,) int64, filled up with [PAD], which is not scored
    cu_seqlens: Tensor  # (B + 1,) int32: 0, then the end of each document
    # (B, L) int64, 0 or 1; labels of words have the shape of `tokens`, -100 for none.
    labels: Tensor
    sequences: int  # B
    real_tokens: int  # without [PAD]
    pairs: int  # the sum of squared lengths


@dataclass(eq=False)
class LabelledSamples(Dataset[ClassificationBatch]):
    """A Dataset of LabelledDocuments: indexed by a sequence of document numbers, it returns
    a ClassificationBatch."""

    documents: LabelledDocuments  # of one split
    special: SpecialTokens
    context: int  # tokens of the longest sample, with [CLS] and [SEP]; longer documents are cut
    of_words: bool = False  # whether tokens, and not whole documents, have labels

    def __post_init__(self) -> None:
        self.tokens = int(np.minimum(self.documents.lengths, self.context - 2).sum())

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, numbers: Sequence[int]) -> ClassificationBatch:
        """Return the batch of these documents, in this order."""
        rows, labels = [], []
        for number in numbers:
            tokens, marks = self.documents.document(int(number))
            rows.append(self._between(tokens, self.special.classify, self.special.separate))
            labels.append(self._between(marks, IGNORED, IGNORED) if self.of_words else marks)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        learnt = (
            self._packed(labels, IGNORED)
            if self.of_words
            else torch.from_numpy(np.array(labels)).long()
        )
        return ClassificationBatch(
            tokens=self._packed(rows, self.special.pad),
            cu_seqlens=torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32)),
            labels=learnt,
            sequences=len(rows),
            real_tokens=int(lengths.sum()),
            pairs=int((lengths * lengths).sum()),
        )

    def _between(self, values: np.ndarray, first: int, last: int) -> np.ndarray:
        return np.concatenate(
            ([first], values[: self.context - 2], [last]), dtype=np.int64, casting="unsafe"
        )

    def _packed(self, rows: Sequence[np.ndarray], filler: int) -> Tensor:
        """Return the rows of integers end to end, int64, filled up to (B * context,) with `filler`,
        so that shapes stay the same."""
        flat = np.concatenate(rows)
        return torch.from_numpy(
            np.pad(flat, (0, len(rows) * self.context - len(flat)), constant_values=filler)
        )
