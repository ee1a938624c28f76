"""Samples of masked-language training, made of pieces of text, and packed or padded to batches.

T packed tokens, N maximum sequences of a row, M maximum labels of a row, B padded rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from flashtrain.data.masking import MaskedBatch, mask_tokens, masked_count
from flashtrain.data.packing import Spans
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError
from flashtrain_kernels.loss_head import IGNORED

ROUNDED_TO = 8  # a padded row's width


class Row(NamedTuple):
    """A micro-batch, as an index of MaskedSamples: the numbers of its samples, and its step's
    number of labels."""

    numbers: tuple[int, ...]  # the samples in it: e * n + i is sample i of n in epoch e
    # Labels of the optimizer step over its micro-batches on all devices; it divides the loss.
    label_count: float


@dataclass(eq=False)
class MaskedSamples(Dataset[MaskedBatch]):
    """A Dataset of samples [CLS] piece [SEP], one for each piece of text: indexed by a Row, it
    returns a MaskedBatch.

    Number e * len(self) + i is sample i in epoch e. Which tokens are masked depends on the seed,
    the epoch and the sample alone: every epoch masks other tokens, and a resumed run masks the same
    ones. Raises UserError if there is no piece.
    """

    file: Any  # the token file, of which slices are read (token_cache.MappedTokens)
    pieces: Spans  # ranges of the token file (pieces.split_pieces)
    special: SpecialTokens
    budget: int  # T
    seed: int = 0  # of what is masked
    share: float = 0.15  # of a sample's tokens that is masked
    layout: str = "packed"  # or "padded"

    def __post_init__(self) -> None:
        if not len(self.pieces.begins):
            raise UserError("the data contains no text to make masked samples of. Use more text.")
        # (n,) int64, tokens of each sample, with [CLS] and [SEP].
        self.lengths = lengths = self.pieces.lengths + 2
        self.tokens = self.pieces.tokens  # of all samples, without [CLS] and [SEP]
        # (n,) int64, masked tokens of each sample.
        self.label_counts = masked_count(self.pieces.lengths, self.share)
        fitting = min(
            math.ceil(2 * self.budget / float(lengths.mean())), self.budget // int(lengths.min())
        )
        self.max_sequences = max(1, fitting)  # N
        # M: the budget's share, and what rounding up to one label adds for each sample
        # (of 3 tokens or more).
        rounding = self.max_sequences * max(0.0, 1 - 3 * self.share, 0.5 - 2 * self.share)
        self.max_labels = math.floor(self.share * self.budget + rounding) + 1

    def __len__(self) -> int:
        """The number of samples in an epoch."""
        return len(self.lengths)

    def row(self, numbers: Sequence[int]) -> Row:
        """Return the Row that holds the samples `numbers`, as the only micro-batch of its step."""
        places = np.asarray(numbers, dtype=np.int64) % len(self)
        return Row(
            tuple(int(number) for number in numbers),
            max(1.0, float(self.label_counts[places].sum())),
        )

    def micro_batches(
        self, rows: Sequence[tuple[int, ...]], *, rank: int, world_size: int, batch_size: int = 1
    ) -> list[Row]:
        """List this device's micro-batches of a step. Micro-batch a is row a *
        world_size + rank of `rows`."""
        every = self.row([number for row in rows for number in row])
        return [Row(row, every.label_count / len(rows)) for row in rows[rank::world_size]]

    def __getitem__(self, row: Row) -> MaskedBatch:
        """Return the batch of a row's samples, in their order."""
        epochs, places = np.divmod(np.asarray(row.numbers, dtype=np.int64), len(self))
        samples = [self._sample(place) for place in places.tolist()]
        lengths = self.lengths[places]
        of = np.repeat(np.arange(len(lengths)), lengths)
        tokens = np.concatenate([np.empty(0, dtype=np.int64), *samples])
        keys = (self.seed, 0, epochs[of], places[of])
        masked = mask_tokens(tokens, of, self.special, keys=keys, share=self.share)

        packed = self.layout == "packed"
        width = -(-int(lengths.max(initial=1)) // ROUNDED_TO) * ROUNDED_TO
        shape = (self.budget,) if packed else (len(lengths), width)
        index, begins = np.arange(len(of)), lengths.cumsum() - lengths
        # Where each token lies in the batch.
        slots = index if packed else index - begins[of] + of * width

        def laid_out(values: np.ndarray, filler: int) -> torch.Tensor:
            out = np.full(math.prod(shape), filler, dtype=np.int64)
            out[slots] = values
            return torch.from_numpy(out.reshape(shape))

        def filled(values: np.ndarray, size: int, filler: int) -> torch.Tensor:
            fill = size - len(values) if packed else 0
            return torch.from_numpy(np.pad(values, (0, fill), constant_values=filler))

        batch = MaskedBatch(
            tokens=laid_out(masked.tokens, self.special.pad),
            masked=filled(slots[masked.positions], self.max_labels, 0),
            labels=filled(masked.labels, self.max_labels, IGNORED),
            label_count=torch.tensor(row.label_count, dtype=torch.float32),
            sequences=len(lengths),
            real_tokens=len(tokens),
            pairs=int((lengths * lengths).sum()),
            scored=len(masked.labels),
        )
        if packed:
            ends = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
            batch["cu_seqlens"] = filled(ends, self.max_sequences + 1, len(tokens))
        else:
            batch["lengths"] = torch.from_numpy(lengths)
        return batch

    def _sample(self, place: int) -> np.ndarray:
        piece = self.file[self.pieces.begins[place] : self.pieces.ends[place]]
        ends = [self.special.classify], [self.special.separate]
        return np.concatenate((ends[0], piece, ends[1]), dtype=np.int64, casting="unsafe")
