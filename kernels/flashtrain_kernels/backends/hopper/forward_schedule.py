"""The order in which a program of the forward computes tiles of queries, the same for its
producer and its consumers.

B batch, H query heads. The orders, and why they differ: kernels/dev/HOPPER.md.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .sequences import LANES, find


class Work(NamedTuple):
    """How many tiles of queries a call has, and in which order. `..._m`,
    `..._s`: results of `divisor`."""

    heads: Any  # H
    total: Any  # tiles, or pairs of them (C.paired)
    section: Any  # heads a section; pairs a head
    tiles: Any  # tiles a head
    block_m: Any  # to divide by tiles * section
    block_s: Any
    section_m: Any  # by section
    section_s: Any
    heads_m: Any  # by H
    heads_s: Any


def divisor(number: int) -> tuple[int, int]:
    """Return (multiplier, shift) that replace a division of integers of [0, 2^31) by
    `number`: see `_divide`."""
    bits = (number - 1).bit_length()
    # Below 2^32: an int32 for Triton, as the same bits.
    multiplier = -(-(1 << (31 + bits)) // number)
    return multiplier - (1 << 32) if multiplier >= 1 << 31 else multiplier, bits


@gluon.jit
def _divide(x, multiplier, shift):
    """x // number. Where the number is 1 the shift is 0, and the multiplier 2^31."""
    high = gl.umulhi(x.to(gl.uint32), multiplier.to(gl.uint32, bitcast=True))
    low = (x.to(gl.uint32) * multiplier.to(gl.uint32, bitcast=True)) >> 31
    # (high * 2^32 + low word) >> (31 + shift)
    return (((high << 1) + low) >> shift.to(gl.uint32)).to(gl.int32)


@gluon.jit
def rounds(work, PAIRED: gl.constexpr):
    """Return how many tiles of queries this program computes. PAIRED: they come in pairs of a long
    and a short tile."""
    programs = gl.num_programs(0)
    whole = work.total // programs
    rest = work.total - whole * programs
    if PAIRED:
        count = 2 * (whole + (gl.program_id(0) < rest).to(gl.int32))
    else:
        count = whole + (_place_in_round(whole) < rest).to(gl.int32)
    return count


@gluon.jit
def _place_in_round(number):
    """Return which tile of round `number`, one tile for each program, this program computes. Every
    other round goes from the last program to the first, so that each gets its share of long
    tiles."""
    program = gl.program_id(0)
    return gl.where(number % 2 == 0, program, gl.num_programs(0) - 1 - program)


@gluon.jit
def work_item(number, work, bounds, mask, list_ptr, C: gl.constexpr):
    """Return (batch row, head, first query) of the tile of queries that this program computes
    as its number-th; a first query past Sq means that there is none (in an incomplete pair).
    With C.packed (sequence, head, first query in the sequence). list_ptr: where packed
    sequences' queries end."""
    if C.paired:
        index = gl.minimum((number // 2) * gl.num_programs(0) + gl.program_id(0), work.total - 1)
        pair = _divide(index, work.section_m, work.section_s)
        row = index - pair * work.section
        tile = gl.where(number % 2 == 0, 2 * work.section - 1 - row, row)
        item = _item(pair, tile, work, bounds, mask, list_ptr, C)
    else:
        index = gl.minimum(number * gl.num_programs(0) + _place_in_round(number), work.total - 1)
        item = item_of(index, work, bounds, mask, list_ptr, C)
    return item


@gluon.jit
def item_of(index, work, bounds, mask, list_ptr, C: gl.constexpr):
    """Return what work_item does, of tile `index` of all."""
    block = _divide(index, work.block_m, work.block_s)
    rest = index - block * (work.tiles * work.section)
    row = _divide(rest, work.section_m, work.section_s)
    pair = block * work.section + rest - row * work.section
    return _item(pair, work.tiles - 1 - row, work, bounds, mask, list_ptr, C)


@gluon.jit
def _item(pair, tile, work, bounds, mask, list_ptr, C: gl.constexpr):
    batch = _divide(pair, work.heads_m, work.heads_s)
    head = pair - batch * work.heads
    TILE_Q: gl.constexpr = C.consumers * C.rows
    if C.packed:
        # Each warp searches by itself.
        lanes = gl.arange(
            0, LANES, layout=gl.BlockedLayout([LANES // 32], [32], [gl.num_warps()], [0])
        )
        batch, tile = find(tile, lanes, list_ptr, mask.plane, bounds.seqlen_q, TILE_Q)
    return batch, head, tile * TILE_Q


@gluon.jit
def hand_over(item, handed, place):
    """Store a tile's (batch row or sequence, head, first query) in shared
    memory, as number `place`."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(3):
        handed.index(3 * place + i).store(gl.full([1], item[i], gl.int32, layout=ONE))


@gluon.jit
def handed_over(handed, place):
    """Load the (batch row or sequence, head, first query) that `hand_over` stored for query
    buffer `place`. The caller must first wait for that buffer's barrier q_full, which
    completes only after the store."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    batch = gl.max(handed.index(3 * place).load(ONE), 0)
    head = gl.max(handed.index(3 * place + 1).load(ONE), 0)
    first_query = gl.max(handed.index(3 * place + 2).load(ONE), 0)
    return batch, head, first_query
