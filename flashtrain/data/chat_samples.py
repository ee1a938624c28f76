"""Packed rows of whole conversations, with labels on the tokens to learn.

B rows of the micro-batch on this device, S sequence (the context length in tokens).

A row holds documents end to end and is padded after the last. Which documents the rows of a step hold follows from the
documents' lengths alone (token_budget.TokenBudgetPlan), so that every device knows the rows of all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from flashtrain.data.balance import Cost
from flashtrain.data.packing import IGNORED_LABEL, ChatBatch
from flashtrain.data.token_cache import LABELLED, OpenTokens

# All tokens of a row are computed, padding too: rows differ only in the pairs that attention computes.
COST = Cost(per_token=0.0, per_pair=1.0)
MARKS_CHUNK = 2**22  # marks that are counted at once


class MicroBatch(NamedTuple):
    """The rows of a batch."""

    rows: tuple[tuple[int, ...], ...]  # the document numbers of each row
    weight: float  # see ChatBatch
    label_count: int  # see ChatBatch


class ChatDocuments(NamedTuple):
    """Documents as ranges of the token file, cut to the context; all fields are (n,) int64."""

    begins: np.ndarray
    lengths: np.ndarray
    label_counts: np.ndarray

    def chosen(self, which: np.ndarray) -> ChatDocuments:
        """Return the documents at these indices, or where this mask is true."""
        return ChatDocuments(*(values[which] for values in self))


@dataclass(eq=False)
class ChatSamples(Dataset[ChatBatch]):
    """Documents with labels as samples; indexed by a MicroBatch, it returns a ChatBatch.

    Sample e * len + i is document i in epoch e.

    Args:
        cache: The token file and its marks.
        documents: The documents of one split in it.
        context: S.
        document_mask: See packing.PackedSamples.
        shared: Whether devices share each sequence (context parallelism), so that their loss is the mean over all
            labels of all devices.
    """

    cache: InitVar[OpenTokens]
    documents: ChatDocuments
    context: int
    document_mask: bool = True
    shared: bool = False

    def __post_init__(self, cache: OpenTokens) -> None:
        self._files = cache.tokens, cache.marks
        self.filler = cache.tokenizer.end_of_text

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents.begins)

    @property
    def tokens(self) -> int:
        """Tokens of all documents within the context."""
        return int(self.documents.lengths.sum())

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens of each document within the context."""
        return self.documents.lengths

    def micro_batches(
        self, rows: Sequence[tuple[int, ...]], *, rank: int, world_size: int, batch_size: int
    ) -> list[MicroBatch]:
        """List this device's micro-batches of a step of these rows.

        Rows are sorted by cost and assigned to devices in zigzag order, so that within a micro-batch all devices have
        about as much to compute, and no device has the most in every one.

        Args:
            rows: The document numbers of each row of the step.
            batch_size: Rows of a micro-batch on each device.
        """
        labels = np.array([self._labels(row) for row in rows])
        costs = np.array([COST.of(self._lengths(row)).sum() for row in rows])
        rounds = np.argsort(-costs, kind="stable").reshape(-1, world_size)
        rounds[1::2] = rounds[1::2, ::-1]
        found = []
        for begin in range(0, len(rounds), batch_size):
            of_all = rounds[begin : begin + batch_size]
            mine = of_all[:, rank]
            # The micro-batch's loss is the mean over these labels: this device's, or all devices' (see `shared`).
            count = int(labels[of_all].sum() if self.shared else labels[mine].sum())
            means = len(rounds) // batch_size * (1 if self.shared else world_size)
            chosen = tuple(rows[place] for place in mine)
            found.append(MicroBatch(chosen, count * means / max(1, int(labels.sum())), count))
        return found

    def __getitem__(self, micro_batch: MicroBatch) -> ChatBatch:
        """The batch of these rows."""
        shape = (len(micro_batch.rows), self.context)
        tokens = np.full(shape, self.filler, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int32)
        positions = np.tile(np.arange(self.context, dtype=np.int32), (shape[0], 1))
        for row, numbers in enumerate(micro_batch.rows):
            begin = 0
            for place, number in enumerate(numbers):
                ids, marks = self._document(number % len(self))
                end = begin + len(ids)
                tokens[row, begin:end] = ids
                # A document's first token follows no other, so it is never a label.
                labels[row, begin : end - 1] = np.where(marks[1:] & LABELLED, ids[1:], IGNORED_LABEL)
                documents[row, begin:end] = place
                if self.document_mask:
                    positions[row, begin:end] -= begin
                begin = end
            documents[row, begin:] = len(numbers)  # the padding is a document of its own
            if self.document_mask:
                positions[row, begin:] -= begin
        if micro_batch.label_count == 0:
            labels[0, 0] = self.filler  # a mean over no labels is NaN; this label's loss has weight 0
        return ChatBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
            weight=micro_batch.weight,
            label_count=micro_batch.label_count,
        )

    def _lengths(self, row: Sequence[int]) -> np.ndarray:
        return self.documents.lengths[np.asarray(row, dtype=np.int64) % len(self)]

    def _labels(self, row: Sequence[int]) -> int:
        return int(self.documents.label_counts[np.asarray(row, dtype=np.int64) % len(self)].sum())

    def _document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        begin, length, _ = (int(values[number]) for values in self.documents)
        ids, marks = (values[begin : begin + length] for values in self._files)
        return ids.astype(np.int64), marks


def label_counts(marks: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Count the labelled tokens of each document after its first token, reading some MiB at a time.

    Args:
        marks: The marks of all tokens (token_cache).
        begins: (n,) int64, index of each document's first token.
        lengths: (n,) int64, tokens of each document.

    Returns:
        (n,) int64.
    """
    counts = np.zeros(len(begins), dtype=np.int64)
    ends = begins + lengths
    first = 0
    while first < len(begins):
        last = max(first + 1, int(np.searchsorted(ends, begins[first] + MARKS_CHUNK, side="right")))
        base = begins[first]
        sums = np.concatenate(([0], np.cumsum(marks[base : ends[last - 1]] & LABELLED, dtype=np.int64)))
        counts[first:last] = sums[ends[first:last] - base] - sums[begins[first:last] + 1 - base]
        first = last
    return counts
