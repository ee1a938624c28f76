"""Which tile of queries a program computes when: producer and consumers walk the same list. And which keys
it visits and sees.

B batch, H query heads. Heads come in sections whose keys and values fit the L2 cache together; within one the late
tiles of queries, which see most where there is a bound on the right, come first.

Of packed sequences (C.packed) the tiles of each are its own, and their slots are in the place of tiles: sequences.py.
Late slots come first: within a sequence the longest, and at last the shortest of all. With C.ranked the longest of all
sequences come first, so that programs that do several tiles each get their share. To find such a tile takes a
microsecond or two: the producer does it, beside the tiles before, and hands it to the consumers.

With PAIRED a program instead takes the longest tile of a head with its shortest, the second longest with the second
shortest, and so on: each pair costs the same, so that every program gets its share.

Which key tiles a tile of queries visits, and which of a tile's pairs are visible, is the portable path's traversal with
Gluon's layouts. Sq queries, Sk keys. bounds: portable.tiles.Bounds. F: portable.launch.Features.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.traversal import key_pieces, position_of_step
from .assembly import opaque
from .sequences import LANES, find, find_by_rank, sequence_of

# The position of what is no key: `position < high` is false of it, whatever a query's interval is.
_NOWHERE = gl.constexpr(2**31 - 1)


class Work(NamedTuple):
    """H, tiles in all, heads a section, tiles of queries a head, and how to divide by tiles * section (block), by the
    section and by H: `divisor`'s multiplier and shift. With PAIRED: pairs in all, and pairs a head for the section."""

    heads: Any
    total: Any
    section: Any
    tiles: Any
    block_m: Any
    block_s: Any
    section_m: Any
    section_s: Any
    heads_m: Any
    heads_s: Any


