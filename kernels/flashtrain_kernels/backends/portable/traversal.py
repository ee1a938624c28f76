"""Which tiles a program visits: the tiles of keys that its queries see or, for dK and dV, of
queries that see its keys.

`Pieces` hold them. They follow from a window by arithmetic (masked, full, masked), from a Mask by a
row of its plan (masks.Plan), from a BlockMask by its lists of blocks.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pieces(NamedTuple):
    """The tiles that a program visits: up to four runs of consecutive masked tiles (some pairs
    may be hidden), and up to two runs of full tiles (every query sees every key, so no test is
    needed). See masks.Plan."""

    # How many: masked step i is tile p0 + i below step c1, p1 + i - c1 below c2, and so on.
    masked: Any
    p0: Any
    c1: Any
    p1: Any
    c2: Any
    p2: Any
    c3: Any
    p3: Any
    full: Any  # how many: full step i is tile f0 + i below step d1, then f1 + i - d1
    f0: Any
    d1: Any
    f1: Any


@triton.jit
def _band(low, full_low, full_high, high, BLOCK: tl.constexpr):
    """Return the Pieces of the positions [low, high) in tiles of BLOCK, of which those within
    [full_low, full_high) are full. The results are ordered, first <= first_full <= past_full <=
    past, for any arguments."""
    low = tl.maximum(low, 0)
    high = tl.maximum(high, low)
    first = low // BLOCK
    past = (high + BLOCK - 1) // BLOCK
    first_full = (tl.maximum(full_low, 0) + BLOCK - 1) // BLOCK
    first_full = tl.minimum(tl.maximum(first_full, first), past)
    past_full = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK, first_full), past)
    left = first_full - first
    masked = left + past - past_full
    return Pieces(
        masked,
        first,
        left,
        past_full,
        masked,
        0,
        masked,
        0,
        past_full - first_full,
        first_full,
        0,
        0,
    )


@triton.jit
def _planned(row):
    """Load the Pieces in one row of a plan's table (masks.Plan)."""
    return Pieces(
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10),
        tl.load(row + 11),
    )  # fmt: skip


@triton.jit
def _listed(row, TILES: tl.constexpr):
    """Load the Pieces in a row (begin, split, end) of a BlockMask. Their p0 and f0 are indices into
    its list of blocks, not tiles."""
    begin = tl.load(row)
    split = tl.load(row + 1)
    end = tl.load(row + 2)
    masked = ((split - begin) * TILES).to(tl.int32)
    return Pieces(
        masked, begin, 0, 0, 0, 0, 0, 0, ((end - split) * TILES).to(tl.int32), split, 0, 0
    )


