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
