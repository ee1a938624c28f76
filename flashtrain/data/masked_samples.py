"""Masked samples of their real lengths: one piece of text each, or two for next-sentence prediction.

T packed tokens, N sequences a row may hold, M labels it may have, B padded rows.

A sample is [CLS] piece [SEP], or [CLS] first [SEP] second [SEP]. Which tokens are masked follows from the seed, the
epoch and the sample alone: every epoch masks others, and a resumed run the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from flashtrain.data.keyed_random import hashed
from flashtrain.data.masking import MaskedBatch, mask_tokens, masked_count
from flashtrain.data.packing import IGNORED_LABEL, Mappable
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

    tokens_path, dtype: the token file. pieces: see pieces.split_pieces. seed: of masks and pairs. share: of a sample's
    tokens that are masked. pairs: two neighbouring pieces of a document make a sample; in every epoch another random
    half of the second pieces change places, so that each piece is still used once. layout: "packed" rows of `budget`
    tokens, of at most `most` samples, as follows from the mean length, or "padded".
    Raises UserError: no pieces.

    Cheap to send to worker processes: the file is memory-mapped where it is first read.
    """

    def __init__(
        self,
        tokens_path: str | os.PathLike[str] | Mappable,
        dtype: str,
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
        self.tokens_path = Path(tokens_path) if isinstance(tokens_path, str | os.PathLike) else tokens_path
        self.dtype = dtype
        self.pieces = pieces
        self.special = special
        self.budget = budget
        self.seed = seed
        self.share = share
        self.pairs = pairs
        self.layout = layout
        self._neighbours = _neighbours(pieces, pairs)
        self._epochs: dict[int, EpochTable] = {}
        self._tokens: np.ndarray | None = None
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
        numbers = np.asarray(row.numbers, dtype=np.int64)
        epochs, places = np.divmod(numbers, len(self))
        parts, segments, lengths, following = self._assembled(epochs, places)
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        of = np.repeat(np.arange(len(lengths)), lengths)
        keys = (self.seed, 0, epochs[of], places[of])
        masked = mask_tokens(tokens, of, self.special, keys=keys, share=self.share)
        batch = MaskedBatch(
            label_count=torch.tensor(row.label_count, dtype=torch.float32),
            sequences=len(lengths),
            real_tokens=int(lengths.sum()),
            pairs=int((lengths * lengths).sum()),
            scored=len(masked.labels),
        )
        if self.layout == "packed":
            self._pack(batch, masked.tokens, lengths, masked.positions, masked.labels)
        else:
            self._pad(batch, masked.tokens, lengths, masked.positions, masked.labels)
        if self.pairs:
            flat = np.concatenate(segments) if segments else np.empty(0, dtype=np.int64)
            batch["segments"] = self._laid_out(flat, lengths, 0)
            fill = self.most - len(lengths) if self.layout == "packed" else 0
            batch["next_sentence"] = torch.from_numpy(np.pad(following, (0, fill), constant_values=IGNORED_LABEL))
            batch["sentence_count"] = torch.tensor(row.sentence_count, dtype=torch.float32)
        return batch

    def _assembled(
        self, epochs: np.ndarray, places: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, np.ndarray]:
        """Tokens and segments of each sample; lengths (n,); whether its second piece follows (n,)."""
        parts, segments, following = [], [], []
        classify, separate = (np.array([token], dtype=np.int64) for token in self.special[1:3])
        for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True):
            table = self.epoch(epoch)
            first, second = self._piece(table.first[place]), table.second[place]
            pieces = [classify, first, separate]
            kinds = np.zeros(len(first) + 2, dtype=np.int64)
            if second >= 0:
                other = self._piece(second)
                pieces += [other, separate]
                kinds = np.concatenate((kinds, np.ones(len(other) + 1, dtype=np.int64)))
            parts.append(np.concatenate(pieces))
            segments.append(kinds)
            following.append(table.label[place])
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return parts, segments, lengths, np.array(following, dtype=np.int64)

    def _pack(
        self, batch: MaskedBatch, tokens: np.ndarray, lengths: np.ndarray, positions: np.ndarray, labels: np.ndarray
    ) -> None:
        ends = np.full(self.most + 1, lengths.sum(), dtype=np.int32)
        ends[: len(lengths) + 1] = np.concatenate(([0], lengths.cumsum()))
        fill = self.most_labels - len(labels)
        batch["tokens"] = self._laid_out(tokens, lengths, self.special.pad)
        batch["cu_seqlens"] = torch.from_numpy(ends)
        batch["masked"] = torch.from_numpy(np.pad(positions, (0, fill)))
        batch["labels"] = torch.from_numpy(np.pad(labels, (0, fill), constant_values=IGNORED_LABEL))

    def _pad(
        self, batch: MaskedBatch, tokens: np.ndarray, lengths: np.ndarray, positions: np.ndarray, labels: np.ndarray
    ) -> None:
        padded = self._laid_out(tokens, lengths, self.special.pad)
        row = np.repeat(np.arange(len(lengths)), lengths)
        begins = lengths.cumsum() - lengths
        batch["tokens"] = padded
        batch["lengths"] = torch.from_numpy(lengths)
        batch["masked"] = torch.from_numpy(positions - begins[row[positions]] + row[positions] * padded.shape[1])
        batch["labels"] = torch.from_numpy(labels)

    def _laid_out(self, flat: np.ndarray, lengths: np.ndarray, filler: int) -> torch.Tensor:
        """Samples end to end as the layout has them, filled up."""
        if self.layout == "packed":
            return torch.from_numpy(np.pad(flat, (0, self.budget - len(flat)), constant_values=filler))
        width = -(-int(lengths.max(initial=1)) // ROUNDED_TO) * ROUNDED_TO
        out = np.full((len(lengths), width), filler, dtype=np.int64)
        out[np.arange(width) < lengths[:, None]] = flat
        return torch.from_numpy(out)

    def _piece(self, piece: int) -> np.ndarray:
        if self._tokens is None:
            # The plain array: slices of numpy's memmap class cost ten times as much to make.
            path = self.tokens_path
            mapped = np.asarray(np.memmap(path, self.dtype, "r")) if isinstance(path, Path) else path.mapped()
            self._tokens = mapped
        return self._tokens[self.pieces.begins[piece] : self.pieces.ends[piece]].astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None, "_epochs": {}}


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
