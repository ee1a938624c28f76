"""Triton helpers for one tile: load and store it, decide which of its pairs are visible,
and change its scores.

Sq queries, Sk keys, D head dimension (BLOCK_D: padded to a power of two). F: launch.Features. call:
launch.Arguments. table: launch.Table.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dropout_rng import group_of, kept_pairs, stream_of, words

# Keys (or queries) a step when a tile is computed again because of a NaN: small, to cost the
# fast path no register.
RECOMPUTE_BLOCK = tl.constexpr(16)
_LOG2E = tl.constexpr(1.4426950408889634)


class Strided(NamedTuple):
    """A pointer to a (B, S, heads, D) tensor whose last stride is 1, with its other strides."""

    pointer: Any
    batch: Any
    row: Any
    head: Any


class Bounds(NamedTuple):
    """Sq, Sk, and the window (left, right): query i may see the keys i + left to i +
    right (if Features has it)."""

    seqlen_q: Any
    seqlen_k: Any
    left: Any
    right: Any


class Rows(NamedTuple):
    """What each query of a tile sees by the mask, its position and its ALiBi slope; all
    tensors have one shape."""

    query: Any  # its index
    low: Any  # the intervals of key positions that a Mask lets it see
    high: Any
    low2: Any
    high2: Any
    position: Any  # its own, among the keys
    start: Any  # the first key position of its sequence
    sequence: Any  # and that sequence's number
    slope: Any  # ALiBi's * log2(e), one number unless sequences have their own


class Head(NamedTuple):
    """The options of one head, as its program needs them; see launch.Arguments."""

    scale_log2: Any
    cap_in: Any
    cap_log2: Any
    slopes: Any  # a pointer to the head's
    slope_row: Any
    bias: Any  # a pointer to the batch row's and head's
    bias_q: Any
    bias_k: Any
    seed: Any
    number: Any  # the head's, that random numbers are keyed by
    sequence: Any  # what is added to a sequence's number
    threshold: Any


class Keys(NamedTuple):
    """Pointers to the keys and values that one query head sees, with strides."""

    k: Any  # pointers, and strides by row
    k_row: Any
    v: Any
    v_row: Any
    positions: Any
    blocks: Any  # the list of a block-sparse mask


@triton.jit
def load_tile(
    base, stride_row, rows_left, CHECK_ROWS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load a (ROWS, BLOCK_D) tile whose first row is at `base`; columns past HEAD_DIM are 0, and
    with CHECK_ROWS the rows from rows_left on (else all rows must exist)."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride_row + columns[None, :]
    if CHECK_ROWS:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers, mask=rows[:, None] < rows_left, other=0.0)
        else:
            tile = tl.load(
                pointers,
                mask=(rows[:, None] < rows_left) & (columns[None, :] < HEAD_DIM),
                other=0.0,
            )
    else:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def outer(a, b, left, C: tl.constexpr):
    """Return a b^T, of tiles with D or Dv columns. left: a number above 0."""
    # A branch that is always taken hides from Triton that another product takes the result. It
    # would let all warps have rows of their own, and compute the rows of a short tile twice.
    if C.apart:
        products = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
        if left > 0:
            products = tl.dot(a, tl.trans(b), input_precision=C.precision)
    else:
        products = tl.dot(a, tl.trans(b), input_precision=C.precision)
    return products


@triton.jit
def load_own_tile(
    base, stride_row, rows_left, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a (ROWS, BLOCK_D) tile as `load_tile` does, but rows from rows_left on
    repeat row rows_left - 1."""
    # For the side that a program owns, whose rows past the end only reach rows of the result that
    # are not stored. A mask here would be the stores' mask too, and stay in registers until then.
    rows = tl.minimum(tl.arange(0, ROWS), rows_left - 1)
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride_row + columns[None, :]
    return (
        tl.load(pointers)
        if HEAD_DIM == BLOCK_D
        else tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)
    )


