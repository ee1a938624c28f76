"""Labelled documents and batches of them, for training and testing classifiers.

L labels, B documents of a batch, T packed tokens, S tokens of the longest padded row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flashtrain.data.packing import IGNORED_LABEL
from flashtrain.data.wordpiece import SpecialTokens


class LabelledDocuments(Protocol):
    """Documents by number. Each has any of L labels, or a label at some of its tokens."""

    label_names: tuple[str, ...]

    def __len__(self) -> int:
        """The number of documents."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens of each document."""
        ...

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Its tokens, (length,) integers, and its labels: (L,) bool, or (length,) label numbers, -100 for none."""
        ...


class LabelledTexts:
    """LabelledDocuments in memory."""

    def __init__(
        self, tokens: Sequence[np.ndarray], labels: Sequence[np.ndarray], label_names: tuple[str, ...]
    ) -> None:
        self.tokens, self.labels, self.label_names = tokens, labels, label_names

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64."""
        return np.array([len(tokens) for tokens in self.tokens], dtype=np.int64)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of a document."""
        return self.tokens[number], self.labels[number]


class ClassificationBatch(TypedDict, total=False):
    """Documents between [CLS] and [SEP], cut to the context, as arguments of models.SequenceClassifier.loss.

    Packed: tokens (T,) int64 and cu_seqlens (B + 1,) int32; tokens after the last end are [PAD], which is not scored.
    Padded: tokens (B, S) int64 and lengths (B,) int64. labels: (B, L) int64, 0 or 1; labels of words have the shape of
    `tokens`, -100 for none. Plain numbers on the host: sequences, real_tokens, pairs (the sum of squared lengths).
    """

    tokens: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    labels: Tensor
    sequences: int
    real_tokens: int
    pairs: int


class LabelledSamples(Dataset[ClassificationBatch]):
    """LabelledDocuments as samples; indexed by a sequence of document numbers, it returns one ClassificationBatch.

    Args:
        context: Tokens of the longest sample, with [CLS] and [SEP]; longer documents are cut.
        layout: "packed" or "padded". A packed batch of B documents always has B * context tokens, so that shapes stay
            the same.
        of_words: Whether tokens have labels, and not documents.
    """

    def __init__(
        self,
        documents: LabelledDocuments,
        special: SpecialTokens,
        context: int,
        *,
        layout: str = "packed",
        of_words: bool = False,
    ) -> None:
        self.documents = documents
        self.special = special
        self.context = context
        self.layout = layout
        self.of_words = of_words
        self.tokens = int(np.minimum(documents.lengths, context - 2).sum())

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, numbers: Sequence[int]) -> ClassificationBatch:
        """The batch of these documents, in this order."""
        rows, labels = [], []
        for number in numbers:
            tokens, marks = self.documents.document(int(number))
            rows.append(self._between(tokens, self.special.classify, self.special.separate))
            labels.append(self._between(marks, IGNORED_LABEL, IGNORED_LABEL) if self.of_words else marks)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        batch = ClassificationBatch(
            tokens=self._laid_out(rows, self.special.pad),
            labels=self._laid_out(labels, IGNORED_LABEL)
            if self.of_words
            else torch.from_numpy(np.array(labels).astype(np.int64)),
            sequences=len(rows),
            real_tokens=int(lengths.sum()),
            pairs=int((lengths * lengths).sum()),
        )
        if self.layout == "packed":
            batch["cu_seqlens"] = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))
        else:
            batch["lengths"] = torch.from_numpy(lengths)
        return batch

    def _between(self, values: np.ndarray, first: int, last: int) -> np.ndarray:
        return np.concatenate(([first], values[: self.context - 2], [last]), dtype=np.int64, casting="unsafe")

    def _laid_out(self, rows: Sequence[np.ndarray], filler: int) -> Tensor:
        """Rows of integers end to end and padded to (B * context,), or as a padded matrix (B, S); int64."""
        flat = np.concatenate(rows)
        if self.layout == "packed":
            fill = len(rows) * self.context - len(flat)
            return torch.from_numpy(np.pad(flat, (0, fill), constant_values=filler))
        lengths = np.array([len(row) for row in rows])
        padded = np.full((len(rows), int(lengths.max())), filler, dtype=np.int64)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
        return torch.from_numpy(padded)
