"""Which tile of queries a program computes when: producer and consumers walk the same list.

B batch, H query heads. Heads come in sections whose keys and values fit the L2 cache together; within one the late
tiles of queries, which see most where there is a bound on the right, come first.

With PAIRED a program instead takes the longest tile of a head with its shortest, the second longest with the second
shortest, and so on: each pair costs the same, so that every program gets its share.

work: (H, tiles in all, heads a section, tiles of queries a head, and how to divide by tiles * section, by the section
and by H: `divisor`). With PAIRED: pairs in all, and pairs a head in place of the section.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def divisor(number: int) -> tuple[int, int]:
    """(multiplier, shift) to divide integers of [0, 2^31) by `number` without dividing: see `_divide`."""
    bits = (number - 1).bit_length()
    multiplier = -(-(1 << (31 + bits)) // number)  # below 2^32: an int32 for Triton, as the same bits
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
    """How many tiles of queries this program computes."""
    programs = gl.num_programs(0)
    whole = work[1] // programs
    rest = work[1] - whole * programs
    if PAIRED:
        count = 2 * (whole + (gl.program_id(0) < rest).to(gl.int32))
    else:
        count = whole + (_place_in_round(whole) < rest).to(gl.int32)
    return count


@gluon.jit
def _place_in_round(number):
    """Programs take their turn from the first to the last and back again, so that each gets its share of long tiles."""
    program = gl.program_id(0)
    return gl.where(number % 2 == 0, program, gl.num_programs(0) - 1 - program)


@gluon.jit
def work_item(number, work, TILE_Q: gl.constexpr, PAIRED: gl.constexpr):
    """(batch, head, first query) of this program's tile of queries of that number. A first query past Sq, which the odd
    one out is paired with, is no work.
    """
    heads, total, section, tiles, block_m, block_s, section_m, section_s, heads_m, heads_s = work
    if PAIRED:
        index = gl.minimum((number // 2) * gl.num_programs(0) + gl.program_id(0), total - 1)
        pair = _divide(index, section_m, section_s)
        row = index - pair * section
        tile = gl.where(number % 2 == 0, 2 * section - 1 - row, row)
    else:
        index = gl.minimum(number * gl.num_programs(0) + _place_in_round(number), total - 1)
        block = _divide(index, block_m, block_s)
        rest = index - block * (tiles * section)
        row = _divide(rest, section_m, section_s)
        pair = block * section + rest - row * section
        tile = tiles - 1 - row
    batch = _divide(pair, heads_m, heads_s)
    return batch, pair - batch * heads, tile * TILE_Q
