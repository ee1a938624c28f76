"""How sequences of many lengths become batches: padded as they come, padded by like length, or packed without padding.

N sequences, S tokens of the longest, B rows of a padded batch, T tokens of a packed one, M labels of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain.data.masking import masked_count
from flashtrain.data.token_budget import rows_once

SHARE = 0.15
IGNORED = -100
WIDTHS = 64  # a padded batch is as wide as its longest row, rounded up to this: few shapes, for what compiles
_ROUNDED = 128
# The width of batches: padding, in a table's words.
FULL, RANDOM, BUCKETS, PACKED = "full rows", "random batches", "length buckets", "packed"


class Sequences(NamedTuple):
    """tokens (N, S) int64, 0 after a sequence's end; labels as tokens, -100 where nothing is masked; lengths (N,)."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray

    @classmethod
    def draw(cls, lengths: np.ndarray, vocab_size: int, seed: int) -> Sequences:
        """Random tokens of these lengths, with labels at as many random places as MLM masks."""
        random = np.random.RandomState(seed)
        shape = (len(lengths), int(lengths.max()))
        real = np.arange(shape[1]) < lengths[:, None]
        tokens = np.where(real, random.randint(5, vocab_size, shape), 0)
        order = np.where(real, random.random_sample(shape), 2.0).argsort(axis=1).argsort(axis=1)
        chosen = order < masked_count(np.maximum(lengths - 2, 1), SHARE)[:, None]
        return cls(tokens, np.where(chosen & real, random.randint(5, vocab_size, shape), IGNORED), lengths)


def random_batches(lengths: np.ndarray, rows: int) -> list[np.ndarray]:
    """The sequences of each batch, `rows` at a time in the order they were drawn in."""
    return np.split(np.arange(len(lengths)), range(rows, len(lengths), rows))


def bucket_batches(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Sequences of like length together, as many as hold `tokens` with their padding."""
    widths = _rounded(lengths, WIDTHS)
    found: list[np.ndarray] = []
    for width in np.unique(widths):
        of_width, rows = np.flatnonzero(widths == width), max(1, tokens // int(width))
        found += np.split(of_width, range(rows, len(of_width), rows))
    return found


def packed_batches(lengths: np.ndarray, tokens: int) -> tuple[list[np.ndarray], int]:
    """(sequences of each row, T): rows without padding of at most `tokens`, all as full as their number allows."""
    total, longest = int(lengths.sum()), int(lengths.max())
    rows = -(-total // tokens)
    while True:
        for slack in (1.0, 1.005, 1.02, 1.05, 1.1):
            even = int(_rounded(np.array(-(-total // rows) * slack), _ROUNDED))
            budget = min(max(even, longest), max(tokens, longest))
            planned = [np.array(row[0]) for row in rows_once(lengths, budget=budget, ranks=1)]
            if len(planned) <= rows:
                return planned, budget
        rows += 1


def padded(drawn: Sequences, members: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """A padded batch: tokens (B, S), labels (B, S), and where a row is padded lengths (B,)."""
    lengths = drawn.lengths[members]
    width = min(int(_rounded(lengths.max(), WIDTHS)), drawn.tokens.shape[1])
    found = {"tokens": drawn.tokens[members, :width], "labels": drawn.labels[members, :width], "lengths": lengths}
    if (lengths == width).all():
        del found["lengths"]
    return _on(found, device)


def masked_batches(
    drawn: Sequences, batches: Sequence[np.ndarray], device: torch.device, *, budget: int | None
) -> list[dict[str, Any]]:
    """What models.Bert.loss takes of each batch. budget: T of packed rows; None: padded rows.

    There is room for as many labels, and of packed rows as many sequences, as the fullest batch has: few shapes.
    """
    most = max(len(members) for members in batches)
    most_labels = max(int((drawn.labels[members] != IGNORED).sum()) for members in batches)
    found = []
    for members in batches:
        batch = padded(drawn, members, device) if budget is None else _packed(drawn, members, device, budget, most)
        labels = batch.pop("labels").flatten()
        masked = (labels != IGNORED).nonzero()[:, 0]
        fill = (0, most_labels - len(masked))
        batch["masked"] = torch.nn.functional.pad(masked, fill)
        batch["labels"] = torch.nn.functional.pad(labels[masked], fill, value=IGNORED)
        batch["label_count"] = torch.tensor(float(max(1, len(masked))), device=device)
        found.append(batch)
    return found


def _packed(drawn: Sequences, members: np.ndarray, device: torch.device, budget: int, most: int) -> dict[str, Tensor]:
    """tokens and labels (T,), cu_seqlens (`most` + 1,)."""
    lengths = drawn.lengths[members]
    real = np.arange(drawn.tokens.shape[1]) < lengths[:, None]
    ends = np.concatenate(([0], lengths.cumsum(), np.full(most - len(members), lengths.sum()))).astype(np.int32)
    fill = (0, budget - int(lengths.sum()))
    tokens = np.pad(drawn.tokens[members][real], fill)
    labels = np.pad(drawn.labels[members][real], fill, constant_values=IGNORED)
    return _on({"tokens": tokens, "labels": labels, "cu_seqlens": ends}, device)


def _rounded(value: Any, multiple: int) -> Any:
    """Up to a multiple, as whole numbers."""
    return (-(-np.asarray(value) // multiple) * multiple).astype(np.int64)


def _on(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
