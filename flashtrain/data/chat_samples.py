"""Packed rows of whole conversations, with labels on the tokens to learn.

B rows of the micro-batch on this device, S sequence (the context length in tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from flashtrain.data.balance import Cost
from flashtrain.data.packing import ChatBatch, packed_batch
from flashtrain.data.token_cache import LABELLED, OpenTokens
from flashtrain_kernels.loss_head import IGNORED

# All tokens of a row are computed, padding too: rows differ only in the pairs
# that attention computes.
COST = Cost(per_token=0.0, per_pair=1.0)


class MicroBatch(NamedTuple):
    """A micro-batch of conversations: which documents its rows hold."""

    rows: tuple[tuple[int, ...], ...]  # the document numbers of each row
    weight: float  # see ChatBatch
    label_count: int  # see ChatBatch


class ChatDocuments(NamedTuple):
    """Documents, cut to the context: for each its first token in the token file, its tokens and its
    labels, (n,) int64 each."""

    begins: np.ndarray
    lengths: np.ndarray
    label_counts: np.ndarray

    def chosen(self, which: np.ndarray) -> ChatDocuments:
        """Return the documents at the indices `which`, or where `which` is true."""
        return ChatDocuments(*(values[which] for values in self))


@dataclass(eq=False)
class ChatSamples(Dataset[ChatBatch]):
    """A Dataset of conversations' documents with labels: indexed by a MicroBatch,
    it returns a ChatBatch.

    In a MicroBatch, the number e * len(self) + i stands for document i in epoch e.
    """

    cache: InitVar[OpenTokens]
    documents: ChatDocuments  # of one split
    context: int  # S
    document_mask: bool = True  # see packing.PackedSamples
    # Whether devices share each sequence (context parallelism), so that their loss is the mean over
    # all labels of all devices.
    shared: bool = False

    def __post_init__(self, cache: OpenTokens) -> None:
        self._tokens, self._marks = cache.tokens, cache.marks
        self.filler = cache.tokenizer.end_of_text
        # (n,) int64: tokens of each document (a conversation, or a part of one), once it is cut.
        self.lengths = self.documents.lengths
        self.tokens = int(self.lengths.sum())  # of all documents

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents.begins)

    def micro_batches(
        self, rows: Sequence[tuple[int, ...]], *, rank: int, world_size: int, batch_size: int
    ) -> list[MicroBatch]:
        """Assign the rows of a step to devices and micro-batches, and return this
        device's micro-batches.

        Rows are sorted by cost and assigned to devices in zigzag order, so that
        within a micro-batch all devices have about as much to compute, and no device
        has the most in every one.

        Args:
            rows: For each row of the step the numbers of its documents.
            rank, world_size: This device's number, from 0, and the number of data-parallel devices.
            batch_size: Rows of a micro-batch on each device.
        """
        numbers = [np.asarray(row, dtype=np.int64) % len(self) for row in rows]
        labels = np.array([int(self.documents.label_counts[row].sum()) for row in numbers])
        costs = np.array([COST.of(self.lengths[row]).sum() for row in numbers])
        rounds = np.argsort(-costs, kind="stable").reshape(-1, world_size)
        rounds[1::2] = rounds[1::2, ::-1]
        found = []
        for begin in range(0, len(rounds), batch_size):
            of_all = rounds[begin : begin + batch_size]
            mine = of_all[:, rank]
            # The micro-batch's loss is the mean over these labels: this device's, or all
            # devices' (see `shared`).
            count = int(labels[of_all].sum() if self.shared else labels[mine].sum())
            means = len(rounds) // batch_size * (1 if self.shared else world_size)
            chosen = tuple(rows[place] for place in mine)
            found.append(MicroBatch(chosen, count * means / max(1, int(labels.sum())), count))
        return found

    def __getitem__(self, micro_batch: MicroBatch) -> ChatBatch:
        """Return the packed batch of a micro-batch's rows."""
        count = len(micro_batch.rows)
        window = np.full((count, self.context + 1), self.filler, dtype=np.int64)
        learnt = np.zeros((count, self.context), dtype=bool)
        ends: list[list[int]] = [[] for _ in range(count)]
        for row, numbers in enumerate(micro_batch.rows):
            begin = 0
            for number in numbers:
                first, length, _ = (int(one[number % len(self)]) for one in self.documents)
                own, end = slice(first, first + length), begin + length
                window[row, begin:end] = self._tokens[own]
                # A document's first token follows no other, so it is never a label.
                learnt[row, begin : end - 1] = self._marks[own][1:] & LABELLED
                ends[row].append(end)
                begin = end
        # What fills a row up is a document of its own.
        batch = packed_batch(
            window, [np.array(of_row, dtype=np.int64) for of_row in ends], self.document_mask
        )
        batch["labels"][torch.from_numpy(~learnt)] = IGNORED
        if micro_batch.label_count == 0:
            # A mean over no labels is NaN; this label's loss has weight 0.
            batch["labels"][0, 0] = self.filler
        return ChatBatch(**batch, weight=micro_batch.weight, label_count=micro_batch.label_count)


def label_counts(marks: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Count the labelled tokens of each document after its first token.

    Args:
        marks: The marks of all tokens, uint8 (token_cache): bit LABELLED is set on labelled ones.
        begins: (n,) int64, index of each document's first token.
        lengths: (n,) int64, tokens of each document.

    Returns:
        (n,) int64, the number of each document's labels.
    """
    # Of what is counted, and of what lies between.
    edges = np.stack((begins + 1, begins + lengths), axis=1).ravel()
    counts = np.add.reduceat(np.append(marks & LABELLED, np.uint8(0)), edges, dtype=np.int64)[::2]
    return np.where(lengths > 1, counts, 0)
