"""Masked samples of their real lengths: one piece of text each, or two for next-sentence prediction.

T packed tokens, N sequences a row may hold, M labels it may have, B padded rows.

A sample is [CLS] piece [SEP], or [CLS] first [SEP] second [SEP]. Which tokens are masked follows from the seed, the
epoch and the sample alone: every epoch masks others, and a resumed run the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from flashtrain.data.keyed_random import hashed
from flashtrain.data.masking import MaskedBatch, mask_tokens, masked_count
from flashtrain.data.packing import IGNORED_LABEL
from flashtrain.data.pieces import Pieces
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError

PAIR_DRAW = 1  # keeps the draw of pairs apart from that of masked tokens
ROUNDED_TO = 8  # a padded row's width
EPOCHS_KEPT = 3


class Row(NamedTuple):
    """What a micro-batch is made of: sample numbers, and the step's labels and pairs for each micro-batch of it."""

    numbers: tuple[int, ...]
    label_count: float
    sentence_count: float


class EpochTable(NamedTuple):
    """An epoch's samples, all (n,) int64.

    first, second: their pieces, the second -1 where there is none. label: 0 follows, 1 does not, -100 single.
    lengths: tokens, [CLS] and [SEP] included. label_counts: masked tokens.
    """

    first: np.ndarray
    second: np.ndarray
    label: np.ndarray
    lengths: np.ndarray
    label_counts: np.ndarray


