"""Sequences packed into one row, kept apart by attending to each alone: for attention that has no kernel for them.

Where our kernels run, a Mask does it (flashtrain_kernels.masks); for the others a mask of a packed row would be a
T x T tensor. T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PackedSequences(NamedTuple):
    """lengths: of the sequences, in the order in which they lie in the row. What follows them belongs to none."""

    lengths: tuple[int, ...]

    def attend(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """attention(q, k, v) of each sequence. q (1, T, H, D), k and v (1, T, K, D) -> (1, T, H, D); 0 in no sequence.

        No larger score matrix than that of one sequence exists at a time.
        """
        sizes = [length for length in self.lengths if length]
        used = sum(sizes)
        parts = zip(*(x[:, :used].split(sizes, dim=1) for x in (q, k, v)), strict=True) if sizes else ()
        rows = [attention(*part) for part in parts]
        rows.append(q.new_zeros(q.shape[0], q.shape[1] - used, *q.shape[2:]))
        return torch.cat(rows, dim=1)
