"""Batches of sequences with many lengths: padded in random order, padded by like length, or
packed without padding.

N sequences, S tokens of the longest, B rows of a padded batch, T tokens of a packed
one, M labels of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain.data.masking import masked_count
from flashtrain.data.token_budget import rows_once
from flashtrain_kernels.loss_head import IGNORED

SHARE = 0.15
# A padded batch is as wide as its longest row, rounded up to this: few shapes, for what compiles.
WIDTH_MULTIPLE = 64
_BUDGET_MULTIPLE = 128
# How sequences are batched, as rows have it in the column `padding`.
FULL, RANDOM, BUCKETS, PACKED = "full rows", "random batches", "length buckets", "packed"


class Sequences(NamedTuple):
    """N sequences with labels, as arrays padded to the longest."""

    tokens: np.ndarray  # (N, S) int64, 0 after a sequence's end
    labels: np.ndarray  # (N, S) int64, -100 where nothing is masked
    lengths: np.ndarray  # (N,)

    @classmethod
    def draw(cls, lengths: np.ndarray, vocab_size: int, seed: int) -> Sequences:
        """Draw random tokens for sequences of these lengths, and labels at 15% of the places,
        as many as BERT masks."""
        random = np.random.RandomState(seed)
        shape = (len(lengths), int(lengths.max()))
        real = np.arange(shape[1]) < lengths[:, None]
        tokens = np.where(real, random.randint(5, vocab_size, shape), 0)
        order = np.where(real, random.random_sample(shape), 2.0).argsort(axis=1).argsort(axis=1)
        chosen = order < masked_count(np.maximum(lengths - 2, 1), SHARE)[:, None]
        return cls(
            tokens, np.where(chosen & real, random.randint(5, vocab_size, shape), IGNORED), lengths
        )


def random_batches(lengths: np.ndarray, rows: int) -> list[np.ndarray]:
    """Return the numbers of the sequences in each batch: `rows` sequences at a
    time, in the given order."""
    return np.split(np.arange(len(lengths)), range(rows, len(lengths), rows))


def bucket_batches(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Return the numbers of the sequences in each batch: sequences of like length, as many as
    `tokens` tokens hold, padding included."""
    widths = _rounded(lengths, WIDTH_MULTIPLE)
    found: list[np.ndarray] = []
    for width in np.unique(widths):
        of_width, rows = np.flatnonzero(widths == width), max(1, tokens // int(width))
        found += np.split(of_width, range(rows, len(of_width), rows))
    return found


def packed_batches(lengths: np.ndarray, tokens: int) -> tuple[list[np.ndarray], int]:
    """Plan equally full packed rows of at most `tokens`, or of the longest sequence's tokens where
    it is longer, and return (the numbers of each row's sequences, the tokens of a row)."""
    total, longest = int(lengths.sum()), int(lengths.max())
    rows = -(-total // tokens)
    while True:
        for slack in (1.0, 1.005, 1.02, 1.05, 1.1):
            even = int(_rounded(np.array(-(-total // rows) * slack), _BUDGET_MULTIPLE))
            budget = min(max(even, longest), max(tokens, longest))
            planned = [np.array(row[0]) for row in rows_once(lengths, budget=budget, ranks=1)]
            if len(planned) <= rows:
                return planned, budget
        rows += 1


def padded(drawn: Sequences, members: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Return a padded batch of the sequences `members`: tokens, labels (B, S), and lengths
    (B,) if any is padded."""
    lengths = drawn.lengths[members]
    width = min(int(_rounded(lengths.max(), WIDTH_MULTIPLE)), drawn.tokens.shape[1])
    found = {
        "tokens": drawn.tokens[members, :width],
        "labels": drawn.labels[members, :width],
        "lengths": lengths,
    }
    if (lengths == width).all():
        del found["lengths"]
    return _on(found, device)


def masked_batches(
    drawn: Sequences, batches: Sequence[np.ndarray], device: torch.device, *, budget: int | None
) -> list[dict[str, Any]]:
    """Return each batch as the arguments of models.Bert.loss, by name.

    Args:
        batches: the numbers of the sequences in each batch.
        budget: tokens of a packed row; None: the batches are padded instead.
    """
    # room for as many labels and sequences as the fullest batch has: few shapes to compile
    max_rows = max(len(members) for members in batches)
    max_labels = max(int((drawn.labels[members] != IGNORED).sum()) for members in batches)
    found = []
    for members in batches:
        batch = (
            padded(drawn, members, device)
            if budget is None
            else _packed(drawn, members, device, budget, max_rows)
        )
        labels = batch.pop("labels").flatten()
        masked = (labels != IGNORED).nonzero()[:, 0]
        fill = (0, max_labels - len(masked))
        batch["masked"] = torch.nn.functional.pad(masked, fill)
        batch["labels"] = torch.nn.functional.pad(labels[masked], fill, value=IGNORED)
        batch["label_count"] = torch.tensor(float(max(1, len(masked))), device=device)
        found.append(batch)
    return found


def _packed(
    drawn: Sequences, members: np.ndarray, device: torch.device, budget: int, max_rows: int
) -> dict[str, Tensor]:
    """Return a packed batch of the sequences `members`: tokens and labels, (T,), and cu_seqlens,
    (max_rows + 1,); T is `budget`."""
    lengths = drawn.lengths[members]
    real = np.arange(drawn.tokens.shape[1]) < lengths[:, None]
    ends = np.concatenate(
        ([0], lengths.cumsum(), np.full(max_rows - len(members), lengths.sum()))
    ).astype(np.int32)
    fill = (0, budget - int(lengths.sum()))
    tokens = np.pad(drawn.tokens[members][real], fill)
    labels = np.pad(drawn.labels[members][real], fill, constant_values=IGNORED)
    return _on({"tokens": tokens, "labels": labels, "cu_seqlens": ends}, device)


def _rounded(value: Any, multiple: int) -> Any:
    return (-(-np.asarray(value) // multiple) * multiple).astype(np.int64)


def _on(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for name, array in arrays.items()
    }
