"""Layouts: which rank holds which tokens of a sequence.

    layout = LAYOUTS["balanced"](masks.document(ids, causal=True), degree=8)
    mine = layout.shard(tokens, rank)                       # (B, S) -> (B, n)
    whole = layout.unshard([part of rank 0, part of rank 1, ...])

Shapes: B batch rows, Bl rows of the layout (B, or 1 for all batch rows), S sequence, R ranks, n
tokens a rank holds (with padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.balance import Run
from flashtrain.distributed.context.indexing import ascending, take


@dataclass(frozen=True)
class Layout:
    """The assignment of the tokens of a sequence to the ranks that share it.

    Every rank holds the same number of tokens, in ascending order, padding last. Padding sees no
    token, is seen by none and has no label.
    """

    # (Bl, R, n) int64 on the host: the positions in the sequence of each rank's
    # tokens; -1 for padding.
    tokens: Tensor
    seqlen: int  # the length of the sequence, S
    block: int  # tokens of the largest block into which the sequence is divided

    @property
    def degree(self) -> int:
        """The number of ranks, R."""
        return self.tokens.shape[1]

    @property
    def held(self) -> int:
        """The number of tokens that a rank holds, n, padding included."""
        return self.tokens.shape[2]

    @property
    def padding(self) -> int:
        """The number of padding tokens in one row, over all ranks."""
        return self.degree * self.held - self.seqlen

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """Return the part (B, n, ...) of x (B, S, ...) that a rank holds, with
        `fill` for padding."""
        places = self.tokens[:, rank].to(x.device)
        mine = take(x, places.clamp(min=0))
        if not self.padding:
            return mine
        padding = (places < 0).view(*places.shape, *(1,) * (x.dim() - 2))
        return mine.masked_fill(padding, fill)

    def unshard(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts (B, n, ...) of all ranks, in the ranks' order, to the whole (B,
        S, ...): undo `shard`."""
        joined = torch.cat(list(parts), 1)
        return take(joined, self.places.to(joined.device))

    @property
    def places(self) -> Tensor:
        """The index (Bl, S) int64 of each of the sequence's tokens in the
        concatenation of all ranks' parts."""
        return ascending(self.tokens.flatten(1))[:, : self.seqlen]


def layout_of(rows: list[list[list[Run]]], seqlen: int, block: int) -> Layout:
    """Make the layout in which rank r holds the runs (begin, end) rows[b][r] of row b.

    Args:
        rows: for each row and rank its runs of tokens, ascending.
        seqlen: the length of the sequence, S.
        block: the block size in tokens, for Layout.block.
    """
    parts = [
        np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in [*mine, (0, 0)]])
        for ranks in rows
        for mine in ranks
    ]
    held = max(map(len, parts), default=0)
    padded = [np.pad(part, (0, held - len(part)), constant_values=-1) for part in parts]
    return Layout(torch.from_numpy(np.stack(padded).reshape(len(rows), -1, held)), seqlen, block)
