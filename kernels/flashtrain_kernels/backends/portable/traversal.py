"""Which tiles of the other side a program visits: skip what no row of its own tile sees.

Two lists, each of tiles: the masked ones hold pairs that may be hidden, the full ones hold visible pairs only, so that
their loop tests nothing. Where the lists come from:

- a band (causal, window; or no bound at all): arithmetic. One interval of visible tiles, and inside it one of full
  tiles:      first ... first_full ... past_full ... past
                masked       full         masked
- a Mask: a row of 16 numbers from its plan (see masks.Plan), up to four runs of masked tiles and two of full ones;
- a BlockMask: explicit lists of blocks, each of one or more tiles.

All three come out as twelve numbers, `pieces`: masked count, p0, c1, p1, c2, p2, c3, p3, full count, f0, d1, f1. Masked
step i is tile p0 + i below c1, p1 + i - c1 below c2, and so on; full steps likewise.
"""

import triton
import triton.language as tl


@triton.jit
def _band(low, full_low, full_high, high, BLOCK: tl.constexpr):
    """Positions -> tiles, so that first <= first_full <= past_full <= past whatever the intervals are."""
    low = tl.maximum(low, 0)
    high = tl.maximum(high, low)
    first = low // BLOCK
    past = (high + BLOCK - 1) // BLOCK
    first_full = (tl.maximum(full_low, 0) + BLOCK - 1) // BLOCK
    first_full = tl.minimum(tl.maximum(first_full, first), past)
    past_full = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK, first_full), past)
    left = first_full - first
    masked = left + past - past_full
    return masked, first, left, past_full, masked, 0, masked, 0, past_full - first_full, first_full, 0, 0


@triton.jit
def _planned(row):
    """One row of a plan's table."""
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
    )  # fmt: skip


@triton.jit
def _listed(row, TILES: tl.constexpr):
    """A row of a block list: begin, split and end. p0 and f0 are places in the list."""
    begin = tl.load(row)
    split = tl.load(row + 1)
    end = tl.load(row + 2)
    masked = ((split - begin) * TILES).to(tl.int32)
    return masked, begin, 0, 0, 0, 0, 0, 0, ((end - split) * TILES).to(tl.int32), split, 0, 0


@triton.jit
def key_pieces(
    query, bounds, table, table_stride, F: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The key tiles that the queries [query, query + BLOCK_Q) see. table: that of this batch row (and head)."""
    if F.intervals:
        pieces = _planned(table + (query // BLOCK_Q) * table_stride)
    elif F.block_q:
        pieces = _listed(table + (query // F.block_q) * table_stride, F.block_k // BLOCK_K)
    else:
        seqlen_q, seqlen_k, left, right = bounds
        last = tl.minimum(query + BLOCK_Q, seqlen_q) - 1
        low = 0
        full_low = 0
        high = seqlen_k
        full_high = seqlen_k
        if F.left:
            low = query + left
            full_low = last + left
        if F.right:
            high = tl.minimum(high, last + right + 1)
            full_high = tl.minimum(full_high, query + right + 1)
        pieces = _band(low, full_low, full_high, high, BLOCK_K)
    return pieces


@triton.jit
def query_pieces(
    key, bounds, table, table_stride, F: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The query tiles that see the keys [key, key + BLOCK_K): the transpose of `key_pieces`."""
    if F.intervals:
        pieces = _planned(table + (key // BLOCK_K) * table_stride)
    elif F.block_q:
        pieces = _listed(table + (key // F.block_k) * table_stride, F.block_q // BLOCK_Q)
    else:
        seqlen_q, seqlen_k, left, right = bounds
        last = tl.minimum(key + BLOCK_K, seqlen_k) - 1
        low = 0
        full_low = 0
        high = seqlen_q
        full_high = seqlen_q
        if F.right:
            low = key - right
            full_low = last - right
        if F.left:
            high = tl.minimum(high, last - left + 1)
            full_high = tl.minimum(full_high, key - left + 1)
        pieces = _band(low, full_low, full_high, high, BLOCK_Q)
    return pieces


@triton.jit
def steps(pieces, MASKED: tl.constexpr, CAREFUL: tl.constexpr, SUB: tl.constexpr):
    """How many steps a loop takes. The careful loop visits every tile, in SUB parts."""
    if CAREFUL:
        count = (pieces[0] + pieces[8]) * SUB
    elif MASKED:
        count = pieces[0]
    else:
        count = pieces[8]
    return count


@triton.jit
def listed_block(
    i, pieces, list_ptr, MASKED: tl.constexpr, CAREFUL: tl.constexpr, F: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The block of step i of a block-sparse mask; 0 without one, and past the list's end.

    Loops ask for a step ahead: K and V cannot be fetched before their place is known.
    """
    block = 0
    if F.block_q and not CAREFUL:
        if MASKED:
            block = tl.load(list_ptr + pieces[1] + i // TILES, mask=i < pieces[0], other=0)
        else:
            block = tl.load(list_ptr + pieces[9] + i // TILES, mask=i < pieces[8], other=0)
    return block


@triton.jit
def _masked_step(i, pieces, F: tl.constexpr):
    tile = tl.where(i < pieces[2], pieces[1] + i, pieces[3] + i - pieces[2])
    if F.intervals:
        tile = tl.where(i < pieces[4], tile, pieces[5] + i - pieces[4])
        tile = tl.where(i < pieces[6], tile, pieces[7] + i - pieces[6])
    return tile


@triton.jit
def _full_step(i, pieces, F: tl.constexpr):
    if F.intervals:
        tile = tl.where(i < pieces[10], pieces[9] + i, pieces[11] + i - pieces[10])
    else:
        tile = pieces[9] + i
    return tile


@triton.jit
def position_of_step(
    i,
    block,
    pieces,
    list_ptr,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    F: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The first position of the tile of step i. BLOCK: the tile's size; STEP: the loop's, smaller in the careful one.
    block: `listed_block` of this step; TILES: tiles in a block.
    """
    if CAREFUL:
        SUB: tl.constexpr = BLOCK // STEP
        whole = i // SUB
        if F.block_q:
            place = tl.where(whole < pieces[0], pieces[1] + whole // TILES, pieces[9] + (whole - pieces[0]) // TILES)
            inside = tl.where(whole < pieces[0], whole, whole - pieces[0])
            tile = tl.load(list_ptr + place) * TILES + (inside - inside // TILES * TILES)
        else:
            tile = tl.where(whole < pieces[0], _masked_step(whole, pieces, F), _full_step(whole - pieces[0], pieces, F))
        position = tile * BLOCK + (i - whole * SUB) * STEP  # not %: the interpreter lacks it for this operand
    elif F.block_q:
        position = (block * TILES + i % TILES) * BLOCK
    elif MASKED:
        position = _masked_step(i, pieces, F) * BLOCK
    else:
        position = _full_step(i, pieces, F) * BLOCK
    return position
