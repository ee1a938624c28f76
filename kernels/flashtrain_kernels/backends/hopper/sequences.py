"""Packed sequences in the Hopper kernels: read from cu_seqlens on the device, so that no mask
is made before a launch.

N sequences, T tokens (of queries or keys). cu_ptr: (N + 1,) int32. A slot is the number of a tile
over all sequences, some unused: sequence n, which begins at token b, has the slots from b // tile +
n on (kernels/dev/HOPPER.md).
"""

import triton
import triton.language as tl

from ..portable.tiles import Bounds

LANES = tl.constexpr(128)  # numbers that a step of the search looks at


def slots(tokens: int, sequences: int, tile: int) -> int:
    """Return how many slots (tile numbers, some unused) packed sequences have, in
    tiles of `tile` tokens."""
    return tokens // tile + sequences + 1


@triton.jit
def begin_of(number, cu_ptr, sequences, tokens):
    """Return the token at which sequence `number` begins (N: where the last one
    ends; beyond N: `tokens`)."""
    given = tl.load(cu_ptr + number, mask=(number > 0) & (number <= sequences), other=0)
    return tl.where(number > sequences, tokens, tl.minimum(tl.maximum(given, 0), tokens))


@triton.jit
def first_slot(number, begin, TILE: tl.constexpr):
    """Return the first slot of sequence `number`, which begins at token `begin`."""
    return begin // TILE + number


@triton.jit
def find(slot, lanes, cu_ptr, sequences, tokens, TILE: tl.constexpr):
    """Return (sequence, number of the tile in it) of a slot, a tile's number over all
    sequences. lanes: arange(128)."""
    COUNT: tl.constexpr = lanes.shape[0]
    first = 0
    span = sequences + 1
    while span > 1:  # the sequence is one of `span` from `first` on
        stride = (span + COUNT - 1) // COUNT
        number = first + lanes * stride
        begin = begin_of(number, cu_ptr, sequences, tokens)
        before = (first_slot(number, begin, TILE) <= slot) & (lanes * stride < span)
        skipped = (tl.maximum(tl.sum(before.to(tl.int32), 0), 1) - 1) * stride
        first += skipped
        span = tl.minimum(stride, span - skipped)
    # Not below 0, where cu_seqlens decreases.
    return first, tl.maximum(
        slot - first_slot(first, begin_of(first, cu_ptr, sequences, tokens), TILE), 0
    )


@triton.jit
def _tiles_from(level, number, cu_ptr, sequences, tokens, TILE: tl.constexpr):
    """Return, for each sequence `number`, how many of its tiles have at least `level` tiles before
    them in the sequence; 0 for numbers past the last sequence."""
    begin = begin_of(number, cu_ptr, sequences, tokens)
    end = begin_of(number + 1, cu_ptr, sequences, tokens)
    tiles = (tl.maximum(end - begin, 0) + TILE - 1) // TILE
    return tl.where(number < sequences, tl.maximum(tiles - level, 0), 0)


@triton.jit
def find_by_rank(rank, lanes, cu_ptr, sequences, tokens, TILE: tl.constexpr):
    """Return (sequence, tile within it) of the tile with a given rank. Rank 0 is the tile furthest
    into its sequence, which under a causal mask sees the most keys; then come the tiles before,
    then tiles of tokens past all sequences, then numbers without work. There are as many ranks as
    slots. lanes: arange(128)."""
    COUNT: tl.constexpr = lanes.shape[0]
    # Of level m and above there are S(m) tiles, fewer for each level. Wanted: the last m with
    # S(m) > rank, in [level, level + span), and S(m + 1), which come before that level's tiles.
    level = 0
    span = tokens // TILE + 1
    before = 0
    total = 0
    looking = True
    while looking:
        half = span // 2
        tiles = lanes * 0
        for first in range(0, sequences, COUNT):
            tiles += _tiles_from(level + half, first + lanes, cu_ptr, sequences, tokens, TILE)
        total = tl.sum(tiles, 0)
        # The first look is at level 0 only where that is the only one; `before` is S(level + span).
        more = (total > rank) & (half > 0)
        level = tl.where(more, level + half, level)
        before = tl.where(more | (half == 0), before, total)
        span = tl.where(more, span - half, half)
        looking = half > 0
    # Now `total` is S(level).
    place = rank - before  # among the sequences that have a tile of this level
    found = 0
    for first in range(0, sequences, COUNT):
        has = (_tiles_from(level, first + lanes, cu_ptr, sequences, tokens, TILE) > 0).to(tl.int32)
        here = (has > 0) & (tl.cumsum(has, 0) == place + 1)
        found += tl.sum(tl.where(here, first + lanes, 0), 0)
        place -= tl.sum(has, 0)
    tail = rank >= total  # then level 0 was left, and S(0) found
    return tl.where(tail, sequences, found), tl.where(tail, rank - total, level)


@triton.jit
def sequence_of(number, cu_q_ptr, cu_k_ptr, sequences, bounds, OF_KEYS: tl.constexpr):
    """Return (first query, first key, Bounds) of sequence `number`. Past the last sequence the
    Bounds have no queries (OF_KEYS) or no keys, so that a tile there computes nothing.

    bounds: the whole row's lengths, and its window before the shift by keys - queries, which is
    added here. OF_KEYS: whether the caller's tiles are of keys, else of queries.
    """
    first_query = begin_of(number, cu_q_ptr, sequences, bounds.seqlen_q)
    first_key = begin_of(number, cu_k_ptr, sequences, bounds.seqlen_k)
    queries = tl.maximum(
        begin_of(number + 1, cu_q_ptr, sequences, bounds.seqlen_q) - first_query, 0
    )
    keys = tl.maximum(begin_of(number + 1, cu_k_ptr, sequences, bounds.seqlen_k) - first_key, 0)
    if OF_KEYS:
        queries = tl.where(number < sequences, queries, 0)
    else:
        keys = tl.where(number < sequences, keys, 0)
    shift = keys - queries
    return first_query, first_key, Bounds(queries, keys, shift + bounds.left, shift + bounds.right)
