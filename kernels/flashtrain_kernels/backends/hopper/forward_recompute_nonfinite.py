"""A tile of queries recomputed key by key without its masked pairs, because a NaN came out:
slow, and rarely needed.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.dropout_rng import kept_pairs, load_stream
from .alibi import load_slope
from .assembly import exp2_few, note, noted, opaque, reciprocal
from .dropout_rng import keep_scale
from .forward_masks import interval_rows, key_position, origin, pieces_of, place, sees
from .triton_compat import AGAIN

_NOTHING = gl.constexpr(-3.0e38)


@gluon.jit
def note_origin(origins, PLACE: gl.constexpr, pointer, strides):
    """Store a tensor's address and (batch, sequence, head) strides in shared
    `origins`, from index PLACE on."""
    note(origins, PLACE, (pointer, strides[0], strides[1], strides[2]))


@gluon.jit
def rows_of(origins, PLACE: gl.constexpr, batch, head, DTYPE: gl.constexpr):
    """Return (pointer to a head's first row, stride between rows) of the tensor of
    `note_origin` at index PLACE."""
    base = noted(origins, PLACE).to(gl.pointer_type(DTYPE))
    base += batch.to(gl.int64) * noted(origins, PLACE + 1) + head.to(gl.int64) * noted(
        origins, PLACE + 3
    )
    return base, noted(origins, PLACE + 2)


@gluon.jit
def attend_tile_again(item, W: gl.constexpr, arguments, F: gl.constexpr, C: gl.constexpr):
    """Recompute and store the rows of consumer warpgroup W of a tile of queries. arguments:
    forward_warps.consume's."""
    descriptors = arguments[0]
    DTYPE: gl.constexpr = descriptors[0].dtype
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = min(C.block_v, AGAIN)  # what the registers hold
    PARTS: gl.constexpr = C.block_v // COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row = item[2] + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(PARTS):
        _attend_again(row, item, arguments[3:], DTYPE, F, C, LAYOUT, part * COLUMNS)


@gluon.jit
def _attend_again(
    row, item, arguments, DTYPE: gl.constexpr, F: gl.constexpr, C: gl.constexpr,
    LAYOUT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Recompute and store lse and, from column FIRST on, as many columns of out as LAYOUT has, for
    the queries `row` of tile `item`: (batch row or packed sequence, head, first query). origins:
    from note_origin."""
    work, bounds, mask, list_ptr, rows_ptr, lse_ptr, terms, origins, _handed = arguments
    scale = terms
    if F.softcap:
        scale = terms[8]
    BLOCK_K: gl.constexpr = C.block_k
    TILES: gl.constexpr = C.tiles
    TILE_Q: gl.constexpr = C.consumers * C.rows
    batch, head, first_query = item
    zero = opaque(gl.to_tensor(0))
    batch += zero
    first_query += zero
    row += zero
    total_q = bounds.seqlen_q
    if F.dropout:
        stream = load_stream(rows_ptr, batch, head)
    if F.alibi:
        slope = load_slope(rows_ptr, mask.rows_batch, batch, mask.plane, head, C.packed) / scale
    batch, queries_at, keys_at, bounds = origin(batch, bounds, mask, list_ptr, C.packed)
    pieces = pieces_of(batch, head, first_query, bounds, mask, F, TILE_Q, BLOCK_K)
    mask_rows = interval_rows(row, batch, bounds, mask, rows_ptr, F)
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = LAYOUT.instr_shape[1]
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)) + zero
    inside = column < C.value_dim
    # Queries and keys are read again for each product, a few columns at a time: registers
    # belong to the output.
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    narrow_row = gl.convert_layout(row, gl.SliceLayout(1, NARROW))
    narrow_column = gl.arange(0, 16, layout=gl.SliceLayout(0, NARROW)) + zero
    q_base, q_stride = rows_of(origins, 0, batch, head, DTYPE)
    q_tile = (
        q_base + (queries_at + narrow_row).to(gl.int64)[:, None] * q_stride + narrow_column[None, :]
    )
    q_real = (narrow_row < bounds.seqlen_q)[:, None]
    k_base, k_stride = rows_of(origins, 4, batch, head // C.group, DTYPE)
    v_base, v_stride = rows_of(origins, 8, batch, head // C.group, DTYPE)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=LAYOUT)
    row_sum = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    row_max = gl.full([ROWS], _NOTHING, gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    for step in range(0, pieces.masked + pieces.full):
        first_key = place(step, pieces, list_ptr, F, TILES, BLOCK_K)
        for i in range(0, BLOCK_K + zero):
            key = first_key + i
            real = key < bounds.seqlen_k
            score = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, NARROW))
            for d in range(0, C.head_dim + zero, 16):
                there = narrow_column + d < C.head_dim
                k = gl.load(
                    k_base + (keys_at + key).to(gl.int64) * k_stride + d + narrow_column,
                    mask=there & real,
                    other=0.0,
                )
                q = gl.load(q_tile + d, mask=q_real & there[None, :], other=0.0)
                score += gl.sum(q.to(gl.float32) * k.to(gl.float32)[None, :], 1)
            v = gl.load(
                v_base + (keys_at + key).to(gl.int64) * v_stride + column,
                mask=inside & real,
                other=0.0,
            ).to(gl.float32)
            if F.softcap:
                score = 1.0 - 2.0 * reciprocal(
                    1.0 + exp2_few(score * (terms[0] * 2.8853900817779268))
                )
            key_at = key_position(key, bounds.seqlen_k, batch, bounds, mask, list_ptr, F)
            seen = sees(row, key_at, bounds, mask_rows, F) & real
            score = gl.convert_layout(score, gl.SliceLayout(1, LAYOUT))
            if F.alibi:
                score -= (
                    gl.abs(row + (bounds.seqlen_k - bounds.seqlen_q - key)).to(gl.float32) * slope
                )
            score = gl.where(seen, score, float("-inf"))
            new_max = gl.maximum(row_max, score * scale)
            weight = exp2_few(score * scale - new_max)
            rescale = exp2_few(row_max - new_max)
            row_sum = row_sum * rescale + weight
            if F.dropout:
                position = row + (bounds.seqlen_k - bounds.seqlen_q)
                weight = gl.where(kept_pairs(stream, position, key, mask.rows_batch), weight, 0.0)
            row_max = new_max
            v = gl.where(gl.abs(v) < float("inf"), v, float("nan"))
            acc = acc * rescale[:, None] + gl.where(
                seen[:, None], weight[:, None] * v[None, :], 0.0
            )
    if F.dropout:
        acc = acc * keep_scale(mask.rows_batch)
    empty = row_sum == 0
    weight = gl.where(empty, 1.0, row_sum)
    lse = gl.where(empty, float("-inf"), (row_max + gl.log2(weight)) * 0.6931471805599453)
    gl.store(
        lse_ptr + (batch * work.heads + head).to(gl.int64) * total_q + (queries_at + row), lse,
        mask=row < bounds.seqlen_q,
    )  # fmt: skip
    out = (
        noted(origins, 3 * 4).to(gl.pointer_type(DTYPE))
        + (batch.to(gl.int64) * total_q * work.heads + head) * C.value_dim
    )
    stored = (row < bounds.seqlen_q)[:, None] & inside[None, :]
    places = (
        out
        + (queries_at + row).to(gl.int64)[:, None] * (work.heads * C.value_dim)
        + column[None, :]
    )
    gl.store(places, (acc / weight[:, None]).to(DTYPE), mask=stored)