@triton.jit
def in_band(
    own, past, limit, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Return, as Pieces, the tiles below `limit` of keys for queries [own, past), or of queries for
    keys [own, past), that a window reaches: from `before` (if HAS_BEFORE) to `after` (if HAS_AFTER)
    of each position."""
    low = 0
    full_low = 0
    high = limit
    full_high = limit
    if HAS_BEFORE:
        low = own + before
        full_low = past - 1 + before
    if HAS_AFTER:
        high = tl.minimum(high, past + after)
        full_high = tl.minimum(full_high, own + after + 1)
    return _band(low, full_low, full_high, high, BLOCK)


@triton.jit
def key_pieces(
    query, bounds, table, table_stride, F: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return which tiles of keys the queries [query, query + BLOCK_Q) see, as Pieces. table:
    pointer to a launch.Table's rows for this batch row and head, of stride table_stride (read with
    a Mask or a BlockMask only)."""
    if F.intervals:
        pieces = _planned(table + (query // BLOCK_Q) * table_stride)
    elif F.block_q:
        pieces = _listed(table + (query // F.block_q) * table_stride, F.block_k // BLOCK_K)
    else:
        past = tl.minimum(query + BLOCK_Q, bounds.seqlen_q)
        pieces = in_band(
            query, past, bounds.seqlen_k, bounds.left, bounds.right, F.left, F.right, BLOCK_K
        )
    return pieces


@triton.jit
def query_pieces(
    key, bounds, table, table_stride, F: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return which tiles of queries see one of the keys [key, key + BLOCK_K), as Pieces.
    bounds: tiles.Bounds; table: pointer to a launch.Table's rows for this batch row and head,
    of stride table_stride."""
    if F.intervals:
        pieces = _planned(table + (key // BLOCK_K) * table_stride)
    elif F.block_q:
        pieces = _listed(table + (key // F.block_k) * table_stride, F.block_q // BLOCK_Q)
    else:
        past = tl.minimum(key + BLOCK_K, bounds.seqlen_k)
        pieces = in_band(
            key, past, bounds.seqlen_q, -bounds.right, -bounds.left, F.right, F.left, BLOCK_Q
        )
    return pieces


@triton.jit
def steps(pieces, MASKED: tl.constexpr, RECOMPUTE: tl.constexpr, SUB: tl.constexpr):
    """Return how many steps a loop over the masked (MASKED) or over the full tiles of
    `pieces` takes, one tile a step. RECOMPUTE: the loop visits masked and full tiles,
    in SUB steps a tile."""
    if RECOMPUTE:
        count = (pieces.masked + pieces.full) * SUB
    elif MASKED:
        count = pieces.masked
    else:
        count = pieces.full
    return count


@triton.jit
def listed_block(
    i, pieces, list_ptr, MASKED: tl.constexpr, RECOMPUTE: tl.constexpr, F: tl.constexpr,
    TILES: tl.constexpr
):  # fmt: skip
    """Return the number of the block that step i of a loop over `pieces` visits, read from a
    BlockMask's list at list_ptr (Table.blocks): of partly visible blocks if MASKED, else of full
    ones. It is 0 without a BlockMask, past the last step, and in the loop that recomputes all tiles
    (RECOMPUTE). A block has TILES tiles."""
    # Loops look up one step ahead: K and V cannot be fetched before their place is known.
    block = 0
    if F.block_q and not RECOMPUTE:
        if MASKED:
            block = tl.load(list_ptr + pieces.p0 + i // TILES, mask=i < pieces.masked, other=0)
        else:
            block = tl.load(list_ptr + pieces.f0 + i // TILES, mask=i < pieces.full, other=0)
    return block


@triton.jit
def _masked_step(i, pieces, F: tl.constexpr):
    tile = tl.where(i < pieces.c1, pieces.p0 + i, pieces.p1 + i - pieces.c1)
    if F.intervals:
        tile = tl.where(i < pieces.c2, tile, pieces.p2 + i - pieces.c2)
        tile = tl.where(i < pieces.c3, tile, pieces.p3 + i - pieces.c3)
    return tile


@triton.jit
def _full_step(i, pieces, F: tl.constexpr):
    if F.intervals:
        tile = tl.where(i < pieces.d1, pieces.f0 + i, pieces.f1 + i - pieces.d1)
    else:
        tile = pieces.f0 + i
    return tile


@triton.jit
def position_of_step(
    i, block, pieces, list_ptr, MASKED: tl.constexpr, RECOMPUTE: tl.constexpr, F: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the first query or key of the tile that step i of a loop over `pieces` visits. MASKED:
    the loop visits masked tiles, else full ones; RECOMPUTE: both, STEP rows a step; BLOCK: rows a
    tile; block: `listed_block` of step i; list_ptr, TILES: its arguments."""
    if RECOMPUTE:
        SUB: tl.constexpr = BLOCK // STEP
        whole = i // SUB
        if F.block_q:
            place = tl.where(
                whole < pieces.masked,
                pieces.p0 + whole // TILES,
                pieces.f0 + (whole - pieces.masked) // TILES,
            )
            inside = tl.where(whole < pieces.masked, whole, whole - pieces.masked)
            tile = tl.load(list_ptr + place) * TILES + (inside - inside // TILES * TILES)
        else:
            tile = tl.where(
                whole < pieces.masked,
                _masked_step(whole, pieces, F),
                _full_step(whole - pieces.masked, pieces, F),
            )
        # Not %: the interpreter lacks it for this operand.
        position = tile * BLOCK + (i - whole * SUB) * STEP
    elif F.block_q:
        position = (block * TILES + i % TILES) * BLOCK
    elif MASKED:
        position = _masked_step(i, pieces, F) * BLOCK
    else:
        position = _full_step(i, pieces, F) * BLOCK
    return position
