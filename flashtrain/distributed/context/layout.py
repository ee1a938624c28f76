"""Which rank holds which tokens of a sequence.

    layout = LAYOUTS["balanced"](masks.document(ids, causal=True), degree=8)
    mine = layout.shard(tokens, rank)                       # (B, S) -> (B, n)
    whole = layout.unshard([part of rank 0, part of rank 1, ...])

Shapes: B batch rows, Bl rows of the layout (B, or 1 that all rows share), S sequence, R ranks (the degree), n tokens a
rank holds.
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
    """Which rank holds which tokens of a sequence.

    Every rank holds the same number, in ascending order, then padding, which sees nothing, is seen by nothing and has
    no label.

    Attributes:
        tokens: (Bl, R, n) int64 on the host: the positions in the sequence of each rank's tokens, ascending; -1 for
            padding, which comes last.
        seqlen: the length of the sequence, S.
        block: the largest number of tokens that were assigned together.
    """

    tokens: Tensor
    seqlen: int
    block: int

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
        """The number of padding tokens of all ranks, in a row."""
        return self.degree * self.held - self.seqlen

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """The rank's part (B, n, ...) of x (B, S, ...), with `fill` for padding."""
        places = self.tokens[:, rank].to(x.device)
        mine = take(x, places.clamp(min=0))
        if not self.padding:
            return mine
        padding = (places < 0).view(*places.shape, *(1,) * (x.dim() - 2))
        return mine.masked_fill(padding, fill)

    def unshard(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole (B, S, ...) of the parts (B, n, ...) of all ranks in their order: the inverse of `shard`."""
        joined = torch.cat(list(parts), 1)
        return take(joined, self.places.to(joined.device))

    @property
    def places(self) -> Tensor:
        """The index of each token of the sequence into the parts of all ranks, one after the other: (Bl, S) int64."""
        return ascending(self.tokens.flatten(1))[:, : self.seqlen]


def layout_of(rows: list[list[list[Run]]], seqlen: int, block: int) -> Layout:
    """The layout in which rank r of row b holds the runs rows[b][r], ascending."""
    parts = [
        np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in [*mine, (0, 0)]])
        for ranks in rows
        for mine in ranks
    ]
    held = max(map(len, parts), default=0)
    padded = [np.pad(part, (0, held - len(part)), constant_values=-1) for part in parts]
    return Layout(torch.from_numpy(np.stack(padded).reshape(len(rows), -1, held)), seqlen, block)
