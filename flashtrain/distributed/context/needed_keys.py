"""Find the keys of other ranks that the queries of each rank see under a mask.

Shapes: S sequence, R ranks (the degree), n tokens a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashtrain.distributed.context.layout import Layout
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, Mask

# [rank][other]: ascending indices, below n, into the part of the other rank.
Needed = Sequence[Sequence[np.ndarray]]


def needed_keys(layout: Layout, mask: Mask) -> Needed:
    """Find the keys that each rank must fetch from each other rank.

    Args:
        layout: which rank holds which tokens.
        mask: the mask of the whole sequence; it is read on the host.

    Returns:
        result[rank][other]: ascending indices, among the n tokens of rank `other`, of the keys that any query of `rank`
        sees in any row of the batch. Empty where both are the same rank.
    """
    rows = mask.queries.cpu().numpy()
    intervals = [(LOW, HIGH), (LOW2, HIGH2)][: 1 if len(rows) == 5 else 2]
    needed = np.zeros((layout.degree, layout.degree, layout.held), dtype=bool)
    for row in range(max(layout.tokens.shape[0], rows.shape[1])):
        of_mask = rows[:, row if rows.shape[1] > 1 else 0]
        tokens = layout.tokens[row if layout.tokens.shape[0] > 1 else 0].numpy()
        for rank in range(layout.degree):
            mine = tokens[rank][tokens[rank] >= 0]
            edges = np.zeros(mask.seqlen_k + 1, dtype=np.int64)
            for low, high in intervals:
                first = of_mask[low, mine].clip(0, mask.seqlen_k)
                past = np.maximum(first, of_mask[high, mine].clip(0, mask.seqlen_k))
                edges += np.bincount(first, minlength=len(edges)) - np.bincount(past, minlength=len(edges))
            seen = edges.cumsum()[:-1] > 0
            needed[rank] |= (tokens >= 0) & seen[tokens.clip(0)]
    needed[range(layout.degree), range(layout.degree)] = False
    return [[np.flatnonzero(places) for places in of_rank] for of_rank in needed]


def fetched_share(needed: Needed, held: int) -> float:
    """Return the largest share (0 to 1) of the other ranks' tokens that any rank must fetch; `held` is n."""
    others = max(1, (len(needed) - 1) * held)
    return max(sum(len(places) for places in mine) for mine in needed) / others
