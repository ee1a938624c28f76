"""Triton helpers for one tile: loading and storing it, and which of its pairs are visible.

Legend: Sq queries, Sk keys, D head dimension (BLOCK_D: padded to a power of two). F: launch.Features.
"""

import triton
import triton.language as tl

# Keys (or queries) a step when a tile is computed again because of a NaN: small, so that this costs the fast path no
# register.
CAREFUL_BLOCK = tl.constexpr(16)


@triton.jit
def load_tile(
    base,
    stride_row,
    rows_left,
    CHECK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Read ROWS x BLOCK_D elements from `base` on; rows from rows_left on and columns past HEAD_DIM read as zero."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride_row + columns[None, :]
    if CHECK_ROWS:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers, mask=rows[:, None] < rows_left, other=0.0)
        else:
            tile = tl.load(pointers, mask=(rows[:, None] < rows_left) & (columns[None, :] < HEAD_DIM), other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def load_own_tile(base, stride_row, rows_left, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Read ROWS x BLOCK_D elements; rows from rows_left on repeat the last one, columns past HEAD_DIM read as zero.

    For the side that a program owns, whose rows past the end only reach rows of the result that are not stored. A mask
    here would be the stores' mask too, and stay in registers until then.
    """
    rows = tl.minimum(tl.arange(0, ROWS), rows_left - 1)
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride_row + columns[None, :]
    return tl.load(pointers) if HEAD_DIM == BLOCK_D else tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def store_tile(base, stride_row, rows_left, tile, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a ROWS x BLOCK_D tile in the pointer's dtype, never past rows_left or HEAD_DIM."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride_row + columns[None, :]
    mask = rows[:, None] < rows_left
    if HEAD_DIM != BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def has_nan(x):
    """One scalar: does the tile hold a NaN?"""
    return tl.max((x != x).to(tl.int32)) > 0


@triton.jit
def query_rows(query, batch, bounds, mask_ptr, plane, F: tl.constexpr):
    """What the mask says of each query (`query`: indices in any shape): its two intervals of key positions, its own
    position, and the first key position and the number of its sequence. Without a mask: position, 0 and the batch row
    follow from the index. Queries past Sq see nothing.
    """
    low = 0
    high = 0
    low2 = 0
    high2 = 0
    position = query + (bounds[1] - bounds[0])
    start = 0
    sequence = batch
    if F.intervals:
        real = query < bounds[0]
        low = tl.load(mask_ptr + query, mask=real, other=0)
        high = tl.load(mask_ptr + plane + query, mask=real, other=0)
        if F.intervals == 2:
            low2 = tl.load(mask_ptr + 5 * plane + query, mask=real, other=0)
            high2 = tl.load(mask_ptr + 6 * plane + query, mask=real, other=0)
        if F.alibi or F.dropout:
            position = tl.load(mask_ptr + 2 * plane + query, mask=real, other=0)
            start = tl.load(mask_ptr + 3 * plane + query, mask=real, other=0)
            sequence = tl.load(mask_ptr + 4 * plane + query, mask=real, other=0).to(tl.int64)
    return query, low, high, low2, high2, position, start, sequence


@triton.jit
def key_position(keys_ptr, key, seqlen_k, F: tl.constexpr):
    """The position of each key index; one past Sk has a position that nobody sees."""
    if F.key_positions:
        position = tl.load(keys_ptr + key, mask=key < seqlen_k, other=-2147483648)
    else:
        position = key
    return position


@triton.jit
def sees(rows, key, position, bounds, CHECK_KEYS: tl.constexpr, F: tl.constexpr):
    """The mask of a tile. rows: from `query_rows`, and key and its position: shaped to broadcast against each other.

    CHECK_KEYS: keys past Sk must be out; not where they are rows of the result, which are not stored.
    """
    query = rows[0]
    if CHECK_KEYS or not F.intervals:
        mask = key < bounds[1]
    if F.intervals:
        inside = (position >= rows[1]) & (position < rows[2])
        if F.intervals == 2:
            inside = inside | ((position >= rows[3]) & (position < rows[4]))
        mask = (mask & inside) if CHECK_KEYS else inside
    if F.left:
        mask = mask & (key >= query + bounds[2])
    if F.right:
        mask = mask & (key <= query + bounds[3])
    if not (F.intervals or F.left or F.right):
        mask = mask & (query < bounds[0])
    return mask
