"""Documents with labels, as a classifier is trained and tested on them: sources of them, and batches.

L labels, B documents of a batch, T packed tokens, S tokens of the longest padded row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flashtrain.data.special_tokens import SpecialTokens
from flashtrain.errors import UserError, unknown

LAYOUTS = ("packed", "padded")


class LabelledDocuments(Protocol):
    """Documents by number; each has any of L labels."""

    label_names: tuple[str, ...]

    def __len__(self) -> int:
        """How many documents."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: the tokens of each."""
        ...

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Its tokens, (length,) integers, and its labels, (L,) bool."""
        ...


class TokenDocuments(NamedTuple):
    """LabelledDocuments in memory. tokens: all of them end to end; offsets (n + 1,); labels (n, L) bool."""

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    label_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64."""
        return np.diff(self.offsets)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of one."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]], self.labels[number]


class ClassificationBatch(TypedDict, total=False):
    """Documents between [CLS] and [SEP], cut to the context; the names are those of models.SequenceClassifier.loss.

    Packed: tokens (T,) int64 and cu_seqlens (B + 1,) int32; what follows the last end is [PAD] and counts nowhere.
    Padded: tokens (B, S) int64 and lengths (B,) int64. labels (B, L) int64, 0 and 1.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    labels: Tensor


class Measured(Protocol):
    """Documents of which the lengths are known: `lengths` (n,) int64."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray: ...


class CutSamples(Dataset[ClassificationBatch]):
    """What samples of documents share, whatever their labels: the checks, and how the rows of a batch are laid out.

    context: tokens of the longest sample, [CLS] and [SEP] included: of a longer document the first are read. Packed, a
    batch of B documents has B * context tokens, whatever their lengths, so that shapes stay the same.
    It goes with data.sampler and data.loader as PackedSamples does. UserError: no documents, a context below 3, an
    unknown layout.
    """

    def __init__(self, documents: Measured, special: SpecialTokens, context: int, layout: str) -> None:
        if context < 3:
            raise UserError(f"context={context} must be at least 3: a token, [CLS] and [SEP].")
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        if not len(documents):
            raise UserError("there are no labelled documents.")
        self.special = special
        self.context = context
        self.layout = layout
        self.tokens = int(np.minimum(documents.lengths, context - 2).sum())
        self._count = len(documents)

    def __len__(self) -> int:
        return self._count

    def _batch(self, rows: Sequence[np.ndarray], labels: Tensor) -> ClassificationBatch:
        """The batch of these rows of tokens, [CLS] and [SEP] included."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        batch = ClassificationBatch(tokens=self._laid_out(rows, self.special.pad), labels=labels)
        if self.layout == "packed":
            batch["cu_seqlens"] = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))
        else:
            batch["lengths"] = torch.from_numpy(lengths)
        return batch

    def _laid_out(self, rows: Sequence[np.ndarray], filler: int) -> Tensor:
        """Rows of whole numbers end to end and filled up to (B * context,), or below one another (B, S); int64."""
        flat = np.concatenate(rows).astype(np.int64)
        if self.layout == "packed":
            fill = len(rows) * self.context - len(flat)
            return torch.from_numpy(np.pad(flat, (0, fill), constant_values=filler))
        lengths = np.array([len(row) for row in rows])
        padded = np.full((len(rows), int(lengths.max())), filler, dtype=np.int64)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
        return torch.from_numpy(padded)


class LabelledSamples(CutSamples):
    """LabelledDocuments as samples; indexed by a sequence of their numbers it gives one ClassificationBatch.

    context, layout, errors: see CutSamples.
    """

    def __init__(
        self, documents: LabelledDocuments, special: SpecialTokens, context: int, *, layout: str = "packed"
    ) -> None:
        super().__init__(documents, special, context, layout)
        self.documents = documents

    def __getitem__(self, numbers: Sequence[int]) -> ClassificationBatch:
        """The batch of these documents, in this order."""
        rows, labels = [], []
        for number in numbers:
            tokens, marks = self.documents.document(int(number))
            kept = tokens[: self.context - 2]
            rows.append(np.concatenate(([self.special.classify], kept, [self.special.separate])))
            labels.append(marks)
        return self._batch(rows, torch.from_numpy(np.array(labels).astype(np.int64)))