class MaskTables(NamedTuple):
    """Of a Mask or BlockMask: the table of tiles and its strides by batch row, head and tile; of Mask.queries the
    stride of a batch row, and that of one of its numbers. Of packed sequences: where their keys end, as table, and N,
    as plane (where their queries end is the list). Of a Mask with positions of keys these are the list."""

    table: Any
    batch: Any
    head: Any
    tile: Any
    rows_batch: Any
    plane: Any


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
    whole = work.total // programs
    rest = work.total - whole * programs
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
def work_item(number, work, bounds, mask, list_ptr, C: gl.constexpr):
    """(batch, head, first query) of this program's tile of queries of that number. A first query past Sq, which the odd
    one out is paired with, is no work. C.packed: (sequence, head, first query within the sequence).
    """
    TILE_Q: gl.constexpr = C.consumers * C.rows
    if C.paired:
        index = gl.minimum((number // 2) * gl.num_programs(0) + gl.program_id(0), work.total - 1)
        pair = _divide(index, work.section_m, work.section_s)
        row = index - pair * work.section
        tile = gl.where(number % 2 == 0, 2 * work.section - 1 - row, row)
    else:
        index = gl.minimum(number * gl.num_programs(0) + _place_in_round(number), work.total - 1)
        block = _divide(index, work.block_m, work.block_s)
        rest = index - block * (work.tiles * work.section)
        row = _divide(rest, work.section_m, work.section_s)
        pair = block * work.section + rest - row * work.section
        tile = work.tiles - 1 - row
    batch = _divide(pair, work.heads_m, work.heads_s)
    head = pair - batch * work.heads
    if C.packed:
        # Each warp searches by itself.
        lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([LANES // 32], [32], [gl.num_warps()], [0]))
        if C.ranked:
            rank = work.tiles - 1 - tile
            batch, tile = find_by_rank(rank, lanes, list_ptr, mask.plane, bounds.seqlen_q, TILE_Q)
        else:
            batch, tile = find(tile, lanes, list_ptr, mask.plane, bounds.seqlen_q, TILE_Q)
    return batch, head, tile * TILE_Q


@gluon.jit
def hand_over(item, handed, place):
    """Write an item where the consumer of the queries of that place reads it. What follows must release it."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(3):
        handed.index(3 * place + i).store(gl.full([1], item[i], gl.int32, layout=ONE))


@gluon.jit
def handed_over(handed, place):
    """The item that was handed over with the queries of that place, which have arrived."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    batch = gl.max(handed.index(3 * place).load(ONE), 0)
    head = gl.max(handed.index(3 * place + 1).load(ONE), 0)
    first_query = gl.max(handed.index(3 * place + 2).load(ONE), 0)
    return batch, head, first_query


@gluon.jit
def origin(batch, bounds, mask, list_ptr, PACKED: gl.constexpr):
    """Where an item's queries and keys are counted from, and how many there are: (row of the batch, first query, first
    key, Bounds)."""
    first_query = 0
    first_key = 0
    if PACKED:
        first_query, first_key, bounds = sequence_of(batch, list_ptr, mask.table, mask.plane, bounds, False)
        batch = 0
    return batch, first_query, first_key, bounds


@gluon.jit
def pieces_of(batch, head, first_query, bounds, mask, F: gl.constexpr, TILE_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """The key tiles of a tile of queries, and where their list starts; see portable/traversal.py."""
    table = mask.table
    if F.intervals or F.block_q:
        table += batch.to(gl.int64) * mask.batch + head.to(gl.int64) * mask.head
    return key_pieces(first_query, bounds, table, mask.tile, F, TILE_Q, BLOCK_K)


@gluon.jit
def place(step, pieces, list_ptr, F: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr):
    """The first key of the tile of a step: the masked tiles first, then the full ones."""
    masked = pieces.masked
    if F.block_q:
        early = step < masked
        first = gl.where(early, pieces.p0, pieces.f0)
        inside = gl.where(early, step, step - masked)
        real = step < masked + pieces.full
        key = (gl.load(list_ptr + first + inside // TILES, mask=real, other=0) * TILES + inside % TILES) * BLOCK_K
    else:
        early = position_of_step(step, 0, pieces, list_ptr, True, False, F, TILES, BLOCK_K, BLOCK_K)
        late = position_of_step(step - masked, 0, pieces, list_ptr, False, False, F, TILES, BLOCK_K, BLOCK_K)
        key = gl.where(step < masked, early, late)
    return key


@gluon.jit
def interval_rows(row, batch, bounds, mask, rows_ptr, F: gl.constexpr):
    """The intervals of key positions that each query sees; zeros without a Mask."""
    low = row
    high = row
    low2 = row
    high2 = row
    if F.intervals:
        real = row < bounds.seqlen_q
        base = rows_ptr + batch.to(gl.int64) * mask.rows_batch
        low = gl.load(base + row, mask=real, other=0)
        high = gl.load(base + mask.plane + row, mask=real, other=0)
        if F.intervals == 2:
            low2 = gl.load(base + 5 * mask.plane + row, mask=real, other=0)
            high2 = gl.load(base + 6 * mask.plane + row, mask=real, other=0)
    return low, high, low2, high2


@gluon.jit
def key_position(key, past, batch, bounds, mask, list_ptr, F: gl.constexpr):
    """The position of each key, which a Mask may give (then as list_ptr); of keys from `past` on, where it does, one
    that no query sees."""
    if F.key_positions:
        # Mask.keys is contiguous, and has as many rows as Mask.queries: one, or one for each of the batch.
        row = gl.where(mask.rows_batch > 0, batch, 0).to(gl.int64)
        key = gl.load(list_ptr + row * bounds.seqlen_k + key, mask=key < past, other=_NOWHERE)
    return key


@gluon.jit
def sees(query, key, bounds, mask_rows, F: gl.constexpr):
    """Does the mask let a query see a key (its position)? Shapes broadcast; keys past Sk are not looked for."""
    seen = query < bounds.seqlen_q
    if F.left:
        seen = seen & (key >= query + bounds.left)
    if F.right:
        seen = seen & (key <= query + bounds.right)
    if F.intervals:
        low, high, low2, high2 = mask_rows
        inside = (key >= low) & (key < high)
        if F.intervals == 2:
            inside = inside | ((key >= low2) & (key < high2))
        seen = seen & inside
    return seen


@gluon.jit
def hide(
    scores, row, step, shown, item, bounds, mask, list_ptr, rows_ptr, F: gl.constexpr, TILE_Q: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """-inf for the hidden pairs of the tile of scores of a step. shown: false where it is not to be seen at all.

    Where the tile lies and what its rows see is found out anew: kept from step to step it would cost the
    loop registers.
    """
    LAYOUT: gl.constexpr = scores.type.layout
    BLOCK_K: gl.constexpr = scores.shape[1]
    batch, head, first_query = item
    if F.intervals or F.block_q or not F.right:
        zero = opaque(gl.to_tensor(0))
        first_query += zero
        row += zero
        step += zero
    pieces = pieces_of(batch, head, first_query, bounds, mask, F, TILE_Q, BLOCK_K)
    first_key = place(step, pieces, list_ptr, F, TILES, BLOCK_K)
    # Everything that is the same along a row is settled there: one comparison a pair for each bound is left. Rows past
    # Sq may see anything, as they are not stored.
    key = first_key + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    past = gl.where(shown, bounds.seqlen_k, 0)
    if F.key_positions:  # with intervals only, never with a band
        index = first_key + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
        key = key_position(index, past, batch, bounds, mask, list_ptr, F)[None, :]
        past = _NOWHERE
    if F.intervals:
        low, high, low2, high2 = interval_rows(row, batch, bounds, mask, rows_ptr, F)
        seen = (key >= low[:, None]) & (key < gl.minimum(high, past)[:, None])
        if F.intervals == 2:
            seen = seen | ((key >= low2[:, None]) & (key < gl.minimum(high2, past)[:, None]))
    elif F.right:
        seen = key < gl.minimum(row + (bounds.right + 1), past)[:, None]
    else:
        seen = key < past
    if F.left:
        seen = seen & (key >= (row + bounds.left)[:, None])
    return gl.where(seen, scores, float("-inf"))
