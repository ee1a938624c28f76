"""Dropout's random numbers in Triton, the same as philox.py's, for the portable kernels
and the Hopper kernels."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ... import philox

_ROUNDS = tl.constexpr(philox.ROUNDS)
_STREAM_ROUNDS = tl.constexpr(philox.STREAM_ROUNDS)
_MULTIPLIER = tl.constexpr(philox.MULTIPLIER)
_KEY_STEP = tl.constexpr(philox.KEY_STEP)


class Stream(NamedTuple):
    """The random number stream of a head: Philox2x32's key, and the start of its counter's
    two words. All uint32."""

    key: Any
    first: Any
    second: Any


@triton.jit
def stream_of(seed, sequence, head):
    """Return the Stream of a sequence and a head, both int32; the seed is int64."""
    key, first, second, _ = tl.philox(seed, sequence, head, 0, 0, _STREAM_ROUNDS)
    return Stream(key, first, second)


@triton.jit
def load_stream(seed_ptr, sequence, head):
    """Return the Stream of a sequence and a head. seed_ptr: (3,) int64: seed, offsets
    added to sequence and head."""
    sequence = (sequence + tl.load(seed_ptr + 1)).to(tl.int32)
    return stream_of(tl.load(seed_ptr), sequence, (head + tl.load(seed_ptr + 2)).to(tl.int32))


@triton.jit
def group_of(position):
    """Return the number, uint32, of the pair of positions (i, i + 8) that a position is
    in; bit 3 of i is clear."""
    return ((position >> 4) * 8 + (position & 7)).to(tl.uint32, bitcast=True)


@triton.jit
def words(stream, query_group, key_group):
    """Return two random uint32 words for each pair of query_group and key_group (see `group_of`):
    the first for queries with bit 3 clear, else the second. A word's low half is for keys with bit
    3 clear, its high half for the others."""
    a = query_group + stream.first
    b = key_group + stream.second
    key = stream.key
    for _ in tl.static_range(_ROUNDS):
        high = tl.umulhi(a, _MULTIPLIER)
        low = a * _MULTIPLIER
        a = high ^ b ^ key
        b = low
        key += _KEY_STEP
    return a, b


@triton.jit
def kept_pairs(stream, query, key, threshold):
    """Return whether dropout keeps each pair of `query` and `key` (int32 positions): its
    16-bit draw >= threshold."""
    first, second = words(stream, group_of(query), group_of(key))
    word = tl.where((query & 8) == 0, first, second)
    draw = tl.where((key & 8) == 0, word & 0xFFFF, word >> 16)
    return draw.to(tl.int32) >= threshold
