"""Compute how many bytes a rank sends under each context-parallel method."""

from __future__ import annotations

import math
from typing import NamedTuple

GRADIENT_BYTES = 4  # gradients of keys and values that are summed on the way are float32


class Sizes(NamedTuple):
    """The sizes of a layer's attention over a sequence that is sharded among ranks."""

    degree: int  # R, the ranks that share a sequence
    heads: int  # H, the query heads
    kv_heads: int  # K, the key/value heads
    head_dim: int  # D, the head dimension
    held: int = 1  # n, the tokens that a rank holds, over all rows of the batch
    bytes_each: int = 2  # of an element of q, k and v
    near: int = 1  # neighboring ranks of the R that are on one machine; 1: it does not matter
    # Keys that a query sees, on the average; 0: half of the tokens, as under a causal mask.
    visible: float = 0


def near_ranks(degree: int, devices: int) -> int:
    """Return how many of the `degree` ranks that share a sequence are on one machine, if each
    machine has `devices` devices."""
    return math.gcd(degree, devices)  # ranks are numbered machine by machine


class Traffic(NamedTuple):
    """The bytes that the busiest rank sends for one layer, in the forward and
    in the backward pass."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """The bytes of the forward and the backward pass together."""
        return self.forward + self.backward


def traffic(sizes: Sizes, heads_degree: int, *, gathers: bool, share: float = 1.0) -> Traffic:
    """Compute how many bytes one rank sends for a layer.

    Args:
        sizes: the sizes of the attention.
        heads_degree: how many ranks divide the heads: for ulysses `degree`, for a ring 1, for
            hybrid between (rings of degree / heads_degree ranks).
        gathers: whether all keys and values are gathered (all-gather);
            heads_degree is then ignored.
        share: the share of the keys and values that go around the ring; 1: all of them.
    """
    # The backward sends all of it again, and the gradients back, those of keys and values in
    # float32 if they are summed on the way.
    degree, heads, kv_heads, head_dim, held, bytes_each = sizes[:6]
    token = head_dim * bytes_each
    gradient = head_dim * GRADIENT_BYTES
    if gathers:
        others = (degree - 1) * held * 2 * kv_heads
        return Traffic(others * token, others * (token + gradient))
    # key/value heads that are repeated so that every rank gets some.
    copies = math.lcm(kv_heads, heads_degree)
    away = held * (heads_degree - 1) / heads_degree
    # A ring passes on the tokens of the ranks that divide the heads, a share of the heads.
    around = share * held * 2 * copies
    steps = degree // heads_degree - 1
    forward = away * (2 * heads + 2 * copies) * token + steps * around * token
    backward = away * (4 * heads + 4 * copies) * token + steps * around * (token + gradient)
    return Traffic(int(forward), int(backward))