class MaskedSamples(Dataset[MaskedBatch]):
    """The samples of one split; indexed by a Row it gives one MaskedBatch. Sample e * len + i is sample i of epoch e.

    tokens: of which slices are read (token_cache.MappedTokens). pieces: see pieces.split_pieces. seed: of masks and
    pairs. share: of a sample's tokens that are masked. pairs: two neighbouring pieces of a document make a sample; in
    every epoch another random half of the second pieces change places, so that each piece is still used once. layout:
    "packed" rows of `budget` tokens, of at most `most` samples, as follows from the mean length, or "padded".
    Raises UserError: no pieces.
    """

    def __init__(
        self,
        tokens: Any,
        pieces: Pieces,
        special: SpecialTokens,
        *,
        budget: int,
        seed: int = 0,
        share: float = 0.15,
        pairs: bool = False,
        layout: str = "packed",
    ) -> None:
        if not len(pieces.begins):
            raise UserError("there is no text to make samples of.")
        self._tokens = tokens
        self.pieces = pieces
        self.special = special
        self.budget = budget
        self.seed = seed
        self.share = share
        self.pairs = pairs
        self.layout = layout
        self._neighbours = _neighbours(pieces, pairs)
        self._epochs: dict[int, EpochTable] = {}
        lengths = self.lengths(0)
        most = min(math.ceil(2 * budget / float(lengths.mean())), budget // int(lengths.min()))
        self.most = max(1, most)
        # At most what the budget has, and what rounding to one at least adds for each sample (of 3 tokens or more).
        self.most_labels = math.floor(share * budget + self.most * max(0.0, 1 - 3 * share, 0.5 - 2 * share)) + 1

    def __len__(self) -> int:
        """The samples of an epoch."""
        return len(self._neighbours[0])

    @property
    def tokens(self) -> int:
        """Of all pieces."""
        return int(self.pieces.lengths.sum())

    def lengths(self, epoch: int) -> np.ndarray:
        """(n,) int64: tokens of each sample of an epoch. With pairs epochs differ."""
        return self.epoch(epoch).lengths

    def epoch(self, epoch: int) -> EpochTable:
        """What the samples of an epoch are."""
        key = epoch if self.pairs else 0
        if key not in self._epochs:
            while len(self._epochs) >= EPOCHS_KEPT:
                del self._epochs[min(self._epochs)]
            first, second, label = self._neighbours
            if self.pairs:
                second, label = _exchanged(second, label, self.seed, epoch)
            sizes = np.append(self.pieces.lengths, -1)  # the last is what a second piece of -1 finds: no [SEP] either
            lengths = sizes[first] + sizes[second] + 3
            counts = masked_count(lengths - np.where(second < 0, 2, 3), self.share)
            self._epochs[key] = EpochTable(first, second, label, lengths, counts)
        return self._epochs[key]

    def row(self, numbers: Sequence[int]) -> Row:
        """These samples as a step of one micro-batch."""
        epochs, places = np.divmod(np.asarray(numbers, dtype=np.int64), len(self))
        labels = pairs = 0
        for epoch in np.unique(epochs):
            of_epoch = places[epochs == epoch]
            table = self.epoch(int(epoch))
            labels += int(table.label_counts[of_epoch].sum())
            pairs += int((table.label[of_epoch] >= 0).sum())
        return Row(tuple(int(number) for number in numbers), max(1.0, labels), max(1.0, pairs))

    def micro_batches(
        self, rows: Sequence[tuple[int, ...]], *, rank: int, world_size: int, batch_size: int = 1
    ) -> list[Row]:
        """One row each, with the step's labels for a row of it: row a * world_size + rank is micro-batch a's."""
        every = self.row([number for row in rows for number in row])
        return [
            Row(row, every.label_count / len(rows), every.sentence_count / len(rows)) for row in rows[rank::world_size]
        ]

    def __getitem__(self, row: Row) -> MaskedBatch:
        """The batch of a row's samples, in their order."""
        epochs, places = np.divmod(np.asarray(row.numbers, dtype=np.int64), len(self))
        samples = [self._sample(*at) for at in zip(epochs.tolist(), places.tolist(), strict=True)]
        nothing = np.empty(0, dtype=np.int64)
        lengths = np.array([len(tokens) for tokens, _, _ in samples], dtype=np.int64)
        of = np.repeat(np.arange(len(lengths)), lengths)
        tokens = np.concatenate([nothing, *(tokens for tokens, _, _ in samples)])
        keys = (self.seed, 0, epochs[of], places[of])
        masked = mask_tokens(tokens, of, self.special, keys=keys, share=self.share)

        packed = self.layout == "packed"
        width = -(-int(lengths.max(initial=1)) // ROUNDED_TO) * ROUNDED_TO
        shape = (self.budget,) if packed else (len(lengths), width)
        index, begins = np.arange(len(of)), lengths.cumsum() - lengths
        slots = index if packed else index - begins[of] + of * width  # where each token lies in the batch

        def laid_out(values: np.ndarray, filler: int) -> torch.Tensor:
            out = np.full(math.prod(shape), filler, dtype=np.int64)
            out[slots] = values
            return torch.from_numpy(out.reshape(shape))

        def filled(values: np.ndarray, size: int, filler: int) -> torch.Tensor:
            fill = size - len(values) if packed else 0
            return torch.from_numpy(np.pad(values, (0, fill), constant_values=filler))

        batch = MaskedBatch(
            tokens=laid_out(masked.tokens, self.special.pad),
            masked=filled(slots[masked.positions], self.most_labels, 0),
            labels=filled(masked.labels, self.most_labels, IGNORED_LABEL),
            label_count=torch.tensor(row.label_count, dtype=torch.float32),
            sequences=len(lengths),
            real_tokens=len(tokens),
            pairs=int((lengths * lengths).sum()),
            scored=len(masked.labels),
        )
        if packed:
            ends = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
            batch["cu_seqlens"] = filled(ends, self.most + 1, len(tokens))
        else:
            batch["lengths"] = torch.from_numpy(lengths)
        if self.pairs:
            following = np.array([follows for _, _, follows in samples], dtype=np.int64)
            batch["segments"] = laid_out(np.concatenate([nothing, *(kinds for _, kinds, _ in samples)]), 0)
            batch["next_sentence"] = filled(following, self.most, IGNORED_LABEL)
            batch["sentence_count"] = torch.tensor(row.sentence_count, dtype=torch.float32)
        return batch

    def _sample(self, epoch: int, place: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokens and segments of a sample; whether its second piece follows."""
        table = self.epoch(epoch)
        first, second = self._piece(table.first[place]), table.second[place]
        parts: list[Any] = [[self.special.classify], first, [self.special.separate]]
        kinds = np.zeros(len(first) + 2, dtype=np.int64)
        if second >= 0:
            parts += [self._piece(second), [self.special.separate]]
            kinds = np.concatenate((kinds, np.ones(len(parts[3]) + 1, dtype=np.int64)))
        return np.concatenate(parts).astype(np.int64), kinds, table.label[place]

    def _piece(self, piece: int) -> np.ndarray:
        return self._tokens[self.pieces.begins[piece] : self.pieces.ends[piece]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}}


def _neighbours(pieces: Pieces, pairs: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """first, second, label: every piece alone; or each document's pieces two by two, the odd last one alone."""
    index = np.arange(len(pieces.begins))
    if not pairs:
        return index, np.full(len(index), -1), np.full(len(index), IGNORED_LABEL)
    new = np.concatenate(([True], pieces.documents[1:] != pieces.documents[:-1]))
    place = index - np.maximum.accumulate(np.where(new, index, 0))
    first = index[place % 2 == 0]
    follows = np.append(~new[1:], False)[first]
    return first, np.where(follows, first + 1, -1), np.where(follows, 0, IGNORED_LABEL)


def _exchanged(second: np.ndarray, label: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """A random half of the second pieces each go to the next of them in random order: none stays where it was."""
    second, label = second.copy(), label.copy()
    paired = np.flatnonzero(second >= 0)
    chosen = paired[np.argsort(hashed(seed, PAIR_DRAW, epoch, paired), kind="stable")][: len(paired) // 2]
    if len(chosen) > 1:
        second[chosen] = np.roll(second[chosen], 1)
        label[chosen] = 1
    return second, label
