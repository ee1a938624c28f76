"""The forward kernel: online softmax over key tiles (FlashAttention-2, arXiv
2307.08691, algorithm 1).

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension of queries and
keys, Dv of values. F: launch.Features. C: launch.Tiling.
"""

import torch
import triton
import triton.language as tl

from .. import Call
from .launch import (
    LARGEST_COLUMNS,
    NOT_SPECIALISED,
    Arguments,
    Launch,
    Table,
    arguments_of,
    ceil_div,
    features_of,
    strides_of,
    table_of,
    tiling_of,
)
from .query_tile import query_tile, seen_keys
from .tile_table import Tile
from .tiles import (
    RECOMPUTE_BLOCK,
    Strided,
    has_nan,
    is_finite,
    kept,
    key_position,
    load_bias,
    load_tile,
    logits,
    sees,
    store_tile,
)
from .traversal import listed_block, position_of_step, steps

# The row maximum of a row that has seen nothing yet. Finite, so that exp2(-inf -
# maximum) is 0 and never NaN.
_NOTHING = tl.constexpr(-3.0e38)


@triton.jit
def _attend(
    acc, row_sum, row_max, q, rows, keys, bounds, pieces, head, MASKED: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    F: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Take the masked (or the unmasked) key tiles into the running output, sum
    and maximum of each row."""
    block = listed_block(0, pieces, keys.blocks, MASKED, RECOMPUTE, F, C.tiles)
    for i in tl.range(0, steps(pieces, MASKED, RECOMPUTE, C.block_k // STEP)):
        first_key = position_of_step(
            i, block, pieces, keys.blocks, MASKED, RECOMPUTE, F, C.tiles, C.block_k, STEP
        )
        block = listed_block(i + 1, pieces, keys.blocks, MASKED, RECOMPUTE, F, C.tiles)
        offset = tl.cast(first_key, tl.int64)
        left = bounds.seqlen_k - first_key
        k = load_tile(
            keys.k + offset * keys.k_row, keys.k_row, left, MASKED, STEP, C.head_dim, C.block_d
        )
        scores = tl.dot(q, tl.trans(k), input_precision=C.precision)
        key = first_key + tl.arange(0, STEP)[None, :]
        position = key_position(keys.positions, key, bounds.seqlen_k, F)
        if F.softcap or F.alibi or F.bias:
            scores, _ = logits(scores, head, rows, key, first_key, position, bounds, F)
        if MASKED:
            mask = sees(rows, key, position, bounds, True, F)
            if RECOMPUTE and F.bias:
                mask = mask & (load_bias(head, rows, key, bounds) != float("-inf"))
            scores = tl.where(mask, scores, float("-inf"))
        if F.softcap or F.alibi or F.bias:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
        else:
            # Scores stay unscaled: the scale enters with the one multiply-add that also
            # subtracts the maximum.
            new_max = tl.maximum(row_max, tl.max(scores, 1) * head.scale_log2)
            weights = tl.exp2(scores * head.scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        acc = acc * rescale[:, None]
        if F.dropout:
            weights = tl.where(
                kept(head, rows, first_key, position, False, F, C.block_q, STEP), weights, 0.0
            )
        v = load_tile(
            keys.v + offset * keys.v_row, keys.v_row, left, MASKED, STEP, C.columns, C.block_v
        )
        if RECOMPUTE:
            # 0 * NaN is NaN: keep inf and NaN out of the product; `_reached` gives them to the
            # rows that do see them.
            v = tl.where(is_finite(v), v, 0.0).to(v.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=C.precision)
    return acc, row_sum, row_max


@triton.jit
def _reached(
    reached, rows, keys, bounds, pieces, head, F: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Return `reached` plus, for each number of the output (row, column), how many inf and NaN
    values of that column of V the row sees."""
    for i in tl.range(0, steps(pieces, True, True, C.block_k // STEP), num_stages=1):
        first_key = position_of_step(
            i, 0, pieces, keys.blocks, True, True, F, C.tiles, C.block_k, STEP
        )
        key = first_key + tl.arange(0, STEP)[None, :]
        mask = sees(
            rows, key, key_position(keys.positions, key, bounds.seqlen_k, F), bounds, True, F
        )
        if F.bias:
            mask = mask & (load_bias(head, rows, key, bounds) != float("-inf"))
        offset = tl.cast(first_key, tl.int64)
        base = keys.v + offset * keys.v_row
        v = load_tile(
            base, keys.v_row, bounds.seqlen_k - first_key, True, STEP, C.columns, C.block_v
        )
        wrong = tl.where(is_finite(v), 0.0, 1.0).to(v.dtype)
        reached = tl.dot(mask.to(v.dtype), wrong, reached, input_precision=C.precision)
    return reached


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_strides, k_strides, v_strides, out_strides,
    bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
    interval_batch, positions,
    position_batch, table_rows, table_batch, table_head, table_row, blocks, heads, seqlen_q,
    seqlen_k, left, right,
    scale_log2, cap_in, cap_log2, threshold, keep_scale,
    F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Kernel: one program computes C.columns of out, and lse, of C.block_q queries of one head.
    Arguments as in dkdv_kernel."""
    call = Arguments(
        bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
        interval_batch,
        positions, position_batch, heads, seqlen_q, seqlen_k, left, right, scale_log2, cap_in,
        cap_log2, threshold,
        keep_scale,
    )  # fmt: skip
    table = Table(table_rows, table_batch, table_head, table_row, blocks)
    # Where the output is too wide for the registers, a program computes some of its columns. The
    # last ones begin where all of theirs exist, and so repeat some.
    first_column = tl.program_id(1) * (C.value_dim - C.columns)
    q = Strided(q_ptr, *q_strides)
    out = Strided(out_ptr + first_column, *out_strides)
    BLOCK_Q: tl.constexpr = C.block_q
    BLOCK_K: tl.constexpr = C.block_k
    BLOCK_D: tl.constexpr = C.block_d
    BLOCK_V: tl.constexpr = C.block_v
    k = Strided(k_ptr, *k_strides)
    v = Strided(v_ptr + first_column, *v_strides)
    head_index, batch, head, first_query, offset, query = query_tile(call, F, C)
    bounds, keys, options, rows, pieces = seen_keys(
        batch, head, first_query, query, k, v, call, table, F, C
    )
    q_base = q.pointer + batch * q.batch + head * q.head + offset * q.row
    q_tile = load_tile(
        q_base, q.row, call.seqlen_q - first_query, True, BLOCK_Q, C.head_dim, BLOCK_D
    )

    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max = tl.full([BLOCK_Q], _NOTHING, tl.float32)
    for MASKED in tl.static_range(2):
        acc, row_sum, row_max = _attend(
            acc,
            row_sum,
            row_max,
            q_tile,
            rows,
            keys,
            bounds,
            pieces,
            options,
            MASKED == 1,
            False,
            F,
            C,
            BLOCK_K,
        )
    HIDES: tl.constexpr = F.left or F.right or F.intervals or F.block_q or F.bias
    wrong = False
    if HIDES:
        wrong = has_nan(acc)
        if wrong:
            # Rare: a NaN, or an inf in a masked value (0 * inf). Compute again in small tiles,
            # without masked pairs.
            acc, row_sum, row_max = _attend(
                tl.zeros([BLOCK_Q, BLOCK_V], tl.float32), tl.zeros([BLOCK_Q], tl.float32),
                tl.full([BLOCK_Q], _NOTHING, tl.float32), q_tile, rows, keys, bounds, pieces,
                options, True, True, F,
                C, RECOMPUTE_BLOCK,
            )  # fmt: skip

    empty = row_sum == 0
    total = tl.where(empty, 1.0, row_sum)
    if F.dropout:
        acc = acc * call.keep_scale
    acc = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * 0.6931471805599453)
    lse_base = lse_ptr + tl.cast(head_index, tl.int64) * call.seqlen_q
    real = query < call.seqlen_q
    if C.value_dim > C.columns:
        real = real & (first_column == 0)
    tl.store(lse_base + query, lse, mask=real)
    out_base = out.pointer + batch * out.batch + head * out.head + offset * out.row
    store_tile(out_base, out.row, call.seqlen_q - first_query, acc, BLOCK_Q, C.columns, BLOCK_V)
    if HIDES:  # noqa: SIM102 - the first is decided while compiling, the second while running
        # A pass of its own: the two sums together would not fit the registers at Dv = 256.
        if wrong:
            zeros = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
            reached = _reached(zeros, rows, keys, bounds, pieces, options, F, C, RECOMPUTE_BLOCK)
            column = tl.arange(0, BLOCK_V)
            pointers = out_base + tl.arange(0, BLOCK_Q)[:, None] * out.row + column[None, :]
            seen = (reached > 0) & (query[:, None] < call.seqlen_q) & (column[None, :] < C.columns)
            nothing = tl.full([BLOCK_Q, BLOCK_V], float("nan"), tl.float32).to(
                out.pointer.dtype.element_ty
            )
            tl.debug_barrier()  # after the stores above, which other threads may have made
            tl.store(pointers, nothing, mask=seen)


def forward_launch(call: Call, out: torch.Tensor, lse: torch.Tensor, tile: Tile) -> Launch:
    """Return the launch that fills out (B, Sq, H, Dv) and lse (B, H, Sq)."""
    q, k, v, options = call
    batch, seqlen_q, heads, _ = q.shape
    features = features_of(options)
    columns = min(v.shape[3], LARGEST_COLUMNS)
    return Launch(
        kernel=forward_kernel,
        grid=(ceil_div(seqlen_q, tile.block_q) * batch * heads, ceil_div(v.shape[3], columns)),
        args=(
            q, k, v, out, lse, *map(strides_of, (q, k, v, out)),
            *arguments_of(call, lse).with_tables(table_of(options.mask, lse, "forward")),
        ),
        constants={"F": features, "C": tiling_of(call, features, tile, True, columns)},
        options=tile.options(),
    )  # fmt: skip
