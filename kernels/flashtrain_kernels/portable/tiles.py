"""Triton helpers shared by the forward and backward kernels: loading a tile, the mask of a tile, which tiles to visit.

Legend: Sq queries, Sk keys, D head dimension (BLOCK_D: padded to a power of two). Every mask is described by one
interval
of the other side for each tile, and by a sub-interval inside it that needs no mask:

    first ... first_full ... past_full ... past        (in tiles)
      masked      unmasked       masked

A kernel runs one loop over the two masked pieces and one over the unmasked piece, and skips everything else. A new kind
of mask changes `key_tiles`, `query_tiles` and `sees`, and nothing else.
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
def sees(query, key, inside, low, high, seqlen_q, seqlen_k, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The mask of a tile; query and key are positions shaped to broadcast against each other.

    inside, low, high: with documents, the position of the one side that must lie in the other side's document.
    A key past Sk needs no test of its own where another rule already excludes it from every real query.
    """
    if CAUSAL:
        mask = key <= query + (seqlen_k - seqlen_q)
        if DOCUMENTS:
            mask = mask & (inside >= low) & (inside < high)
    else:
        if DOCUMENTS:
            mask = (inside >= low) & (inside < high)
        else:
            mask = (key < seqlen_k) & (query < seqlen_q)
    return mask


@triton.jit
def _as_tiles(low, full_low, full_high, high, BLOCK: tl.constexpr):
    """Positions -> tiles, so that first <= first_full <= past_full <= past whatever the intervals are."""
    low = tl.maximum(low, 0)
    high = tl.maximum(high, low)
    first = low // BLOCK
    past = (high + BLOCK - 1) // BLOCK
    first_full = (tl.maximum(full_low, 0) + BLOCK - 1) // BLOCK
    first_full = tl.minimum(tl.maximum(first_full, first), past)
    past_full = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK, first_full), past)
    return first, first_full, past_full, past


@triton.jit
def key_tiles(
    query,
    seqlen_q,
    seqlen_k,
    document_start,
    document_end,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Which key tiles the queries [query, query + BLOCK_Q) see. The document pointers are those of the batch row."""
    last = tl.minimum(query + BLOCK_Q, seqlen_q) - 1
    low = 0
    full_low = 0
    high = seqlen_k
    full_high = seqlen_k
    if CAUSAL:
        high = tl.minimum(high, last + seqlen_k - seqlen_q + 1)
        full_high = tl.minimum(full_high, query + seqlen_k - seqlen_q + 1)
    if DOCUMENTS:
        low = tl.load(document_start + query)
        full_low = tl.load(document_start + last)
        high = tl.minimum(high, tl.load(document_end + last))
        full_high = tl.minimum(full_high, tl.load(document_end + query))
    return _as_tiles(low, full_low, full_high, high, BLOCK_K)


@triton.jit
def query_tiles(
    key,
    seqlen_q,
    seqlen_k,
    document_start,
    document_end,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Which query tiles see the keys [key, key + BLOCK_K): the transpose of `key_tiles`."""
    last = tl.minimum(key + BLOCK_K, seqlen_k) - 1
    low = 0
    full_low = 0
    high = seqlen_q
    full_high = seqlen_q
    if CAUSAL:
        low = key - (seqlen_k - seqlen_q)
        full_low = last - (seqlen_k - seqlen_q)
    if DOCUMENTS:  # "same document" is symmetric, so a key's own boundaries bound its queries
        low = tl.maximum(low, tl.load(document_start + key))
        full_low = tl.maximum(full_low, tl.load(document_start + last))
        high = tl.load(document_end + last)
        full_high = tl.load(document_end + key)
    return _as_tiles(low, full_low, full_high, high, BLOCK_Q)


@triton.jit
def masked_tile(i, first, first_full, past_full):
    """The i-th tile of the two masked pieces taken one after the other."""
    left = first_full - first
    return tl.where(i < left, first + i, past_full + i - left)
