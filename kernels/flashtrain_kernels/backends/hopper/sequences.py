"""Packed sequences in the Hopper kernels: found in cu_seqlens on the device, so that nothing is made before a launch.

Each sequence has tiles of its own: tile m of sequence n begins m tiles after the sequence does. Tiles are numbered in
slots, of which a sequence that begins at token b has those from b // tile + n on. That is never fewer than it has
tiles (often one more, which finds itself past the end and is no work), it needs no sum over the sequences before, and
it grows with n, so that the sequence of a slot is found by a search. The host knows how many slots there are: T // tile
+ N + 1, as the tokens past the last end count as one more sequence, whose other side is empty: they see nothing.

N sequences, T tokens of a side. cu_ptr: (N + 1,) int32. What it holds is held within [0, T]: nothing it says makes a
kernel read or write elsewhere; where it decreases, what comes out is undefined. The functions serve Triton's kernels
and Gluon's.
"""

import triton
import triton.language as tl

from ..portable.tiles import Bounds

LANES = tl.constexpr(128)  # numbers that a step of the search looks at


def slots(tokens: int, sequences: int, tile: int) -> int:
    """How many slots of `tile` tokens hold all tiles of packed sequences."""
    return tokens // tile + sequences + 1


@triton.jit
def begin_of(number, cu_ptr, sequences, tokens):
    """Where a sequence begins: 0 for the first, the last end for sequence N, all tokens past that."""
    given = tl.load(cu_ptr + number, mask=(number > 0) & (number <= sequences), other=0)
    return tl.where(number > sequences, tokens, tl.minimum(tl.maximum(given, 0), tokens))


@triton.jit
def first_slot(number, begin, TILE: tl.constexpr):
    """The first slot of the sequence of a number, which begins there."""
    return begin // TILE + number


@triton.jit
def find(slot, lanes, cu_ptr, sequences, tokens, TILE: tl.constexpr):
    """(sequence, tile within it) of a slot. lanes: 0 to 127, in any layout."""
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
    return first, tl.maximum(slot - first_slot(first, begin_of(first, cu_ptr, sequences, tokens), TILE), 0)


@triton.jit
def sequence_of(number, cu_q_ptr, cu_k_ptr, sequences, bounds, OF_KEYS: tl.constexpr):
    """(its first query, its first key, its Bounds) of a sequence. bounds: of the whole row, and the window, counted
    from the diagonal that ends bottom-right. OF_KEYS: does the kernel ask for tiles of keys (else of queries)?"""
    first_query = begin_of(number, cu_q_ptr, sequences, bounds.seqlen_q)
    first_key = begin_of(number, cu_k_ptr, sequences, bounds.seqlen_k)
    queries = tl.maximum(begin_of(number + 1, cu_q_ptr, sequences, bounds.seqlen_q) - first_query, 0)
    keys = tl.maximum(begin_of(number + 1, cu_k_ptr, sequences, bounds.seqlen_k) - first_key, 0)
    if OF_KEYS:
        queries = tl.where(number < sequences, queries, 0)
    else:
        keys = tl.where(number < sequences, keys, 0)
    shift = keys - queries
    return first_query, first_key, Bounds(queries, keys, shift + bounds.left, shift + bounds.right)
