"""Find which keys, of other ranks and of its own, the queries of a rank see under a mask.

Shapes: S sequence, R ranks (the degree), n tokens a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flashtrain.distributed.context.layout import Layout
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, Mask

# [rank][other]: ascending indices, below n, into the part of the other rank.
Needed = Sequence[Sequence[np.ndarray]]
# The largest share of other ranks' keys that may be seen for only these to be sent.
MAX_FETCHED = 0.75
_INTERVALS = (LOW, HIGH), (LOW2, HIGH2)  # a mask of 5 rows has the first alone


def needed_keys(layout: Layout, mask: Mask) -> Needed:
    """Find the keys that each rank must fetch from each other rank.

    Args:
        layout: which rank holds which tokens.
        mask: the mask of the whole sequence; it is read on the host.

    Returns:
        result[rank][other]: ascending indices, among the n tokens of rank `other`, of the keys that
        any query of `rank` sees in any row of the batch. Empty where both are the same rank.
    """
    needed = np.zeros((layout.degree, layout.degree, layout.held), dtype=bool)
    for of_mask, tokens in _rows(layout, mask):
        for rank in range(layout.degree):
            needed[rank] |= _seen(of_mask, tokens[rank], tokens)
    needed[range(layout.degree), range(layout.degree)] = False
    return [[np.flatnonzero(places) for places in of_rank] for of_rank in needed]


def outward_queries(layout: Layout, mask: Mask, rank: int) -> np.ndarray:
    """Find the queries of a rank that see a key of another rank, in any row of the batch:
    ascending indices below n."""
    found = np.zeros(layout.held, dtype=bool)
    for of_mask, tokens in _rows(layout, mask):
        own, real = tokens[rank].clip(0), tokens[rank] >= 0
        others = np.ones(mask.seqlen_k + 1, dtype=np.int64)
        others[0], others[own[real] + 1] = 0, 0
        before = others.cumsum()  # how many of the other ranks' tokens lie before each position
        for low, high in _INTERVALS[: len(of_mask) // 2 - 1]:
            first, past = (of_mask[bound, own].clip(0, mask.seqlen_k) for bound in (low, high))
            found |= real & (before[past] > before[first])
    return np.flatnonzero(found)


def own_keys(layout: Layout, mask: Mask, rank: int, queries: np.ndarray) -> np.ndarray:
    """Find the keys of a rank that these queries of the same rank see, in any row of the batch;
    both `queries` and the result are ascending indices below n."""
    found = np.zeros(layout.held, dtype=bool)
    for of_mask, tokens in _rows(layout, mask):
        found |= _seen(of_mask, tokens[rank, queries], tokens[rank])
    return np.flatnonzero(found)


def _seen(of_mask: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return whether each of the keys is seen by any of the queries. of_mask: the row's part of
    Mask.queries; queries, keys: tokens of the row, -1 for padding."""
    length = of_mask.shape[1]
    asked = queries[queries >= 0]
    edges = np.zeros(length + 1, dtype=np.int64)
    for low, high in _INTERVALS[: len(of_mask) // 2 - 1]:
        first = of_mask[low, asked].clip(0, length)
        past = np.maximum(first, of_mask[high, asked].clip(0, length))
        edges += np.bincount(first, minlength=len(edges)) - np.bincount(past, minlength=len(edges))
    return (keys >= 0) & (edges.cumsum()[:-1] > 0)[keys.clip(0)]


def _rows(layout: Layout, mask: Mask) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each row of the batch on the host: its part of Mask.queries, 5 numbers a token, or 7
    with a second interval (masks/rows.py), and the ranks' tokens (R, n)."""
    rows, tokens = mask.queries.cpu().numpy(), layout.tokens.numpy()
    for row in range(max(len(tokens), rows.shape[1])):
        yield rows[:, row % rows.shape[1]], tokens[row % len(tokens)]


def fetched_share(needed: Needed, held: int) -> float:
    """Return the largest share (0 to 1) of the other ranks' tokens that any rank
    must fetch; `held` is n."""
    others = max(1, (len(needed) - 1) * held)
    return max(sum(len(places) for places in mine) for mine in needed) / others