@triton.jit
def store_tile(
    base,
    stride_row,
    rows_left,
    tile,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a ROWS x BLOCK_D tile in the pointer's dtype, except rows from rows_left on and
    columns past HEAD_DIM."""
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
    """Return one scalar: whether the tile holds a NaN."""
    return tl.max((x != x).to(tl.int32)) > 0


@triton.jit
def query_rows(query, batch, bounds, mask_ptr, plane, F: tl.constexpr):
    """Load the Rows (mask, position) of the queries with indices `query`, of any shape;
    their ALiBi slope is 0. mask_ptr: Mask.queries of a batch row; plane: its stride between
    two of its 5 or 7 rows."""
    # Without a mask: position, 0 and the batch row follow from the index. Queries
    # past Sq see nothing.
    low = 0
    high = 0
    low2 = 0
    high2 = 0
    position = query + (bounds.seqlen_k - bounds.seqlen_q)
    start = 0
    sequence = batch
    if F.intervals:
        real = query < bounds.seqlen_q
        low = tl.load(mask_ptr + query, mask=real, other=0)
        high = tl.load(mask_ptr + plane + query, mask=real, other=0)
        if F.intervals == 2:
            low2 = tl.load(mask_ptr + 5 * plane + query, mask=real, other=0)
            high2 = tl.load(mask_ptr + 6 * plane + query, mask=real, other=0)
        if F.alibi or F.dropout:
            position = tl.load(mask_ptr + 2 * plane + query, mask=real, other=0)
            start = tl.load(mask_ptr + 3 * plane + query, mask=real, other=0)
            sequence = tl.load(mask_ptr + 4 * plane + query, mask=real, other=0).to(tl.int64)
    return Rows(query, low, high, low2, high2, position, start, sequence, 0.0)


@triton.jit
def with_slope(rows, head, F: tl.constexpr):
    """Return `rows` with each query's ALiBi slope, times log2(e), filled in.
    rows: a Rows; head: a Head."""
    slope = 0.0
    if F.alibi:
        slope = (
            tl.load(head.slopes + rows.sequence * head.slope_row)
            if F.slope_rows
            else tl.load(head.slopes)
        )
        slope *= _LOG2E
    return Rows(
        rows.query,
        rows.low,
        rows.high,
        rows.low2,
        rows.high2,
        rows.position,
        rows.start,
        rows.sequence,
        slope,
    )


@triton.jit
def key_position(keys_ptr, key, seqlen_k, F: tl.constexpr):
    """Return each key's position: from Mask.keys at keys_ptr (past Sk the least int32),
    without these its index."""
    if F.key_positions:
        position = tl.load(keys_ptr + key, mask=key < seqlen_k, other=-2147483648)
    else:
        position = key
    return position


@triton.jit
def sees(rows, key, position, bounds, CHECK_KEYS: tl.constexpr, F: tl.constexpr):
    """Return a tile's mask, True where a query sees a key. rows (a Rows), key and position (the
    keys' indices and positions) broadcast to the tile. CHECK_KEYS: hide keys past Sk too; needless
    if their results are not stored."""
    if CHECK_KEYS or not F.intervals:
        mask = key < bounds.seqlen_k
    if F.intervals:
        inside = (position >= rows.low) & (position < rows.high)
        if F.intervals == 2:
            inside = inside | ((position >= rows.low2) & (position < rows.high2))
        mask = (mask & inside) if CHECK_KEYS else inside
    if F.left:
        mask = mask & (key >= rows.query + bounds.left)
    if F.right:
        mask = mask & (key <= rows.query + bounds.right)
    if not (F.intervals or F.left or F.right):
        mask = mask & (rows.query < bounds.seqlen_q)
    return mask


@triton.jit
def bounds_of(call):
    return Bounds(call.seqlen_q, call.seqlen_k, call.left, call.right)


@triton.jit
def keys_of(k, v, call, table, batch, head, GROUP: tl.constexpr):
    """Return the Keys that query head number `head` of a batch row sees. k, v:
    Strided; GROUP: H / K."""
    return Keys(
        k.pointer + batch * k.batch + (head // GROUP) * k.head, k.row,
        v.pointer + batch * v.batch + (head // GROUP) * v.head, v.row,
        call.positions + batch * call.position_batch,
        table.blocks,
    )  # fmt: skip


@triton.jit
def head_options(head, bias, call, F: tl.constexpr):
    """Return the Head (ALiBi slope, bias, dropout) of query head `head`. bias:
    pointer to that head's bias."""
    seed = 0
    sequence = 0
    number = head
    if F.dropout:
        seed = tl.load(call.seed)
        sequence = tl.load(call.seed + 1)
        number = (head + tl.load(call.seed + 2)).to(tl.int32)
    return Head(
        call.scale_log2, call.cap_in, call.cap_log2, call.slopes + head, call.slope_row, bias,
        call.bias_q,
        call.bias_k, seed, number, sequence, call.threshold,
    )  # fmt: skip


@triton.jit
def tanh(x):
    # Exact at both ends: exp(2x) overflows to inf, or vanishes. Near 0 the error stays below
    # 1e-7 of the softcap.
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def load_bias(head, rows, key, bounds):
    """Load the bias of the queries `rows` (a Rows) and key indices `key`, as
    float32; 0 past Sq and Sk."""
    pointers = head.bias + rows.query.to(tl.int64) * head.bias_q + key.to(tl.int64) * head.bias_k
    inside = (rows.query < bounds.seqlen_q) & (key < bounds.seqlen_k)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def logits(scores, head, rows, key, first_key, position, bounds, F: tl.constexpr):
    """Return (base-2 logits, tanh) from `scores` = q k^T: after scale or softcap, ALiBi and bias;
    the softcap's tanh is for its derivative (0 without softcap). first_key: index of the tile's
    first key; others: see Head, Rows, Bounds."""
    capped = 0.0
    if F.softcap:
        capped = tanh(scores * head.cap_in)
        x = capped * head.cap_log2
    else:
        x = scores * head.scale_log2
    if F.alibi:
        # Converted before they meet: one conversion a row and a column, exact up to 2^24 from
        # the tile's first key.
        x -= rows.slope * tl.abs(
            (rows.position - first_key).to(tl.float32) - (position - first_key).to(tl.float32)
        )
    if F.bias:
        bias = load_bias(head, rows, key, bounds)
        # -inf hides the pair, even where the score is NaN.
        x = tl.where(bias == float("-inf"), float("-inf"), x + bias * _LOG2E)
    return x, capped


@triton.jit
def kept(
    head, rows, first_key, position, TRANSPOSED: tl.constexpr, F: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of booleans: True where dropout keeps the weight, as philox.keep_mask decides.
    rows: the tile's queries (Rows); first_key: index of its first key; position: its keys'
    positions; TRANSPOSED: the tile has a row a key, not a row a query."""
    query = (rows.position - rows.start).to(tl.int32)
    stream = stream_of(head.seed, (rows.sequence + head.sequence).to(tl.int32), head.number)
    if F.intervals:
        # Sequences begin anywhere, so keys that are 8 apart share no call here:
        # each pair makes its own.
        keep = kept_pairs(stream, query, (position - rows.start).to(tl.int32), head.threshold)
    else:
        # Of each 16 keys the first 8, whose calls are the others' too.
        group = (tl.cast(first_key // 2, tl.int32) + tl.arange(0, BLOCK_K // 2)).to(
            tl.uint32, bitcast=True
        )
        if TRANSPOSED:
            first, second = words(stream, group_of(query), group[:, None])
        else:
            first, second = words(stream, group_of(query), group[None, :])
        word = tl.where((query & 8) == 0, first, second)
        halves = tl.join(word & 0xFFFF, word >> 16).to(tl.int32)
        if TRANSPOSED:
            halves = tl.permute(tl.reshape(halves, (BLOCK_K // 16, 8, BLOCK_Q, 2)), (0, 3, 1, 2))
            keep = tl.reshape(halves, (BLOCK_K, BLOCK_Q)) >= head.threshold
        else:
            halves = tl.permute(tl.reshape(halves, (BLOCK_Q, BLOCK_K // 16, 8, 2)), (0, 1, 3, 2))
            keep = tl.reshape(halves, (BLOCK_Q, BLOCK_K)) >= head.threshold
    return keep
