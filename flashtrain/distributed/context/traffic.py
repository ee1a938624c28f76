"""What a layer's attention has to communicate: the least that a layout needs, and what each way moves.

Bl rows of a layout, S sequence, R ranks, n tokens a rank holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flashtrain.distributed.context.layout import Layout
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, Mask

GRADIENT_BYTES = 4  # gradients of keys and values are added up in float32


class Traffic(NamedTuple):
    """Bytes that the busiest rank sends for one layer and one row, in the forward and in the backward pass."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def seen_keys(layout: Layout, mask: Mask) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """(what the ranks hold of a row (R, n), rank, which of the row's keys its queries see: (S,) bool), of every row and
    rank.

    Reads the mask's numbers on the host.
    """
    rows = mask.queries.cpu().numpy()
    pairs = [(LOW, HIGH), (LOW2, HIGH2)][: 1 if len(rows) == 5 else 2]
    for row in range(max(layout.tokens.shape[0], rows.shape[1])):
        of_mask = rows[:, row if rows.shape[1] > 1 else 0]
        tokens = layout.tokens[row if layout.tokens.shape[0] > 1 else 0].numpy()
        for rank in range(layout.degree):
            mine = tokens[rank][tokens[rank] >= 0]
            edges = np.zeros(mask.seqlen_k + 1, dtype=np.int64)
            for low, high in pairs:
                first = of_mask[low, mine].clip(0, mask.seqlen_k)
                past = np.maximum(first, of_mask[high, mine].clip(0, mask.seqlen_k))
                edges += np.bincount(first, minlength=len(edges)) - np.bincount(past, minlength=len(edges))
            yield tokens, rank, edges.cumsum()[:-1] > 0


def remote_keys(layout: Layout, mask: Mask) -> np.ndarray:
    """(R,) int64: how many distinct keys that other ranks hold each rank's queries see, summed over the rows.

    The least that any way of exchanging keys could bring to a rank; keeping short documents whole makes it smaller.
    """
    needed = np.zeros(layout.degree, dtype=np.int64)
    for tokens, rank, seen in seen_keys(layout, mask):
        seen[tokens[rank][tokens[rank] >= 0]] = False
        needed[rank] += int(seen.sum())
    return needed


def needed_places(layout: Layout, mask: Mask) -> list[list[np.ndarray]]:
    """[rank][other]: which of the n places of the other rank's part hold a token that the rank's queries see, in any
    row; ascending. Nothing of its own."""
    held = layout.held
    needed = np.zeros((layout.degree, layout.degree, held), dtype=bool)
    for tokens, rank, seen in seen_keys(layout, mask):
        needed[rank] |= (tokens >= 0) & seen[tokens.clip(0)]
    return [
        [np.flatnonzero(places) if other != rank else np.zeros(0, dtype=np.int64) for other, places in enumerate(mine)]
        for rank, mine in enumerate(needed)
    ]


def fetched_share(needed: Sequence[Sequence[np.ndarray]], held: int) -> float:
    """Of the places that the other ranks hold, the share that the rank with most to fetch needs: 0 to 1."""
    others = max(1, (len(needed) - 1) * held)
    return max(sum(len(places) for places in mine) for mine in needed) / others


def traffic(
    held: int,
    degree: int,
    heads_degree: int,
    gathers: bool,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bytes_each: int,
) -> Traffic:
    """What one rank sends when each holds `held` tokens.

    heads_degree: ranks that divide the heads among them (all-to-all: the degree; ring: 1; hybrid: between); the others
    form rings, or, with `gathers`, gather all keys and values. The backward brings everything once more and takes the
    gradients back, those of keys and values in float32 where they are added up on the way.
    """
    token = head_dim * bytes_each
    gradient = head_dim * GRADIENT_BYTES
    if gathers:
        others = (degree - 1) * held * 2 * kv_heads
        return Traffic(others * token, others * (token + gradient))
    copies = math.lcm(kv_heads, heads_degree)  # key/value heads that are repeated so that every rank gets some
    away = held * (heads_degree - 1) / heads_degree
    around = held * 2 * copies  # a ring passes on the tokens of the ranks that divide the heads, a share of the heads
    steps = degree // heads_degree - 1
    forward = away * (2 * heads + 2 * copies) * token + steps * around * token
    backward = away * (4 * heads + 4 * copies) * token
    if steps:
        backward += steps * around * token + (steps + 1) * around * gradient
    return Traffic(int(forward), int(backward))
