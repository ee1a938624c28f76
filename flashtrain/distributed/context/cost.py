"""Estimate the time that a layer's attention takes under each context-parallel method:
kernels, copies and transfers.

The constants fit the rows of recipe=long-context-benchmark on two and four H100s and H200s. A test
compares the method of least time with these rows; the times themselves are rough.
"""

from __future__ import annotations

import math

from flashtrain.distributed.context.all_gather import PIECE_BYTES
from flashtrain.distributed.context.traffic import GRADIENT_BYTES, Sizes
from flashtrain.distributed.context.transfers import MAX_PIECES, pieces_of
from flashtrain.distributed.context.ulysses import head_pieces

FLOPS = 4.9e14, 5.9e14  # a second, of the kernels: at head dimensions up to 64, and above
# Of the kernels' time, likewise: what many calls in place of one lose; half of
# it where they are two.
IDLE = 0.16, 0.04
CALL = 2e-4  # seconds of a further call besides, forward and backward
FORWARD = 0.28  # the share of the forward in the kernels' time
# Bytes a second of a rank: to all, to one, to other machines.
NVLINK, NEIGHBOR, NETWORK = 2.8e11, 2.1e11, 5e10
START = 5e-5  # seconds until a transfer moves
# Bytes a second, read or written: of some heads, and of whole tokens.
COPIES, TOKEN_COPIES = 1.6e12, 2.4e12


def linear_seconds(sizes: Sizes) -> float:
    """Return the seconds that a rank's attention kernels need for a layer, forward and backward,
    at full speed: without idle time, copies and transfers."""
    visible = sizes.visible or sizes.held * sizes.degree / 2
    return 14 * sizes.held * visible * sizes.heads * sizes.head_dim / FLOPS[sizes.head_dim > 64]


def expected_seconds(
    sizes: Sizes, heads_degree: int, *, gathers: bool, share: float = 1.0
) -> float:
    """Estimate the seconds that a rank takes for a layer, forward and backward.

    Args:
        sizes, heads_degree, gathers: as for traffic.traffic.
        share: with gathers, the share of the other ranks' keys that is gathered; below 1, only
            the keys that this rank's queries see (AllGatherNeeded).
    """
    degree, heads, kv_heads, head_dim, held, size = sizes[:6]
    near = sizes.near if sizes.near > 1 else degree
    rings, copies = 1 if gathers else degree // heads_degree, math.lcm(kv_heads, heads_degree)
    queries, keys = held * heads * head_dim, 2 * held * copies * head_dim  # elements
    linear = linear_seconds(sizes)
    passes = FORWARD * linear, (1 - FORWARD) * linear
    moved, pieces, calls, seconds = (0.0, 0.0), 1, rings - 1, 0.0
    # What the operators around the kernels read and write is counted for elements of 2
    # bytes and sums of 4.
    if gathers:
        part = share * (degree - 1)  # of the keys and values that a rank holds
        moved = part * keys * size, part * keys * (size + (size if share < 1 else GRADIENT_BYTES))
        limit = MAX_PIECES if share == 1 else min(MAX_PIECES, 1 + int(moved[0]) // PIECE_BYTES)
        pieces = len(pieces_of(heads, kv_heads, limit))
        calls = 2 * pieces - 1 if share == 1 else pieces - 1
        copied = keys * (8 + 40 * degree) + 8 * queries
        seconds = copied / COPIES if share == 1 else keys * (12 + 40 * part) / TOKEN_COPIES
    elif heads_degree > 1:
        away = (1 - 1 / heads_degree) * size
        moved = away * (2 * queries + keys), away * (4 * queries + 2 * keys)
        pieces = (
            1 if rings > 1 else len(head_pieces(heads // degree, copies // degree, held * degree))
        )
        calls += pieces - 1
        seconds = 4 * size * (6 * queries + 3 * keys) / COPIES
    apart = degree if gathers else heads_degree  # ranks among which `moved` moves
    speed = NVLINK if apart <= near else NETWORK * (apart - 1) / (apart - near)
    if gathers and share == 1 and near < degree:  # through one rank of a machine, for all of it
        speed = min(NVLINK, NETWORK * near)
    for sent, computed in zip(moved, passes, strict=True):
        took = sent / speed + START * (sent > 0)
        seconds += took / pieces + (1 - 1 / pieces) * max(0.0, took - computed)
    if rings > 1:
        hop = keys / (NEIGHBOR if degree <= near else NETWORK)
        for each, computed in zip((size, size + GRADIENT_BYTES), passes, strict=True):
            seconds += (rings - 1) * max(0.0, hop * each + START - computed / rings)
        seconds += (queries * (36 + 15 * (rings - 1)) + keys * (24 + 7.5 * (rings - 1))) / COPIES
    return linear * (1 + IDLE[head_dim > 64] * calls / (calls + 1)) + CALL * calls + seconds
